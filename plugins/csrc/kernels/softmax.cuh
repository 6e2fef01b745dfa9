// Softmax over keys that arrive tile by tile (the online softmax of Milakov and Gimelshein, arXiv:1805.02867, used for
// attention as in FlashAttention-2, arXiv:2307.08691).
//
// For one row with scores x_j and values v_j, over the keys seen so far:
//     m = max x_j      l = sum exp(x_j - m)      o = sum exp(x_j - m) v_j
// A new tile with maximum t gives m' = max(m, t) and c = exp(m - m'); then
//     l' = c l + sum_tile exp(x_j - m')      o' = c o + sum_tile exp(x_j - m') v_j
// and after the last tile the row is o / l. Nothing but m, l and o outlives a tile.
//
// exp(x - m) is 2^((x - m) * log2 e). The difference is taken first: folding log2 e into the scores would overflow a
// bf16 mask of -3.39e38, and would cost a fp16 mask of -65504 the bits that tell its keys apart.
//
// Extremes, each as Softmax(scores + bias) has them:
//   - every key has a finite mask: m is about that mask, and the weights are what the scores' difference gives;
//   - NaN anywhere in a row: fmaxf passes over it, exp keeps it, so l and o are NaN from that tile on;
//   - a score of +inf: inf - inf is NaN, as in the reference.
// One differs: with -inf at every key the reference is 0 / 0 = NaN. Here such a row is zero, so that a padded row
// cannot poison its sample. (m = -inf is taken as 0 in the differences, which makes every weight 0 and l = 0.)
#pragma once

#include <cstdint>

#include "device.cuh"

namespace trtforge {

constexpr float kLog2E = 1.4426950408889634f;

// The larger of a value's copies in the four lanes that share a row of an mma accumulator.
TF_DEVICE float quad_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, 1));
  return fmaxf(value, __shfl_xor_sync(kFullWarp, value, 2));
}

// The sum over the same four lanes; a fixed order, so that results repeat.
TF_DEVICE float quad_sum(float value) {
  value += __shfl_xor_sync(kFullWarp, value, 1);
  return value + __shfl_xor_sync(kFullWarp, value, 2);
}

// The running statistics of the two rows that a lane holds in an m16n8 accumulator: lane / 4 and lane / 4 + 8.
struct OnlineSoftmax {
  float maximum[2] = {-INFINITY, -INFINITY};  // m, the same in the four lanes of a row
  float partial_sum[2] = {0.0f, 0.0f};        // this lane's share of l: lanes are added once, in finish()

  // Turns the scores of one tile into weights exp(x - m'), and gives the factor c for what was summed before it.
  // scores: [kTiles][4], m16n8 accumulators (elements 0, 1 of the first row, 2, 3 of the second).
  template <int kTiles>
  TF_DEVICE void update(float (&scores)[kTiles][4], float (&rescale)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float tile_maximum = maximum[r];
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        tile_maximum = fmaxf(tile_maximum, fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
      }
      tile_maximum = quad_max(tile_maximum);
      const float origin = tile_maximum == -INFINITY ? 0.0f : tile_maximum;
      rescale[r] = ex2((maximum[r] - origin) * kLog2E);
      maximum[r] = tile_maximum;

      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int c = 2 * r; c < 2 * r + 2; ++c) {
          scores[n][c] = ex2((scores[n][c] - origin) * kLog2E);
          sum += scores[n][c];
        }
      }
      partial_sum[r] = partial_sum[r] * rescale[r] + sum;
    }
  }

  // 1 / l for each row; 0 for a row whose every weight is 0.
  TF_DEVICE void finish(float (&inverse)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = quad_sum(partial_sum[r]);
      inverse[r] = sum == 0.0f ? 0.0f : 1.0f / sum;
    }
  }
};

}  // namespace trtforge
