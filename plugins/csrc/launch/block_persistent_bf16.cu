#include "block_persistent_kernels.cuh"

namespace trtforge {

int launch_block_bf16(const BlockPlan& plan, Stream stream) {
  return launch_block_for_head_size<bf16, false>(plan, stream);
}

}  // namespace trtforge
