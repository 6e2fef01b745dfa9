#include "operands.h"

namespace trtforge {
namespace {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::PluginTensorDesc;

bool is_type_allowed(InputKind kind, bool is_int8, DataType type, DataType block_type) {
  switch (kind) {
    case InputKind::kValue:
      return type == block_type;
    case InputKind::kWeight:
      return type == (is_int8 ? DataType::kINT8 : block_type);
    case InputKind::kScale:
      return type == DataType::kFLOAT;
    case InputKind::kLengths:
      break;
  }
  return type == DataType::kINT32;
}

std::string text_of(const Dims& dims) {
  std::string text = "[";
  for (int i = 0; i < dims.nbDims; ++i) text += (i == 0 ? "" : ", ") + std::to_string(dims.d[i]);
  return text + "]";
}

// The dims that an input has to have. Those of attention_bias are checked where it is launched.
std::vector<int64_t> dims_of(BlockInput input, bool is_int8, int64_t batch, int64_t width, int64_t inner) {
  const auto weight = [&](int64_t depth, int64_t columns) {
    return is_int8 ? std::vector<int64_t>{columns, depth} : std::vector<int64_t>{depth, columns};
  };
  switch (input) {
    case BlockInput::kQkvWeight:
      return weight(width, 3 * width);
    case BlockInput::kOutWeight:
      return weight(width, width);
    case BlockInput::kUpWeight:
      return weight(width, inner);
    case BlockInput::kDownWeight:
      return weight(inner, width);
    case BlockInput::kQkvBias:
    case BlockInput::kQkvScale:
      return {3 * width};
    case BlockInput::kUpBias:
    case BlockInput::kUpScale:
      return {inner};
    case BlockInput::kLengths:
      return {batch};
    case BlockInput::kX:
    case BlockInput::kAttentionBias:
      return {};
    default:
      return {width};
  }
}

std::string check_dims(const InputField& field, const Dims& dims, const std::vector<int64_t>& expected) {
  const auto given = [&] { return std::string(field.name) + " has shape " + text_of(dims); };  // enqueue comes here
  if (dims.nbDims != field.rank) return given() + "; its rank has to be " + std::to_string(field.rank);
  for (size_t i = 0; i < expected.size(); ++i) {
    if (dims.d[i] != expected[i]) {
      return given() + "; dim " + std::to_string(i) + " has to be " + std::to_string(expected[i]);
    }
  }
  for (int i = 0; i < dims.nbDims; ++i) {
    if (dims.d[i] < 0 || dims.d[i] > INT32_MAX) return given() + ", which is not known or too large";
  }
  return "";
}

BlockLinear* linear_of(BlockParams& params, BlockInput input) {
  switch (input) {
    case BlockInput::kQkvWeight:
    case BlockInput::kQkvBias:
    case BlockInput::kQkvScale:
      return &params.qkv;
    case BlockInput::kOutWeight:
    case BlockInput::kOutBias:
    case BlockInput::kOutScale:
      return &params.out;
    case BlockInput::kUpWeight:
    case BlockInput::kUpBias:
    case BlockInput::kUpScale:
      return &params.up;
    default:
      return &params.down;
  }
}

void set_pointer(BlockParams& params, const InputField& field, const void* pointer) {
  switch (field.input) {
    case BlockInput::kX:
      params.x = pointer;
      return;
    case BlockInput::kAttentionBias:
      params.attention_bias = pointer;
      return;
    case BlockInput::kLengths:
      params.lengths = static_cast<const int32_t*>(pointer);
      return;
    case BlockInput::kNorm1Gamma:
      params.norm1.gamma = pointer;
      return;
    case BlockInput::kNorm1Beta:
      params.norm1.beta = pointer;
      return;
    case BlockInput::kNorm2Gamma:
      params.norm2.gamma = pointer;
      return;
    case BlockInput::kNorm2Beta:
      params.norm2.beta = pointer;
      return;
    default:
      break;
  }
  BlockLinear& linear = *linear_of(params, field.input);
  if (field.kind == InputKind::kWeight) {
    linear.weight = pointer;
  } else if (field.kind == InputKind::kScale) {
    linear.scales = static_cast<const float*>(pointer);
  } else {
    linear.bias = pointer;
  }
}

}  // namespace

int find_input(const BlockVariant& variant, BlockInput input) {
  const std::vector<InputField> fields = inputs_of(variant);
  for (size_t i = 0; i < fields.size(); ++i) {
    if (fields[i].input == input) return static_cast<int>(i);
  }
  return -1;
}

bool is_supported_format(const BlockVariant& variant, const std::vector<PluginTensorDesc>& tensors, int position) {
  const PluginTensorDesc& tensor = tensors[static_cast<size_t>(position)];
  if (tensor.format != nvinfer1::TensorFormat::kLINEAR) return false;
  const DataType block_type = tensors.front().type;
  if (block_type != DataType::kHALF && block_type != DataType::kBF16) return false;
  const std::vector<InputField> fields = inputs_of(variant);
  if (static_cast<size_t>(position) >= fields.size()) return tensor.type == block_type;  // y
  return is_type_allowed(fields[static_cast<size_t>(position)].kind, variant.is_int8, tensor.type, block_type);
}

std::string describe_block(const BlockVariant& variant, const BlockAttributes& attributes,
                           const std::vector<PluginTensorDesc>& inputs, BlockParams& params) {
  const std::vector<InputField> fields = inputs_of(variant);
  if (inputs.size() != fields.size()) {
    return "the node has " + std::to_string(inputs.size()) + " inputs; it has to have " + std::to_string(fields.size());
  }
  const auto dims_at = [&](BlockInput input) { return inputs[static_cast<size_t>(find_input(variant, input))].dims; };
  const Dims x = dims_at(BlockInput::kX);
  const Dims bias = dims_at(BlockInput::kAttentionBias);
  const Dims up_bias = dims_at(BlockInput::kUpBias);
  const int64_t width = x.nbDims == 3 ? x.d[2] : 0;
  const int64_t inner = up_bias.nbDims == 1 ? up_bias.d[0] : 0;
  for (size_t i = 0; i < fields.size(); ++i) {
    const std::vector<int64_t> expected = dims_of(fields[i].input, variant.is_int8, x.d[0], width, inner);
    const std::string problem = check_dims(fields[i], inputs[i].dims, expected);
    if (!problem.empty()) return problem;
  }
  params = {};
  for (int i = 0; i < 4; ++i) params.attention_bias_dims[i] = static_cast<int>(bias.d[i]);
  params.batch = static_cast<int>(x.d[0]);
  params.sequence = static_cast<int>(x.d[1]);
  params.width = static_cast<int>(width);
  params.inner_width = static_cast<int>(inner);
  params.num_heads = attributes.num_heads;
  params.softmax_scale = attributes.softmax_scale;
  params.epsilon = attributes.epsilon;
  params.qkv.input_scale = attributes.qkv_input_scale;
  params.out.input_scale = attributes.out_input_scale;
  params.up.input_scale = attributes.up_input_scale;
  params.down.input_scale = attributes.down_input_scale;
  params.activation = variant.activation;
  params.order = variant.order;
  params.type = inputs.front().type == DataType::kBF16 ? ElementType::kBfloat16 : ElementType::kHalf;
  params.is_causal = variant.is_causal;
  params.is_int8 = variant.is_int8;
  return "";
}

void set_pointers(const BlockVariant& variant, void const* const* inputs, BlockParams& params) {
  const std::vector<InputField> fields = inputs_of(variant);
  for (size_t i = 0; i < fields.size(); ++i) set_pointer(params, fields[i], inputs[i]);
}

}  // namespace trtforge
