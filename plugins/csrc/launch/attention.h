// Launcher of the attention kernel.
//
// It checks everything that it is given, launches, and returns an AttentionStatus as int: it never throws, exits or
// waits. Nothing is launched where it returns anything but kOk, or where there are no rows (kOk).
#pragma once

#include "../kernels/attention_params.h"
#include "../kernels/device.cuh"

namespace trtforge {

enum class AttentionStatus : int {
  kOk = 0,
  kNullPointer,
  kMisaligned,
  kBadSize,
  kBadHeadSize,
  kTooLarge,
  kBadStride,
  kBadBiasStride,
  kBadScale,
  kBadChoice,
  kNoBfloat16,
  kLaunchFailed,
};

// What a status means and what to do about it; never null.
const char* attention_status_text(int status);

int launch_attention(const AttentionParams& params, Stream stream);

}  // namespace trtforge
