// BlockStrategy::kPersistent: one cooperative launch.
#pragma once

#include "../kernels/block_plan.h"

namespace trtforge {

// Returns a BlockStatus as int. Zeros the plan's barrier first, in the order of the stream.
int launch_block_persistent(BlockPlan plan, Stream stream);

// The kernels of one element type, each in a source of its own so that they compile side by side. plan: with tiles.
int launch_block_half(const BlockPlan& plan, Stream stream);
int launch_block_bf16(const BlockPlan& plan, Stream stream);
int launch_block_half_s8(const BlockPlan& plan, Stream stream);
int launch_block_bf16_s8(const BlockPlan& plan, Stream stream);

}  // namespace trtforge
