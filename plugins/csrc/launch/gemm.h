// Launchers of the GEMM, LayerNorm and quantize kernels.
//
// A launcher checks everything that it is given, launches, and returns a GemmStatus as int: it never throws, exits or
// waits. Nothing is launched where it returns anything but kOk, or where a matrix has no rows (kOk).
#pragma once

#include "../kernels/device.cuh"
#include "../kernels/params_gemm.h"

namespace trtforge {

enum class GemmStatus : int {
  kOk = 0,
  kNullPointer,
  kMisaligned,
  kBadSize,
  kTooLarge,
  kBadSequence,
  kBadScale,
  kBadChoice,
  kNoBfloat16,
  kLaunchFailed,
};

// What a status means and what to do about it; never null.
const char* gemm_status_text(int status);

// The tile for an M x N product: the largest of which there are as many as the device has multiprocessors, else the
// smallest. A larger tile reads each operand less often, but only while every multiprocessor has one: with fewer, the
// small tile brings in more of the device. The result does not depend on the tile, bit for bit.
TileChoice choose_gemm_tile(int num_rows, int num_cols, int num_multiprocessors);

int launch_gemm(const GemmParams& params, Stream stream);
int launch_gemm_s8(const GemmS8Params& params, Stream stream);
int launch_layernorm(const LayerNormParams& params, Stream stream);
int launch_quantize(const QuantizeParams& params, Stream stream);

}  // namespace trtforge
