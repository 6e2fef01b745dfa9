// Runs one attention launch on the emulator. Arguments are name=value; stdin holds q, k, v (or packed qkv), the bias
// and, where given, the lengths, as raw bytes; stdout gets the raw output, stderr the launcher's text where it refuses.
//
// Each tensor lies in a heap block of exactly its size, so that AddressSanitizer sees every read past an end. The
// output starts as 0xff bytes (NaN), so that an element that was not written shows.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>

#include "kernels/attention.cuh"
#include "launch/attention.h"

namespace {

using namespace trtforge;

using Arguments = std::map<std::string, std::string>;

Arguments read_arguments(int count, char** values) {
  Arguments arguments;
  for (int i = 1; i < count; ++i) {
    const std::string text = values[i];
    const std::size_t equals = text.find('=');
    arguments[text.substr(0, equals)] = text.substr(equals + 1);
  }
  return arguments;
}

int64_t number(const Arguments& arguments, const std::string& name, int64_t otherwise) {
  const auto found = arguments.find(name);
  return found == arguments.end() ? otherwise : std::atoll(found->second.c_str());
}

struct Block {
  std::unique_ptr<unsigned char, decltype(&std::free)> bytes{nullptr, std::free};
  std::size_t size = 0;

  explicit Block(std::size_t num_bytes) : bytes(static_cast<unsigned char*>(std::malloc(num_bytes)), std::free) {
    size = num_bytes;
    std::memset(bytes.get(), 0xff, size);
  }

  const Block& fill_from_input() const {
    if (std::fread(bytes.get(), 1, size, stdin) != size) {
      std::fprintf(stderr, "stdin ended early\n");
      std::exit(2);
    }
    return *this;
  }
};

struct BiasShape {
  int64_t dims[4] = {1, 1, 1, 1};

  explicit BiasShape(const std::string& text) {
    std::sscanf(text.c_str(), "%ld,%ld,%ld,%ld", &dims[0], &dims[1], &dims[2], &dims[3]);
  }

  int64_t count() const { return dims[0] * dims[1] * dims[2] * dims[3]; }

  int64_t stride(int axis) const {
    int64_t elements = 1;
    for (int inner = axis + 1; inner < 4; ++inner) elements *= dims[inner];
    return dims[axis] == 1 ? 0 : elements;
  }
};

// The kernel as a persistent one would use it: `num_blocks` blocks that each take several tiles. Half and D = 64 only.
int launch_small_grid(const AttentionParams& params, unsigned num_blocks) {
  using Tile = AttentionTile<half, 64>;
  const std::size_t shared_bytes = sizeof(Tile::Shared);
  return params.is_causal ? TRTFORGE_LAUNCH((attention_kernel<Tile, true>), dim3(num_blocks), dim3(Tile::kThreads),
                                            shared_bytes, nullptr, params)
                          : TRTFORGE_LAUNCH((attention_kernel<Tile, false>), dim3(num_blocks), dim3(Tile::kThreads),
                                            shared_bytes, nullptr, params);
}

AttentionParams params_from(const Arguments& arguments, const BiasShape& bias, bool is_packed) {
  AttentionParams params = {};
  params.batch = static_cast<int>(number(arguments, "batch", 1));
  params.sequence = static_cast<int>(number(arguments, "sequence", 1));
  params.num_heads = static_cast<int>(number(arguments, "num_heads", 1));
  params.head_size = static_cast<int>(number(arguments, "head_size", 64));
  const int64_t width = static_cast<int64_t>(params.num_heads) * params.head_size;
  params.row_stride = number(arguments, "row_stride", is_packed ? 3 * width : width);
  params.head_stride = number(arguments, "head_stride", params.head_size);
  params.batch_stride = number(arguments, "batch_stride", params.sequence * params.row_stride);
  params.bias_batch_stride = bias.stride(0);
  params.bias_head_stride = bias.stride(1);
  params.bias_row_stride = number(arguments, "bias_row_stride", bias.stride(2));
  params.bias_key_stride = static_cast<int>(number(arguments, "bias_key_stride", bias.stride(3)));
  const auto scale = arguments.find("softmax_scale");
  params.softmax_scale = scale == arguments.end() ? 1.0f : std::strtof(scale->second.c_str(), nullptr);
  params.type = static_cast<ElementType>(number(arguments, "type", 0));
  params.is_causal = number(arguments, "causal", 0) != 0;
  params.device.compute_capability = static_cast<int>(number(arguments, "compute_capability", 80));
  return params;
}

void forget_pointer(AttentionParams& params, const std::string& name) {
  if (name == "q") params.q = nullptr;
  if (name == "k") params.k = nullptr;
  if (name == "v") params.v = nullptr;
  if (name == "bias") params.bias = nullptr;
  if (name == "output") params.output = nullptr;
}

}  // namespace

int main(int count, char** values) {
  const Arguments arguments = read_arguments(count, values);
  const bool is_packed = number(arguments, "packed", 0) != 0;
  const BiasShape bias_shape(arguments.count("bias_shape") ? arguments.at("bias_shape") : "1,1,1,1");
  AttentionParams params = params_from(arguments, bias_shape, is_packed);

  constexpr std::size_t kElementBytes = 2;
  const auto has_rows = [](int value) { return value > 0 ? static_cast<std::size_t>(value) : 0; };
  const std::size_t width = has_rows(params.num_heads) * params.head_size * kElementBytes;
  const std::size_t tensor_bytes = has_rows(params.batch) * has_rows(params.sequence) * width;
  const Block first(is_packed ? 3 * tensor_bytes : tensor_bytes);
  const Block second(is_packed ? 0 : tensor_bytes);
  const Block third(is_packed ? 0 : tensor_bytes);
  const Block bias(static_cast<std::size_t>(bias_shape.count()) * kElementBytes);
  const bool has_lengths = number(arguments, "has_lengths", 0) != 0;
  const Block lengths(has_lengths ? has_rows(params.batch) * sizeof(int32_t) : 0);
  for (const Block* block : {&first, &second, &third, &bias, &lengths}) block->fill_from_input();
  const bool has_codes = arguments.count("output_scale") != 0;  // int8, a byte each
  const Block output(has_codes ? tensor_bytes / kElementBytes : tensor_bytes);

  params.q = first.bytes.get();
  params.k = is_packed ? first.bytes.get() + width : second.bytes.get();
  params.v = is_packed ? first.bytes.get() + 2 * width : third.bytes.get();
  params.bias = bias.bytes.get();
  params.lengths = has_lengths ? reinterpret_cast<const int32_t*>(lengths.bytes.get()) : nullptr;
  params.output = output.bytes.get() + number(arguments, "output_offset_bytes", 0);
  if (has_codes) {
    params.output_int8 = reinterpret_cast<int8_t*>(params.output);
    params.output = nullptr;
    params.output_scale = std::strtof(arguments.at("output_scale").c_str(), nullptr);
  }
  if (arguments.count("null")) forget_pointer(params, arguments.at("null"));

  const int64_t num_blocks = number(arguments, "num_blocks", 0);
  const int status =
      num_blocks > 0 ? launch_small_grid(params, static_cast<unsigned>(num_blocks)) : launch_attention(params, nullptr);
  if (status != 0) {
    std::fprintf(stderr, "%s\n", attention_status_text(status));
    return 10 + status;
  }
  std::fwrite(output.bytes.get(), 1, output.size, stdout);
  return 0;
}
