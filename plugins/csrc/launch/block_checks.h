// What launch_block refuses, and why: all that any launcher below it would, before anything is launched.
#pragma once

#include <climits>
#include <cmath>
#include <cstdint>

#include "../kernels/block_params.h"
#include "attention.h"
#include "block.h"
#include "block_status.h"
#include "gemm_checks.h"
#include "gemm_tile_choice.h"

namespace trtforge {

constexpr int64_t kMaxBlockRows = 1 << 30;  // rows are counted in int, up to a tile past the end
constexpr uintptr_t kWorkspaceAlignment = 16;

// Columns of the product that has the most.
inline int widest_product(const BlockParams& params) {
  return 3 * params.width > params.inner_width ? 3 * params.width : params.inner_width;
}

inline BlockStatus check_block_sizes(const BlockParams& params) {
  if (params.batch < 0 || params.sequence < 0 || params.width <= 0 || params.inner_width <= 0) {
    return BlockStatus::kBadSize;
  }
  if (params.width % 8 != 0 || params.inner_width % 8 != 0) return BlockStatus::kBadSize;
  if (static_cast<int64_t>(params.batch) * params.sequence > kMaxBlockRows) return BlockStatus::kTooLarge;
  if (params.width > kMaxBlockRows / 3 || params.inner_width > kMaxBlockRows) return BlockStatus::kTooLarge;
  if (params.num_heads <= 0 || params.width % params.num_heads != 0) return BlockStatus::kBadHeads;
  if (static_cast<int64_t>(params.batch) * params.num_heads > INT_MAX) return BlockStatus::kTooLarge;
  const int num_rows = params.batch * params.sequence;
  if (count_tiles<SmallTile>(num_rows, widest_product(params)) > INT_MAX) return BlockStatus::kTooLarge;
  const bool is_whole = params.width % kInt8RowAlignment == 0 && params.inner_width % kInt8RowAlignment == 0;
  return params.is_int8 && !is_whole ? BlockStatus::kBadInt8Width : BlockStatus::kOk;
}

inline BlockStatus check_block_choices(const BlockParams& params) {
  bool is_known = params.strategy == BlockStrategy::kAuto;
  for (const BlockStrategy strategy : kBlockStrategies) is_known = is_known || params.strategy == strategy;
  const bool is_ordered = params.order == NormOrder::kPre || params.order == NormOrder::kPost;
  const bool has_activation = params.activation > Activation::kNone && params.activation <= Activation::kSilu;
  return is_known && is_ordered && has_activation ? BlockStatus::kOk : BlockStatus::kBadChoice;
}

inline BlockStatus check_block_bias(const BlockParams& params) {
  const int full[4] = {params.batch, params.num_heads, params.sequence, params.sequence};
  for (int i = 0; i < 4; ++i) {
    if (params.attention_bias_dims[i] != 1 && params.attention_bias_dims[i] != full[i]) return BlockStatus::kBadBias;
  }
  return BlockStatus::kOk;
}

// Scales and epsilon, and what the int8 product can sum up.
inline int check_block_numbers(const BlockParams& params) {
  const bool is_epsilon_good = std::isfinite(params.epsilon) && params.epsilon >= 0.0f;
  GemmStatus status = is_epsilon_good ? GemmStatus::kOk : GemmStatus::kBadScale;
  for (const BlockLinear* linear : {&params.qkv, &params.out, &params.up, &params.down}) {
    if (status == GemmStatus::kOk && params.is_int8) status = check_scale(linear->input_scale);
  }
  const int deepest = params.width > params.inner_width ? params.width : params.inner_width;
  if (params.is_int8 && deepest > kMaxInt8Depth) status = GemmStatus::kTooLarge;
  return status_from_gemm(static_cast<int>(status));
}

inline int check_block_device(const BlockParams& params) {
  return status_from_gemm(
      static_cast<int>(first_failure({check_type(params.type, params.device), check_device(params.device)})));
}

inline BlockStatus check_block_pointers(const BlockParams& params) {
  for (const BlockLinear* linear : {&params.qkv, &params.out, &params.up, &params.down}) {
    if (linear->weight == nullptr || linear->bias == nullptr) return BlockStatus::kNullPointer;
    if (params.is_int8 && linear->scales == nullptr) return BlockStatus::kNullPointer;
  }
  for (const BlockNorm* norm : {&params.norm1, &params.norm2}) {
    if (norm->gamma == nullptr || norm->beta == nullptr) return BlockStatus::kNullPointer;
  }
  if (params.x == nullptr || params.y == nullptr || params.attention_bias == nullptr) return BlockStatus::kNullPointer;
  if (params.x == params.y) return BlockStatus::kAliased;
  if (params.workspace == nullptr || params.workspace_bytes < block_workspace_bytes(params)) {
    return BlockStatus::kSmallWorkspace;
  }
  const bool is_aligned = reinterpret_cast<uintptr_t>(params.workspace) % kWorkspaceAlignment == 0;
  return is_aligned ? BlockStatus::kOk : BlockStatus::kMisalignedWorkspace;
}

// All pointers before anything is launched: the persistent kernel checks none itself.
inline int check_block_memory(const BlockParams& params) {
  const BlockStatus status = check_block_pointers(params);
  if (status != BlockStatus::kOk) return static_cast<int>(status);
  GemmStatus operands = first_failure({check_pointer(params.x), check_pointer(params.y)});
  for (const BlockLinear* linear : {&params.qkv, &params.out, &params.up, &params.down}) {
    operands = first_failure({operands, check_pointer(linear->weight), check_pointer(linear->bias),
                              params.is_int8 ? check_pointer(linear->scales) : GemmStatus::kOk});
  }
  for (const BlockNorm* norm : {&params.norm1, &params.norm2}) {
    operands = first_failure({operands, check_pointer(norm->gamma), check_pointer(norm->beta)});
  }
  if (operands != GemmStatus::kOk) return status_from_gemm(static_cast<int>(operands));
  const bool is_aligned = reinterpret_cast<uintptr_t>(params.attention_bias) % sizeof(half) == 0 &&
                          reinterpret_cast<uintptr_t>(params.lengths) % alignof(int32_t) == 0;
  return status_from_attention(static_cast<int>(is_aligned ? AttentionStatus::kOk : AttentionStatus::kMisaligned));
}

}  // namespace trtforge
