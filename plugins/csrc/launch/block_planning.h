// From the operands of a block to the phases that compute it.
#pragma once

#include "../kernels/block_params.h"
#include "../kernels/block_plan.h"

namespace trtforge {

// Of a block that launch_block has checked. Products have TileChoice::kAuto.
BlockPlan plan_block(const BlockParams& params);

}  // namespace trtforge
