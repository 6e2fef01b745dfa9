#include "block_persistent.h"
#include "block_status.h"
#include "gemm.h"

namespace trtforge {
namespace {

// As for a launch of its own, but the kernel has no large tile.
template <typename Product>
void set_tile(Product& product) {
  const EpilogueParams& epilogue = product.epilogue;
  const TileChoice chosen =
      choose_gemm_tile(epilogue.rows.num_rows, epilogue.num_cols, product.device.num_multiprocessors);
  product.tile = chosen == TileChoice::kSmall ? TileChoice::kSmall : TileChoice::kMedium;
}

}  // namespace

int launch_block_persistent(BlockPlan plan, Stream stream) {
  for (int i = 0; i < kNumBlockProducts; ++i) {
    set_tile(plan.products[i]);
    set_tile(plan.products_s8[i]);
  }
  if (zero_memory(plan.barrier, sizeof(GridBarrier), stream) != 0) return static_cast<int>(BlockStatus::kLaunchFailed);
  const bool is_half = plan.attention.type == ElementType::kHalf;
  if (plan.is_int8) return is_half ? launch_block_half_s8(plan, stream) : launch_block_bf16_s8(plan, stream);
  return is_half ? launch_block_half(plan, stream) : launch_block_bf16(plan, stream);
}

}  // namespace trtforge
