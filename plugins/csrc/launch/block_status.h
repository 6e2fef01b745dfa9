// Statuses of the launchers below the block, as the block's.
#pragma once

#include "block.h"

namespace trtforge {

inline int status_from_gemm(int status) { return status == 0 ? 0 : static_cast<int>(BlockStatus::kFromGemm) + status; }

inline int status_from_attention(int status) {
  return status == 0 ? 0 : static_cast<int>(BlockStatus::kFromAttention) + status;
}

}  // namespace trtforge
