#include "block_persistent_kernels.cuh"

namespace trtforge {

int launch_block_half_s8(const BlockPlan& plan, Stream stream) {
  return launch_block_for_head_size<half, true>(plan, stream);
}

}  // namespace trtforge
