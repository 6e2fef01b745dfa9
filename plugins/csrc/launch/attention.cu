#include <climits>
#include <cmath>
#include <cstdint>
#include <initializer_list>

#include "../kernels/attention.cuh"
#include "attention.h"
#include "attention_head_sizes.h"

namespace trtforge {

const char* attention_status_text(int status) {
  switch (static_cast<AttentionStatus>(status)) {
    case AttentionStatus::kOk:
      return "ok";
    case AttentionStatus::kNullPointer:
      return "q, k, v, bias or output is null; a model without a bias gives one zero with strides of 0";
    case AttentionStatus::kMisaligned:
      return "q, k, v or output does not start on 16 bytes, bias on 2 or lengths on 4; give it memory that does";
    case AttentionStatus::kBadSize:
      return "batch or sequence is negative, or num_heads is not positive";
    case AttentionStatus::kBadHeadSize:
      return "head_size is not 32, 64, 80, 96 or 128; run this block without the plugin";
    case AttentionStatus::kTooLarge:
      return "sequence is over 2^30, or batch * num_heads is over 2^31 - 1; split the batch";
    case AttentionStatus::kBadStride:
      return "a stride of q, k and v is negative or not a multiple of 8 elements";
    case AttentionStatus::kBadBiasStride:
      return "a stride of the bias is negative, or that of its keys is not 0 or 1";
    case AttentionStatus::kBadScale:
      return "softmax_scale is not finite, or the scale of an int8 output is not positive and finite";
    case AttentionStatus::kBadChoice:
      return "unknown element type";
    case AttentionStatus::kNoBfloat16:
      return "bf16 needs sm_80 or newer; use fp16";
    case AttentionStatus::kLaunchFailed:
      return "the launch failed; cudaGetLastError says why";
  }
  return "unknown status";
}

namespace {

constexpr int kMaxSequence = 1 << 30;  // rows and keys are counted in int, up to a tile past the end

bool is_aligned(const void* pointer, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

bool is_copy_stride(int64_t stride) { return stride >= 0 && stride % kChunkElements == 0; }

AttentionStatus check_sizes(const AttentionParams& params) {
  if (params.batch < 0 || params.sequence < 0 || params.num_heads <= 0) return AttentionStatus::kBadSize;
  if (!has_attention_kernel(params.head_size)) return AttentionStatus::kBadHeadSize;
  if (params.sequence > kMaxSequence) return AttentionStatus::kTooLarge;
  if (static_cast<int64_t>(params.batch) * params.num_heads > INT_MAX) return AttentionStatus::kTooLarge;
  if (!std::isfinite(params.softmax_scale)) return AttentionStatus::kBadScale;
  if (params.type == ElementType::kHalf) return AttentionStatus::kOk;
  if (params.type != ElementType::kBfloat16) return AttentionStatus::kBadChoice;
  return params.device.compute_capability >= 80 ? AttentionStatus::kOk : AttentionStatus::kNoBfloat16;
}

AttentionStatus check_memory(const AttentionParams& params) {
  const void* output = params.output_int8 == nullptr ? params.output : params.output_int8;
  for (const void* pointer : {params.q, params.k, params.v, output}) {
    if (pointer == nullptr) return AttentionStatus::kNullPointer;
    if (!is_aligned(pointer, kChunkBytes)) return AttentionStatus::kMisaligned;
  }
  const bool has_scale = std::isfinite(params.output_scale) && params.output_scale > 0.0f;
  if (params.output_int8 != nullptr && !has_scale) return AttentionStatus::kBadScale;
  if (params.bias == nullptr) return AttentionStatus::kNullPointer;
  if (!is_aligned(params.bias, 2) || !is_aligned(params.lengths, alignof(int32_t))) return AttentionStatus::kMisaligned;
  for (const int64_t stride : {params.batch_stride, params.row_stride, params.head_stride}) {
    if (!is_copy_stride(stride)) return AttentionStatus::kBadStride;
  }
  for (const int64_t stride : {params.bias_batch_stride, params.bias_head_stride, params.bias_row_stride}) {
    if (stride < 0) return AttentionStatus::kBadBiasStride;
  }
  const bool is_row_or_value = params.bias_key_stride == 0 || params.bias_key_stride == 1;
  return is_row_or_value ? AttentionStatus::kOk : AttentionStatus::kBadBiasStride;
}

template <typename T, int kHeadSize, bool kIsCausal>
int launch_kernel_for(const AttentionParams& params, Stream stream) {
  using Tile = AttentionTile<T, kHeadSize>;
  const int64_t num_tiles = count_attention_tiles<Tile>(params);
  const unsigned num_blocks = static_cast<unsigned>(num_tiles < INT_MAX ? num_tiles : INT_MAX);
  const int error = TRTFORGE_LAUNCH((attention_kernel<Tile, kIsCausal>), dim3(num_blocks), dim3(Tile::kThreads),
                                    sizeof(typename Tile::Shared), stream, params);
  return static_cast<int>(error == 0 ? AttentionStatus::kOk : AttentionStatus::kLaunchFailed);
}

template <typename T, bool kIsCausal>
int launch_for_head_size(const AttentionParams& params, Stream stream) {
  return launch_with_head_size(params.head_size, [&](auto head_size) {
    return launch_kernel_for<T, decltype(head_size)::value, kIsCausal>(params, stream);
  });
}

template <typename T>
int launch_for_mask(const AttentionParams& params, Stream stream) {
  return params.is_causal ? launch_for_head_size<T, true>(params, stream)
                          : launch_for_head_size<T, false>(params, stream);
}

}  // namespace

int launch_attention(const AttentionParams& params, Stream stream) {
  const AttentionStatus sizes = check_sizes(params);
  if (sizes != AttentionStatus::kOk || params.batch == 0 || params.sequence == 0) return static_cast<int>(sizes);
  const AttentionStatus memory = check_memory(params);
  if (memory != AttentionStatus::kOk) return static_cast<int>(memory);
  return params.type == ElementType::kHalf ? launch_for_mask<half>(params, stream)
                                           : launch_for_mask<bf16>(params, stream);
}

}  // namespace trtforge
