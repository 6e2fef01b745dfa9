// The additive bias of attention, read straight into the layout of the mma accumulator that holds the scores.
//
// A lane's scores are rows g and g + 8 of its warp's 16, keys 8n + 2t and 8n + 2t + 1 (g = lane / 4, t = lane % 4). The
// bias is not staged in shared memory: every element is used once (or is broadcast, and then L1 serves it).
// Three ways to read it, the same for every lane of a block:
//   constant  no stride along the keys ([1, 1, 1, 1]: the model has no bias): one value a row, no loads in the loop
//   paired    every row starts on 4 bytes: one load for two keys, in tiles that are whole
//   single    anything else, and the last tile: one load a key, none at or past the number of keys
#pragma once

#include <cstdint>

#include "chunk.cuh"
#include "device.cuh"

namespace trtforge {

TF_DEVICE float float_from(half value) { return __half2float(value); }
TF_DEVICE float float_from(bf16 value) { return __bfloat162float(value); }

template <typename T>
struct AttentionBias {
  using Pair = typename PairOf<T>::Type;

  const T* row[2];  // [S], the bias of this lane's two rows; [1] where it is constant
  bool is_constant;
  bool is_paired;

  // head_bias: [S, S] by strides, of one sample and head; key_stride is 0 or 1. row_index: this lane's two rows, which
  // must exist.
  TF_DEVICE AttentionBias(const T* head_bias, int64_t row_stride, int key_stride, const int (&row_index)[2])
      : is_constant(key_stride == 0),
        is_paired(row_stride % 2 == 0 && reinterpret_cast<uintptr_t>(head_bias) % sizeof(Pair) == 0) {
#pragma unroll
    for (int r = 0; r < 2; ++r) row[r] = head_bias + row_index[r] * row_stride;
  }

  // scores = scores * scale + bias. scores: [kTiles][4]; first_key: the key of this lane's scores[0][0]; num_keys: bias
  // at or past this key is not read, and the score is left unscaled (the caller masks it).
  template <int kTiles>
  TF_DEVICE void apply(float (&scores)[kTiles][4], float scale, int first_key, int num_keys, bool is_whole) const {
    if (is_constant) {
      const float constant[2] = {float_from(*row[0]), float_from(*row[1])};
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) scores[n][c] = fmaf(scores[n][c], scale, constant[c / 2]);
      }
    } else if (is_paired && is_whole) {
      apply_paired(scores, scale, first_key);
    } else {
      apply_single(scores, scale, first_key, num_keys);
    }
  }

 private:
  template <int kTiles>
  TF_DEVICE void apply_paired(float (&scores)[kTiles][4], float scale, int first_key) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Pair* pairs = reinterpret_cast<const Pair*>(row[r] + first_key);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const float2 pair = float_pair_from(pairs[4 * n]);
        scores[n][2 * r] = fmaf(scores[n][2 * r], scale, pair.x);
        scores[n][2 * r + 1] = fmaf(scores[n][2 * r + 1], scale, pair.y);
      }
    }
  }

  template <int kTiles>
  TF_DEVICE void apply_single(float (&scores)[kTiles][4], float scale, int first_key, int num_keys) const {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int key = first_key + 8 * n + c % 2;
        if (key < num_keys) scores[n][c] = fmaf(scores[n][c], scale, float_from(row[c / 2][key]));
      }
    }
  }
};

}  // namespace trtforge
