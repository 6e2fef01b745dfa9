// Loads a plugin library as TensorRT's registry does, and calls what TensorRT calls, without TensorRT and without a
// GPU.
//
//   adapter_probe LIB    prints one JSON document of what came back
#include <NvInferRuntime.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

using namespace nvinfer1;

namespace {

using GetCreators = IPluginCreatorInterface* const* (*)(int32_t&);
using SetLoggerFinder = void (*)(ILoggerFinder*);

// Keeps the last message that the plugin logged.
class Log final : public ILogger, public ILoggerFinder {
 public:
  void log(Severity, const char* message) noexcept override { last = message; }
  ILogger* findLogger() override { return this; }
  std::string take() {
    std::string taken;
    taken.swap(last);
    return taken;
  }

 private:
  std::string last;
};

Log log_of_plugin;

void print_text(const std::string& text) {
  std::putchar('"');
  for (const char c : text) {
    if (c == '"' || c == '\\') std::putchar('\\');
    std::putchar(c);
  }
  std::putchar('"');
}

void print_key(const char* key) { std::printf(", \"%s\": ", key); }

// The value of a field as a number; fields here are int32 or float.
double value_of(const PluginField& field) {
  if (field.type == PluginFieldType::kINT32) return *static_cast<const int32_t*>(field.data);
  return *static_cast<const float*>(field.data);
}

void print_fields(const PluginFieldCollection& fields) {
  std::putchar('{');
  for (int i = 0; i < fields.nbFields; ++i) {
    const PluginField& field = fields.fields[i];
    std::printf("%s\"%s\": [%d, %d, %.9g]", i == 0 ? "" : ", ", field.name, static_cast<int>(field.type), field.length,
                field.data == nullptr ? 0.0 : value_of(field));
  }
  std::putchar('}');
}

template <typename Capability>
Capability* capability(IPluginV3& plugin, PluginCapabilityType type) {
  return static_cast<Capability*>(plugin.getCapabilityInterface(type));
}

IPluginV3OneBuild* build_of(IPluginV3& plugin) {
  return capability<IPluginV3OneBuild>(plugin, PluginCapabilityType::kBUILD);
}
IPluginV3OneRuntime* runtime_of(IPluginV3& plugin) {
  return capability<IPluginV3OneRuntime>(plugin, PluginCapabilityType::kRUNTIME);
}

// Attributes as a parser gives them; the first may be of another type or value.
struct Attributes {
  int64_t num_heads = 4;
  float softmax_scale = 0.125f;
  float epsilon = 1e-12f;
  float scales[4] = {0.5f, 0.25f, 0.0625f, 2.0f};
  std::vector<PluginField> fields;

  explicit Attributes(bool is_int8) {
    fields.emplace_back("num_heads", &num_heads, PluginFieldType::kINT64, 1);
    fields.emplace_back("softmax_scale", &softmax_scale, PluginFieldType::kFLOAT32, 1);
    fields.emplace_back("epsilon", &epsilon, PluginFieldType::kFLOAT32, 1);
    const char* names[] = {"qkv_input_scale", "out_input_scale", "up_input_scale", "down_input_scale"};
    for (int i = 0; is_int8 && i < 4; ++i) fields.emplace_back(names[i], &scales[i], PluginFieldType::kFLOAT32, 1);
  }

