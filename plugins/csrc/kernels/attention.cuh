// Attention that never writes its scores: softmax(scale * Q K^T + bias) V, FlashAttention-2 style (arXiv:2307.08691).
//
// Tiling: a block takes 64 rows of one (sample, head), 16 a warp, and walks the keys in tiles of 64 (D <= 64) or 32.
// Q stays in registers, K and V pass through two stages of shared memory, scores and weights live in accumulators
// (attention_tile.cuh), statistics in softmax.cuh, the bias in attention_bias.cuh. Accumulation and statistics are
// float; weights are rounded to T for P V, as the unfused graph rounds its probabilities. Keys are added in one fixed
// order: results repeat bit by bit. The output is T, or int8 where the next product takes that.
//
// What a block takes: shared memory, and registers a thread by ptxas 13.0 (over sm_75, 80, 86, 89, 90, 100 and 120,
// both types, causal or not; none is spilled). Blocks: how many then fit on a multiprocessor with 100 KB of shared
// memory (sm_86, 89, 120) / with 164 KB or more (sm_80, 90, 100).
//   D                        32        64        80        96        128
//   shared memory, bytes     20,480    36,864    22,528    26,624    34,816
//   registers                115-128   147-163   148-154   160-166   196-219
//   blocks                   4 / 4     2 / 3     3 / 3     3 / 3     2 / 2
//
// What is skipped: row tiles at or past the sample's length are zero and nothing is read for them; key tiles past the
// length, or past the diagonal where causal, are not loaded. A key that no row of a tile sees has no influence.
// Within a tile an unseen key has weight exactly 0, so only its NaN or Inf in V can reach a row of that tile that
// does not see it (0 * NaN); the unfused graph spreads such a value to every row.
#pragma once

#include <cstdint>

#include "attention_bias.cuh"
#include "attention_params.h"
#include "attention_tile.cuh"
#include "device.cuh"
#include "softmax.cuh"

namespace trtforge {

TF_DEVICE int smaller(int a, int b) { return a < b ? a : b; }

// What one (sample, head) reads and writes.
template <typename T>
struct AttentionHead {
  const T* q;  // [S, D] by params.row_stride, and so k and v
  const T* k;
  const T* v;
  const T* bias;       // [S, S] by bias_row_stride and bias_key_stride
  int64_t output_row;  // of this sample's first row in the output [B * S, N * D]
  int output_column;   // of this head's first column
  int length;          // rows and keys that are not padding

  TF_DEVICE AttentionHead(const AttentionParams& params, int batch, int head) {
    const int64_t offset = batch * params.batch_stride + head * params.head_stride;
    q = static_cast<const T*>(params.q) + offset;
    k = static_cast<const T*>(params.k) + offset;
    v = static_cast<const T*>(params.v) + offset;
    bias = static_cast<const T*>(params.bias) + batch * params.bias_batch_stride + head * params.bias_head_stride;
    output_row = static_cast<int64_t>(batch) * params.sequence;
    output_column = head * params.head_size;
    const int given = params.lengths == nullptr ? params.sequence : params.lengths[batch];
    length = given < 0 ? 0 : smaller(given, params.sequence);
  }
};

// Calls store(row, column, low, high) for each pair of columns that this lane holds of 16 rows; rows at or past
// num_valid give zeros, those at or past S are left out.
template <typename Tile, typename Store>
TF_DEVICE void for_each_output_pair(const int (&row)[2], int sequence, int num_valid,
                                    const typename Tile::Output& values, const float (&inverse)[2], Store store) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (row[r] >= sequence) continue;
    const bool is_valid = row[r] < num_valid;
#pragma unroll
    for (int n = 0; n < Tile::kHeadSize / 8; ++n) {
      const float low = values[n][2 * r] * inverse[r];
      const float high = values[n][2 * r + 1] * inverse[r];
      store(row[r], 8 * n + lane_index() % 4 * 2, is_valid ? low : 0.0f, is_valid ? high : 0.0f);
    }
  }
}

// Writes this lane's part of 16 rows at this head's columns of the output, T or int8.
template <typename Tile>
TF_DEVICE void store_output(const AttentionParams& params, const AttentionHead<typename Tile::T>& data,
                            const int (&row)[2], const typename Tile::Output& values, const float (&inverse)[2]) {
  using T = typename Tile::T;
  const int64_t width = static_cast<int64_t>(params.num_heads) * Tile::kHeadSize;
  if (params.output_int8 == nullptr) {
    T* output = static_cast<T*>(params.output) + data.output_row * width + data.output_column;
    for_each_output_pair<Tile>(row, params.sequence, data.length, values, inverse,
                               [&](int r, int column, float low, float high) {
                                 *reinterpret_cast<uint32_t*>(output + r * width + column) = pack_pair<T>(low, high);
                               });
  } else {
    const int64_t row_bytes = int8_row_bytes(width);
    const float scale = params.output_scale;
    int8_t* output = params.output_int8 + data.output_row * row_bytes + data.output_column;
    for_each_output_pair<Tile>(row, params.sequence, data.length, values, inverse,
                               [&](int r, int column, float low, float high) {
                                 store_quantized_pair(output + r * row_bytes + column, low, high, scale);
                               });
  }
}

