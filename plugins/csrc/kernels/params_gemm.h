// What the GEMM, LayerNorm and quantize kernels are told. Plain data: shared by host, device and emulator.
//
// Every matrix is row-major. "T" is the element type named by `type`: half or bf16. Pointers are 16-byte aligned.
// A row of activations is one token: M = number of sequences x sequence_length.
//
// The kernels mark no pointer __restrict__: the compiler would then be free to read activations through the read-only
// cache, which does not see what other blocks of the same launch wrote, as they do where a GEMM is one phase of
// several.
#pragma once

#include <cstdint>

namespace trtforge {

enum class ElementType : int { kHalf = 0, kBfloat16 = 1 };

enum class Activation : int { kNone = 0, kGelu = 1, kGeluTanh = 2, kRelu = 3, kSilu = 4 };

// The block tiles of tile.cuh. kAuto: choose_gemm_tile in launch/gemm.h decides.
enum class TileChoice : int { kAuto = 0, kSmall = 1, kMedium = 2, kLarge = 3 };

// The device that a kernel is launched on, as far as launchers need to know it.
struct DeviceTraits {
  int compute_capability;   // 10 * major + minor, as in sm_86
  int num_multiprocessors;  // the choice of tile depends on it
};

// The rows of an activation matrix, and which of them are padding.
struct RowSet {
  int num_rows;            // M
  int sequence_length;     // S; M is a multiple of it. Read only with lengths
  const int32_t* lengths;  // [M / S] or null: row b * S + s is padding where s >= lengths[b]. Padding is never read
};

// C = activation(A x B + bias) + residual, in float, rounded once. Rows of padding are zero.
struct EpilogueParams {
  void* c;               // [M, N] T
  const void* bias;      // [N] T or null
  const void* residual;  // [M, N] T or null; may be c itself: each element is read by the thread that writes it
  RowSet rows;           // of A, C and residual
  int num_cols;          // N, a multiple of 8
  Activation activation;
};

struct GemmParams {
  const void* a;  // [M, K] T
  const void* b;  // [K, N] T, as an ONNX MatMul has it
  int depth;      // K, a multiple of 8
  EpilogueParams epilogue;
  ElementType type;
  TileChoice tile;
  DeviceTraits device;
};

// Rows of int8 matrices start at multiples of 16 bytes, since cp.async and ldmatrix move 16 bytes.
constexpr int kInt8RowAlignment = 16;

// Products are at most 128 * 128: with this K their sum fits int32.
constexpr int kMaxInt8Depth = 131071;

// A and B in int8, products summed exactly in int32. An element stands for value * scale.
struct GemmS8Params {
  const int8_t* a;        // [M, K], rows int8_row_bytes(K) apart; bytes between K and that are ignored
  const int8_t* b;        // [N, K], rows int8_row_bytes(K) apart, zero from K on: an ONNX weight [K, N] transposed
  const float* b_scales;  // [N]
  float a_scale;          // of the whole of A
  int depth;              // K, a multiple of 8
  EpilogueParams epilogue;
  int8_t* c_int8;    // [M, N], rows int8_row_bytes(N) apart, or null. Where given it is written in place of epilogue.c
  float c_scale;     // of c_int8: an element is clamp(round_half_to_even(value / c_scale), -128, 127)
  ElementType type;  // of bias, residual and c
  TileChoice tile;
  DeviceTraits device;
};

// y = (x - mean) / sqrt(variance + epsilon) * gamma + beta over each row; rows of padding are zero.
struct LayerNormParams {
  const void* x;      // [M, H] T
  const void* gamma;  // [H] T
  const void* beta;   // [H] T or null
  void* y;            // [M, H] T or null; may be x
  int8_t* y_int8;     // [M, H], rows int8_row_bytes(H) apart, or null: y / y_scale as the next GEMM's A
  float y_scale;
  float epsilon;
  RowSet rows;
  int width;  // H, a multiple of 8
  ElementType type;
  DeviceTraits device;
};

// y_int8 = clamp(round_half_to_even(x / scale), -128, 127); rows of padding are zero.
struct QuantizeParams {
  const void* x;   // [M, H] T
  int8_t* y_int8;  // [M, H], rows int8_row_bytes(H) apart
  float scale;
  RowSet rows;
  int width;  // H, a multiple of 8
  ElementType type;
  DeviceTraits device;
};

}  // namespace trtforge