  PluginFieldCollection collection() const { return {static_cast<int32_t>(fields.size()), fields.data()}; }
};

Dims dims_of(std::vector<int64_t> sizes) {
  Dims dims{};
  dims.nbDims = static_cast<int32_t>(sizes.size());
  for (size_t i = 0; i < sizes.size(); ++i) dims.d[i] = sizes[i];
  return dims;
}

DynamicPluginTensorDesc tensor_of(DataType type, const std::vector<int64_t>& sizes) {
  DynamicPluginTensorDesc tensor{};
  tensor.desc.type = type;
  tensor.desc.format = TensorFormat::kLINEAR;
  tensor.desc.dims = tensor.min = tensor.opt = tensor.max = dims_of(sizes);
  return tensor;
}

// The tensors of a block with H = 128 and F = 256, in order, then y.
std::vector<DynamicPluginTensorDesc> tensors_of(bool is_int8, bool has_lengths, DataType type, int64_t batch = 2,
                                                int64_t sequence = 5) {
  constexpr int64_t kWidth = 128, kInner = 256;
  const auto weight = [&](int64_t depth, int64_t columns) {
    return is_int8 ? tensor_of(DataType::kINT8, {columns, depth}) : tensor_of(type, {depth, columns});
  };
  const auto vector = [&](int64_t size) { return tensor_of(type, {size}); };
  std::vector<DynamicPluginTensorDesc> tensors = {tensor_of(type, {batch, sequence, kWidth}),
                                                  tensor_of(type, {batch, 1, 1, sequence}),
                                                  weight(kWidth, 3 * kWidth),
                                                  vector(3 * kWidth),
                                                  weight(kWidth, kWidth),
                                                  vector(kWidth),
                                                  vector(kWidth),
                                                  vector(kWidth),
                                                  weight(kWidth, kInner),
                                                  vector(kInner),
                                                  weight(kInner, kWidth),
                                                  vector(kWidth),
                                                  vector(kWidth),
                                                  vector(kWidth)};
  for (const int64_t columns : {3 * kWidth, kWidth, kInner, kWidth}) {
    if (is_int8) tensors.push_back(tensor_of(DataType::kFLOAT, {columns}));
  }
  if (has_lengths) tensors.push_back(tensor_of(DataType::kINT32, {batch}));
  tensors.push_back(tensors.front());
  return tensors;
}

int32_t configure(IPluginV3& plugin, const std::vector<DynamicPluginTensorDesc>& tensors) {
  const int32_t num_inputs = static_cast<int32_t>(tensors.size()) - 1;
  return build_of(plugin)->configurePlugin(tensors.data(), num_inputs, tensors.data() + num_inputs, 1);
}

int32_t change_shape(IPluginV3& plugin, const std::vector<DynamicPluginTensorDesc>& tensors) {
  std::vector<PluginTensorDesc> descs;
  for (const DynamicPluginTensorDesc& tensor : tensors) descs.push_back(tensor.desc);
  const int32_t num_inputs = static_cast<int32_t>(descs.size()) - 1;
  return runtime_of(plugin)->onShapeChange(descs.data(), num_inputs, descs.data() + num_inputs, 1);
}

size_t workspace_of(IPluginV3& plugin, const std::vector<DynamicPluginTensorDesc>& tensors) {
  const int32_t num_inputs = static_cast<int32_t>(tensors.size()) - 1;
  return build_of(plugin)->getWorkspaceSize(tensors.data(), num_inputs, tensors.data() + num_inputs, 1);
}

bool supports(IPluginV3& plugin, const std::vector<DynamicPluginTensorDesc>& tensors) {
  const int32_t num_tensors = static_cast<int32_t>(tensors.size());
  for (int32_t position = 0; position < num_tensors; ++position) {
    if (!build_of(plugin)->supportsFormatCombination(position, tensors.data(), num_tensors - 1, 1)) return false;
  }
  return true;
}

IPluginCreatorV3One* find_creator(IPluginCreatorInterface* const* creators, int32_t count, const char* name) {
  for (int32_t i = 0; i < count; ++i) {
    auto* creator = static_cast<IPluginCreatorV3One*>(creators[i]);
    if (std::strcmp(creator->getPluginName(), name) == 0) return creator;
  }
  std::fprintf(stderr, "no creator %s\n", name);
  std::exit(2);
}

std::unique_ptr<IPluginV3> create(IPluginCreatorV3One& creator, const Attributes& attributes) {
  const PluginFieldCollection fields = attributes.collection();
  return std::unique_ptr<IPluginV3>(creator.createPlugin("node", &fields, TensorRTPhase::kBUILD));
}

void print_creators(IPluginCreatorInterface* const* creators, int32_t count) {
  std::printf("{\"creators\": [");
  for (int32_t i = 0; i < count; ++i) {
    auto* creator = static_cast<IPluginCreatorV3One*>(creators[i]);
    std::printf("%s{\"name\": \"%s\", \"version\": \"%s\", \"namespace\": \"%s\", \"fields\": ", i == 0 ? "" : ",\n",
                creator->getPluginName(), creator->getPluginVersion(), creator->getPluginNamespace());
    print_fields(*creator->getFieldNames());
    std::putchar('}');
  }
  std::putchar(']');
}

// Node to plugin, plugin to engine, engine to plugin, and a clone of that: the fields that come out at the end.
void print_round_trip(IPluginCreatorV3One& creator, bool is_int8) {
  const std::unique_ptr<IPluginV3> made = create(creator, Attributes(is_int8));
  const PluginFieldCollection* stored = runtime_of(*made)->getFieldsToSerialize();
  std::unique_ptr<IPluginV3> loaded(creator.createPlugin("node", stored, TensorRTPhase::kRUNTIME));
  const std::unique_ptr<IPluginV3> copy(loaded->clone());
  loaded.reset();  // what the clone says must not point into its original
  std::printf("{\"name\": \"%s\", \"fields\": ",
              capability<IPluginV3OneCore>(*copy, PluginCapabilityType::kCORE)->getPluginName());
  print_fields(*runtime_of(*copy)->getFieldsToSerialize());
  std::printf(", \"timing_cache_id\": \"%s\"}", build_of(*copy)->getTimingCacheID());
}

void print_refusals(IPluginCreatorV3One& creator) {
  const char* separator = "";
  const auto refuse = [&](const char* name, auto change) {
    Attributes attributes(false);
    change(attributes);
    const bool is_created = create(creator, attributes) != nullptr;
    std::printf("%s\"%s\": ", separator, name);
    print_text(is_created ? "created" : log_of_plugin.take());
    separator = ", ";
  };
  std::putchar('{');
  refuse("nothing wrong", [](Attributes&) {});
  refuse("missing", [](Attributes& a) { a.fields.pop_back(); });
  refuse("wrong type", [](Attributes& a) { a.fields[0].type = PluginFieldType::kFLOAT32; });
  refuse("two values", [](Attributes& a) { a.fields[0].length = 2; });
  refuse("no heads", [](Attributes& a) { a.num_heads = 0; });
  refuse("too many heads", [](Attributes& a) { a.num_heads = int64_t{1} << 40; });
  refuse("infinite epsilon", [](Attributes& a) { a.epsilon = std::strtof("inf", nullptr); });
  refuse("negative epsilon", [](Attributes& a) { a.epsilon = -1; });
  refuse("NaN scale", [](Attributes& a) { a.softmax_scale = std::strtof("nan", nullptr); });
  std::putchar('}');
}

void print_shapes(IPluginV3& plugin, bool is_int8, bool has_lengths) {
  const auto tensors = [&](DataType type = DataType::kHALF) { return tensors_of(is_int8, has_lengths, type); };
  const auto print_problem = [&](const char* name, const std::vector<DynamicPluginTensorDesc>& given) {
    const bool is_taken = configure(plugin, given) == 0 && change_shape(plugin, given) == 0;
    std::printf(", \"%s\": ", name);
    print_text(is_taken ? "taken" : log_of_plugin.take());
  };
  std::printf("{\"workspace\": [%zu, %zu]", workspace_of(plugin, tensors()),
              workspace_of(plugin, tensors_of(is_int8, has_lengths, DataType::kHALF, 4, 64)));
  print_problem("right", tensors());
  auto given = tensors();
  given[1].desc.dims = given[1].max = dims_of({2, 5, 5});
  print_problem("mask of rank 3", given);
  given = tensors();
  given[2].desc.dims = given[2].max = dims_of({128, 128});
  print_problem("wrong weight", given);
  given = tensors();
  given[1].desc.dims = given[1].max = dims_of({2, 4, 5, 3});
  print_problem("mask of another length", given);
  given = tensors();
  given.erase(given.begin() + 4);
  print_problem("an input too few", given);

  const IDimensionExpr* x_dims[3] = {reinterpret_cast<const IDimensionExpr*>(&plugin), nullptr, nullptr};
  DimsExprs x{}, y{};
  x.nbDims = 3;
  std::memcpy(x.d, x_dims, sizeof(x_dims));
  std::vector<DimsExprs> inputs(tensors().size() - 1);
  inputs[0] = x;
  // The builder of expressions is not called: y has the shape of x.
  auto* builder = reinterpret_cast<IExprBuilder*>(&plugin);
  const int32_t status = build_of(plugin)->getOutputShapes(inputs.data(), static_cast<int32_t>(inputs.size()), nullptr,
                                                           0, &y, 1, *builder);
  std::printf(", \"y_has_shape_of_x\": %s", status == 0 && y.nbDims == 3 && y.d[0] == x.d[0] ? "true" : "false");
  const DataType input_types[] = {DataType::kBF16};
  DataType y_type = DataType::kFLOAT;
  const int32_t type_status = build_of(plugin)->getOutputDataTypes(&y_type, 1, input_types, 1);
  std::printf(", \"y_has_type_of_x\": %s", type_status == 0 && y_type == DataType::kBF16 ? "true" : "false");
  std::putchar('}');
}

void print_formats(IPluginV3& plugin, bool is_int8, bool has_lengths) {
  const auto tensors = [&](DataType type) { return tensors_of(is_int8, has_lengths, type); };
  const auto print_answer = [&](const char* name, const std::vector<DynamicPluginTensorDesc>& given) {
    std::printf(", \"%s\": %s", name, supports(plugin, given) ? "true" : "false");
  };
  std::printf("{\"half\": %s", supports(plugin, tensors(DataType::kHALF)) ? "true" : "false");
  print_answer("bf16", tensors(DataType::kBF16));
  print_answer("float", tensors(DataType::kFLOAT));
  auto given = tensors(DataType::kHALF);
  given[3].desc.type = DataType::kBF16;
  print_answer("bias of another type", given);
  given = tensors(DataType::kHALF);
  given[2].desc.type = is_int8 ? DataType::kHALF : DataType::kINT8;
  print_answer("weight of the other variant", given);
  given = tensors(DataType::kHALF);
  given[0].desc.format = TensorFormat::kCHW4;
  print_answer("x in another layout", given);
  given = tensors(DataType::kHALF);
  given.back().desc.type = DataType::kFLOAT;
  print_answer("y of another type", given);
  if (has_lengths) {
    given = tensors(DataType::kHALF);
    given[given.size() - 2].desc.type = DataType::kINT64;
    print_answer("lengths in int64", given);
  }
  std::putchar('}');
}

void print_tactics(IPluginV3& plugin) {
  const int32_t count = build_of(plugin)->getNbTactics();
  std::vector<int32_t> tactics(static_cast<size_t>(count), -1);
  const int32_t status = build_of(plugin)->getValidTactics(tactics.data(), count);
  std::printf("{\"status\": %d, \"tactics\": [", status);
  for (int32_t i = 0; i < count; ++i) std::printf("%s%d", i == 0 ? "" : ", ", tactics[static_cast<size_t>(i)]);
  std::printf("], \"set\": [");
  for (int32_t i = 0; i < count; ++i) {
    std::printf("%s%d", i == 0 ? "" : ", ", runtime_of(plugin)->setTactic(tactics[static_cast<size_t>(i)]));
  }
  std::printf("], \"set_default\": %d, \"unknown\": ", runtime_of(plugin)->setTactic(0));
  print_text(runtime_of(plugin)->setTactic(99) == 0 ? "taken" : log_of_plugin.take());
  std::putchar('}');
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  void* library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 2;
  }
  const auto get_creators = reinterpret_cast<GetCreators>(dlsym(library, "getCreators"));
  const auto set_logger_finder = reinterpret_cast<SetLoggerFinder>(dlsym(library, "setLoggerFinder"));
  if (get_creators == nullptr || set_logger_finder == nullptr) return 2;
  set_logger_finder(&log_of_plugin);
  int32_t count = 0;
  IPluginCreatorInterface* const* creators = get_creators(count);
  print_creators(creators, count);

