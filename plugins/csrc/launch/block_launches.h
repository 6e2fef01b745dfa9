// BlockStrategy::kLaunches: one launch a phase.
#pragma once

#include "../kernels/block_plan.h"

namespace trtforge {

// Returns a BlockStatus as int; the first launch that fails is the last.
int launch_block_phases(const BlockPlan& plan, Stream stream);

}  // namespace trtforge
