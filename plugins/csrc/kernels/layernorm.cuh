// Kernels of one warp a row: LayerNorm, and quantization of activations.
//
// LayerNorm takes the mean, then the mean square of what is left, then writes: two passes of statistics in float, which
// lose nothing where the mean is large beside the spread (E[x^2] - E[x]^2 would). The row is read from memory once; the
// later passes find it in the L1 cache (2 KB at H = 1024, 4 rows a block).
// Lanes add their own chunks in order, then a butterfly adds lanes: a fixed order, so that results repeat.
#pragma once

#include <cstdint>

#include "chunk.cuh"
#include "device.cuh"
#include "params_gemm.h"
#include "rows.cuh"

namespace trtforge {

constexpr int kRowsPerBlock = 4;  // warps of a block
constexpr int kRowThreads = kRowsPerBlock * kWarpSize;

TF_DEVICE float warp_sum(float value) {
#pragma unroll
  for (int mask = kWarpSize / 2; mask > 0; mask /= 2) value += __shfl_xor_sync(kFullWarp, value, mask);
  return value;
}

// Calls work(col, values) for the chunks of a row that fall to the calling lane. row: [width] T.
template <typename T, typename Work>
TF_DEVICE void for_each_row_chunk(const T* row, int width, Work work) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  for (int col = lane * kChunkElements; col < width; col += kWarpSize * kChunkElements) {
    float values[kChunkElements];
    load_chunk(values, row + col);
    work(col, values);
  }
}

// Writes values to what is given of y [M, width] T and y_int8 [M, int8_row_bytes(width)].
template <typename T>
TF_DEVICE void store_row_chunk(const LayerNormParams& params, int64_t row, int col,
                               const float (&values)[kChunkElements]) {
  if (params.y != nullptr) store_chunk(static_cast<T*>(params.y) + row * params.width + col, values);
  if (params.y_int8 != nullptr) {
    store_quantized_chunk(params.y_int8 + row * int8_row_bytes(params.width) + col, values, params.y_scale);
  }
}

// One row; all lanes of a warp.
template <typename T>
TF_DEVICE void layernorm_row(const LayerNormParams& params, int row) {
  const T* x = static_cast<const T*>(params.x) + static_cast<int64_t>(row) * params.width;
  const float inverse_width = 1.0f / static_cast<float>(params.width);
  float sum = 0.0f;
  for_each_row_chunk(x, params.width, [&](int, const float(&values)[kChunkElements]) {
#pragma unroll
    for (int i = 0; i < kChunkElements; ++i) sum += values[i];
  });
  const float mean = warp_sum(sum) * inverse_width;
  float squares = 0.0f;
  for_each_row_chunk(x, params.width, [&](int, const float(&values)[kChunkElements]) {
#pragma unroll
    for (int i = 0; i < kChunkElements; ++i) squares += (values[i] - mean) * (values[i] - mean);
  });
  const float inverse_deviation = 1.0f / sqrtf(warp_sum(squares) * inverse_width + params.epsilon);
  for_each_row_chunk(x, params.width, [&](int col, float(&values)[kChunkElements]) {
    float gamma[kChunkElements];
    float beta[kChunkElements] = {};
    load_chunk(gamma, static_cast<const T*>(params.gamma) + col);
    if (params.beta != nullptr) load_chunk(beta, static_cast<const T*>(params.beta) + col);
#pragma unroll
    for (int i = 0; i < kChunkElements; ++i) {
      values[i] = (values[i] - mean) * inverse_deviation * gamma[i] + beta[i];
    }
    store_row_chunk<T>(params, row, col, values);
  });
}

// Calls work(row) for the rows that fall to the calling warp, dealt out to the warps of the grid.
template <typename Work>
TF_DEVICE void for_each_row(const RowSet& rows, Work work) {
  const int warps_per_block = static_cast<int>(blockDim.x) / kWarpSize;
  const int num_warps = static_cast<int>(gridDim.x) * warps_per_block;
  const int first = static_cast<int>(blockIdx.x) * warps_per_block + static_cast<int>(threadIdx.x) / kWarpSize;
  for (int64_t row = first; row < rows.num_rows; row += num_warps) work(static_cast<int>(row));
}

// All rows of x. Any grid and block.
template <typename T>
TF_DEVICE void layernorm_rows(const LayerNormParams& params) {
  for_each_row(params.rows, [&](int row) {
    if (is_valid_row(params.rows, row)) {
      layernorm_row<T>(params, row);
    } else {
      const float zeros[kChunkElements] = {};
      const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
      for (int col = lane * kChunkElements; col < params.width; col += kWarpSize * kChunkElements) {
        store_row_chunk<T>(params, row, col, zeros);
      }
    }
  });
}

// All rows of x. Any grid and block.
template <typename T>
TF_DEVICE void quantize_rows(const QuantizeParams& params) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  for_each_row(params.rows, [&](int row) {
    const bool is_valid = is_valid_row(params.rows, row);
    const T* x = static_cast<const T*>(params.x) + static_cast<int64_t>(row) * params.width;
    int8_t* y = params.y_int8 + row * int8_row_bytes(params.width);
    for (int col = lane * kChunkElements; col < params.width; col += kWarpSize * kChunkElements) {
      float values[kChunkElements] = {};
      if (is_valid) load_chunk(values, x + col);
      store_quantized_chunk(y + col, values, params.scale);
    }
  });
}

// Grid: any number of blocks; block: kRowThreads; no shared memory.
template <typename T>
TF_GLOBAL void TF_LAUNCH_BOUNDS(kRowThreads) layernorm_kernel(LayerNormParams params) {
  layernorm_rows<T>(params);
}

template <typename T>
TF_GLOBAL void TF_LAUNCH_BOUNDS(kRowThreads) quantize_kernel(QuantizeParams params) {
  quantize_rows<T>(params);
}

}  // namespace trtforge
