// From the accumulators of an mma tile to rows of C: bias, activation, residual, one rounding, one store.
//
// An m16n8 accumulator gives a lane 2 adjacent columns of 2 rows, so that a direct store would write 4 bytes a lane and
// half of each 32-byte sector. Instead the 4 lanes of a quad, which hold the same rows, exchange what they have of 4
// neighbouring accumulators (32 columns): a 4 x 4 transpose in registers, after which each lane holds 8 adjacent
// columns, 16 bytes of half or bf16, and a quad reads and writes 64 bytes in a row. No shared memory and no barrier is
// needed, and the values stay in float (int32) until the last rounding.
#pragma once

#include <cmath>
#include <cstdint>

#include "chunk.cuh"
#include "device.cuh"
#include "params_gemm.h"
#include "rows.cuh"
#include "tile.cuh"

namespace trtforge {

constexpr int kQuadCols = 4 * kMmaCols;

TF_DEVICE float apply_activation(Activation activation, float x) {
  switch (activation) {
    case Activation::kGelu: {
      constexpr float kInverseSqrt2 = 0.70710678118654752f;
      return 0.5f * x * (1.0f + erff(x * kInverseSqrt2));
    }
    case Activation::kGeluTanh: {
      constexpr float kSqrt2OverPi = 0.79788456080286536f;
      return 0.5f * x * (1.0f + tanhf(kSqrt2OverPi * (x + 0.044715f * x * x * x)));
    }
    case Activation::kRelu:
      return x < 0.0f ? 0.0f : x;  // fmaxf would turn NaN into 0
    case Activation::kSilu:
      return x / (1.0f + expf(-x));
    case Activation::kNone:
      break;
  }
  return x;
}

// Swaps `low` of the odd lane with `high` of the even lane of each pair of lanes that differ in bit `mask`.
template <typename Value>
TF_DEVICE void exchange(Value& low, Value& high, int lane, int mask) {
  const bool is_odd = (lane & mask) != 0;
  const Value received = __shfl_xor_sync(kFullWarp, is_odd ? low : high, mask);
  if (is_odd) {
    low = received;
  } else {
    high = received;
  }
}

// In: pairs[j] holds columns 8 j + 2 t and the next, of lane t of a quad. Out: columns 8 t .. 8 t + 7 in order.
// Every lane of the warp takes part.
template <typename Value>
TF_DEVICE void transpose_quad(Value (&pairs)[4][2], int lane) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    exchange(pairs[0][e], pairs[1][e], lane, 1);
    exchange(pairs[2][e], pairs[3][e], lane, 1);
    exchange(pairs[0][e], pairs[2][e], lane, 2);
    exchange(pairs[1][e], pairs[3][e], lane, 2);
  }
}

// sums[i] = sums[i + 1] for all but the last.
template <typename Value, int kDown, int kAcross>
TF_DEVICE void move_up(Value (&sums)[kDown][kAcross][4]) {
#pragma unroll
  for (int i = 0; i + 1 < kDown; ++i) {
#pragma unroll
    for (int j = 0; j < kAcross; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[i][j][e] = sums[i + 1][j][e];
    }
  }
}

// Calls write(row, col, chunk) for every chunk of 8 columns of C that the calling lane holds after the exchange and
// that lies inside C; chunk: Value[4][2], row and col: of C. Uses `sums` up.
//
// The loop over rows of accumulators is not unrolled, and so has to find its accumulators in the same registers each
// time: they move up. Unrolled, the activation's code would stand there 128 times and overflow the instruction cache.
template <typename Tile, typename Value, typename Write>
TF_DEVICE void for_each_chunk(Value (&sums)[Tile::kMmasDown][Tile::kMmasAcross][4], int first_row, int first_col,
                              const EpilogueParams& params, Write write) {
  const WarpPart<Tile> warp;
#pragma unroll 1
  for (int i = 0; i < Tile::kMmasDown; ++i) {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const int row = first_row + warp.row + i * kMmaRows + upper * 8 + warp.lane / 4;
#pragma unroll
      for (int group = 0; group < Tile::kMmasAcross / 4; ++group) {
        Value chunk[4][2];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          chunk[j][0] = sums[0][4 * group + j][2 * upper];
          chunk[j][1] = sums[0][4 * group + j][2 * upper + 1];
        }
        transpose_quad(chunk, warp.lane);
        const int col = first_col + warp.col + group * kQuadCols + warp.lane % 4 * kChunkElements;
        if (row < params.rows.num_rows && col < params.num_cols) write(row, col, chunk);
      }
    }
    move_up(sums);
  }
}

// values = activation(values + bias) + residual. values: columns col .. col + 7 of row `row`.
template <typename T>
TF_DEVICE void finish_chunk(float (&values)[kChunkElements], const EpilogueParams& params, int row, int col) {
  float addend[kChunkElements];
  if (params.bias != nullptr) {
    load_chunk(addend, static_cast<const T*>(params.bias) + col);
#pragma unroll
    for (int i = 0; i < kChunkElements; ++i) values[i] += addend[i];
  }
  if (params.activation != Activation::kNone) {
#pragma unroll
    for (int i = 0; i < kChunkElements; ++i) values[i] = apply_activation(params.activation, values[i]);
  }
  if (params.residual != nullptr) {
    load_chunk(addend, static_cast<const T*>(params.residual) + static_cast<int64_t>(row) * params.num_cols + col);
#pragma unroll
    for (int i = 0; i < kChunkElements; ++i) values[i] += addend[i];
  }
}

}  // namespace trtforge