// sums = sum_j w_j v_j and inverse = 1 / sum_j w_j over the keys [0, num_keys), for this lane's two rows of a block
// that starts at first_row.
template <typename Tile>
TF_DEVICE void sum_over_keys(typename Tile::Output& sums, float (&inverse)[2], const AttentionParams& params,
                             const AttentionHead<typename Tile::T>& data, typename Tile::Shared& shared, int first_row,
                             const int (&row)[2], int num_keys, bool is_causal) {
  load_keys_and_values<Tile>(shared.keys[0], shared.values[0], data.k, data.v, params.row_stride, 0, num_keys);
  typename Tile::Query query;
  load_query<Tile>(query, data.q, params.row_stride, row, data.length);

  const int bias_row[2] = {smaller(row[0], data.length - 1), smaller(row[1], data.length - 1)};
  const AttentionBias<typename Tile::T> bias(data.bias, params.bias_row_stride, params.bias_key_stride, bias_row);
  const int seen_keys[2] = {is_causal ? smaller(row[0] + 1, num_keys) : num_keys,
                            is_causal ? smaller(row[1] + 1, num_keys) : num_keys};
  const int seen_by_all = is_causal ? first_row + 1 : num_keys;

  OnlineSoftmax softmax;
  int stage = 0;
  for (int first_key = 0; first_key < num_keys; first_key += Tile::kKeys, stage ^= 1) {
    // One barrier a tile: past it this tile's copies are visible, and every warp is done with the other stage.
    cp_async_wait<0>();
    __syncthreads();
    const int next_key = first_key + Tile::kKeys;
    if (next_key < num_keys) {
      load_keys_and_values<Tile>(shared.keys[stage ^ 1], shared.values[stage ^ 1], data.k, data.v, params.row_stride,
                                 next_key, num_keys);
    }

    typename Tile::Scores scores;
    compute_scores<Tile>(scores, query, shared.keys[stage]);
    const int lane_key = first_key + lane_index() % 4 * 2;
    bias.apply(scores, params.softmax_scale, lane_key, num_keys, next_key <= num_keys);
    if (next_key > seen_by_all) mask_scores<Tile>(scores, lane_key, seen_keys);

    float rescale[2];
    softmax.update(scores, rescale);
    accumulate_output<Tile>(sums, rescale, scores, shared.values[stage]);
  }
  softmax.finish(inverse);
  __syncthreads();
}

// Rows [row_block * kRows, + kRows) of one sample and head. All kThreads threads of a block call it together; `shared`
// is free on entry and free again on return, so that a persistent kernel can call it tile after tile. is_causal: an
// argument, so that a kernel may know it at compile time or at run time.
template <typename Tile>
TF_DEVICE void attention_tile(const AttentionParams& params, typename Tile::Shared& shared, int batch, int head,
                              int row_block, bool is_causal) {
  const AttentionHead<typename Tile::T> data(params, batch, head);
  const int first_row = row_block * Tile::kRows;
  const int lane_row = first_row + static_cast<int>(threadIdx.x) / 32 * 16 + lane_index() / 4;
  const int row[2] = {lane_row, lane_row + 8};
  // Keys that any row of the block sees; none where the whole block is padding.
  const int last_key = is_causal ? smaller(first_row + Tile::kRows, data.length) : data.length;
  const int num_keys = first_row < data.length ? last_key : 0;

  typename Tile::Output sums = {};
  float inverse[2] = {};
  if (num_keys > 0) sum_over_keys<Tile>(sums, inverse, params, data, shared, first_row, row, num_keys, is_causal);
  store_output<Tile>(params, data, row, sums, inverse);
}

// Row tiles of all samples and heads.
template <typename Tile>
TF_HOST_DEVICE int64_t count_attention_tiles(const AttentionParams& params) {
  return static_cast<int64_t>(params.batch) * params.num_heads * ((params.sequence + Tile::kRows - 1) / Tile::kRows);
}

// Tile `index` of them: the tiles of one (sample, head) are neighbours, so that the blocks that run together share its
// K and V in L2. Causal: the longest rows first, so that the last tiles to start are short ones.
template <typename Tile>
TF_DEVICE void attention_tile_at(const AttentionParams& params, typename Tile::Shared& shared, int64_t index,
                                 bool is_causal) {
  const int num_row_blocks = (params.sequence + Tile::kRows - 1) / Tile::kRows;
  const int sample_head = static_cast<int>(index / num_row_blocks);
  const int row_block = static_cast<int>(index % num_row_blocks);
  attention_tile<Tile>(params, shared, sample_head / params.num_heads, sample_head % params.num_heads,
                       is_causal ? num_row_blocks - 1 - row_block : row_block, is_causal);
}

// All tiles, dealt out to the blocks of the grid.
template <typename Tile>
TF_DEVICE void attention_tiles(const AttentionParams& params, typename Tile::Shared& shared, bool is_causal) {
  const int64_t num_tiles = count_attention_tiles<Tile>(params);
  for (int64_t tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    attention_tile_at<Tile>(params, shared, tile, is_causal);
  }
}

// Grid: any number of blocks, best one a tile; block: kThreads; shared memory: sizeof(Tile::Shared).
template <typename Tile, bool kIsCausal>
TF_GLOBAL void TF_LAUNCH_BOUNDS(Tile::kThreads, Tile::kBlocksPerMultiprocessor)
    attention_kernel(AttentionParams params) {
  attention_tiles<Tile>(params, dynamic_shared<typename Tile::Shared>(), kIsCausal);
}

}  // namespace trtforge
