// Where the intermediate tensors of a block lie in its workspace, and the barrier of the persistent kernel.
#pragma once

#include <cstddef>

#include "../kernels/block_params.h"
#include "../kernels/device.cuh"

namespace trtforge {

constexpr size_t kRegionAlignment = 256;  // bytes; a region starts on a cache line of its own

// Tensors that are never needed at the same time share a region:
//   wide     qkv [B, S, 3, N, D] T until attention has read it, then the activated inner [B, S, F], T or int8
//   narrow   T: norm1(x), then the context [B, S, H], then the input of the FFN; of an int8 block the last alone
//   codes    int8 blocks: the input of the next product [B, S, H], in the same order
//   barrier  of the persistent kernel; there for either strategy, so that a workspace made for one serves the other
// Sums of the residual stream are in y.
struct BlockWorkspace {
  size_t narrow_offset;
  size_t codes_offset;
  size_t barrier_offset;
  size_t num_bytes;

  explicit BlockWorkspace(const BlockParams& params) {
    constexpr size_t kElementBytes = 2;
    const size_t num_rows = static_cast<size_t>(params.batch) * static_cast<size_t>(params.sequence);
    const size_t width = static_cast<size_t>(params.width);
    const size_t qkv_bytes = 3 * width * kElementBytes;
    const size_t inner_bytes = static_cast<size_t>(params.inner_width) * (params.is_int8 ? 1 : kElementBytes);
    narrow_offset = round_up(num_rows * (qkv_bytes > inner_bytes ? qkv_bytes : inner_bytes));
    codes_offset = narrow_offset + round_up(num_rows * width * kElementBytes);
    barrier_offset = codes_offset + (params.is_int8 ? round_up(num_rows * width) : 0);
    num_bytes = barrier_offset + round_up(sizeof(GridBarrier));
  }

 private:
  static size_t round_up(size_t bytes) { return (bytes + kRegionAlignment - 1) / kRegionAlignment * kRegionAlignment; }
};

}  // namespace trtforge