  IPluginCreatorV3One& plain = *find_creator(creators, count, "AttentionFFN_post_gelu");
  IPluginCreatorV3One& full = *find_creator(creators, count, "AttentionFFN_pre_silu_causal_int8_lengths");
  print_key("round_trip_plain");
  print_round_trip(plain, false);
  print_key("round_trip_int8");
  print_round_trip(full, true);
  print_key("refusals");
  print_refusals(plain);
  const std::unique_ptr<IPluginV3> plain_plugin = create(plain, Attributes(false));
  const std::unique_ptr<IPluginV3> full_plugin = create(full, Attributes(true));
  print_key("shapes_plain");
  print_shapes(*plain_plugin, false, false);
  print_key("shapes_int8");
  print_shapes(*full_plugin, true, true);
  print_key("formats_plain");
  print_formats(*plain_plugin, false, false);
  print_key("formats_int8");
  print_formats(*full_plugin, true, true);
  Attributes odd_heads(false);
  odd_heads.num_heads = 8;
  const std::unique_ptr<IPluginV3> odd_plugin = create(plain, odd_heads);
  std::printf(", \"head size 16\": ");
  print_text(configure(*odd_plugin, tensors_of(false, false, DataType::kHALF)) == 0 ? "taken" : log_of_plugin.take());
  print_key("tactics");
  print_tactics(*plain_plugin);
  std::printf("}\n");
  return 0;
}
