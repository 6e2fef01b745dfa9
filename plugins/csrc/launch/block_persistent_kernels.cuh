// The launch of the persistent kernel of one element type; a source that includes this instantiates its kernels.
#pragma once

#include "../kernels/block.cuh"
#include "attention_head_sizes.h"
#include "block_persistent.h"
#include "block_status.h"
#include "gemm_tile_choice.h"

namespace trtforge {

template <typename Product>
int64_t count_product_tiles(const Product& product) {
  const EpilogueParams& epilogue = product.epilogue;
  return product.tile == TileChoice::kSmall ? count_tiles<SmallTile>(epilogue.rows.num_rows, epilogue.num_cols)
                                            : count_tiles<MediumTile>(epilogue.rows.num_rows, epilogue.num_cols);
}

// The most blocks that any phase has work for.
template <typename AttentionTile>
int64_t count_useful_blocks(const BlockPlan& plan) {
  int64_t most = count_attention_tiles<AttentionTile>(plan.attention);
  const int64_t row_blocks = ceil_div(plan.attention.batch * plan.attention.sequence, kRowsPerBlock);
  if (row_blocks > most) most = row_blocks;
  for (int i = 0; i < kNumBlockProducts; ++i) {
    const int64_t tiles =
        plan.is_int8 ? count_product_tiles(plan.products_s8[i]) : count_product_tiles(plan.products[i]);
    if (tiles > most) most = tiles;
  }
  return most;
}

template <typename AttentionTile, bool kIsInt8>
int launch_block_kernel(const BlockPlan& plan, Stream stream) {
  constexpr std::size_t kSharedBytes = sizeof(BlockShared<AttentionTile>);
  static_assert(kSharedBytes <= 48 * 1024, "what count_resident_blocks and every target admit");
  static_assert(AttentionTile::kThreads == kBlockThreads && kRowThreads == kBlockThreads, "one block runs all phases");
  int resident = 0;
  int error = count_resident_blocks(&resident, block_kernel<AttentionTile, kIsInt8>, kBlockThreads, kSharedBytes);
  if (error != 0) return static_cast<int>(BlockStatus::kLaunchFailed);
  if (resident < 1) return static_cast<int>(BlockStatus::kNotResident);
  const int64_t most = static_cast<int64_t>(resident) * plan.attention.device.num_multiprocessors;
  const int64_t useful = count_useful_blocks<AttentionTile>(plan);
  const dim3 grid(static_cast<unsigned>(useful < most ? useful : most));
  error = TRTFORGE_LAUNCH_COOPERATIVE((block_kernel<AttentionTile, kIsInt8>), grid, dim3(kBlockThreads), kSharedBytes,
                                      stream, plan);
  return static_cast<int>(error == 0 ? BlockStatus::kOk : BlockStatus::kLaunchFailed);
}

template <typename T, bool kIsInt8>
int launch_block_for_head_size(const BlockPlan& plan, Stream stream) {
  return launch_with_head_size(plan.attention.head_size, [&](auto head_size) {
    return launch_block_kernel<AttentionTile<T, decltype(head_size)::value>, kIsInt8>(plan, stream);
  });
}

}  // namespace trtforge
