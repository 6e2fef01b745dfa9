#include "block_persistent_kernels.cuh"

namespace trtforge {

int launch_block_half(const BlockPlan& plan, Stream stream) {
  return launch_block_for_head_size<half, false>(plan, stream);
}

}  // namespace trtforge
