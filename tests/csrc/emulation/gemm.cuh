// A tiled GEMM with each part of the device interface that a real kernel uses: cp.async in two stages, ldmatrix, mma.
#pragma once

#include "kernels/device.cuh"

namespace trtforge {

template <typename T>
struct GemmParams {
  const T* __restrict__ a;  // [m, k]
  const T* __restrict__ b;  // [k, n]
  T* __restrict__ c;        // [m, n]
  int m, n, k;              // n and k are multiples of 8
};

namespace gemm {

constexpr int kTileM = 64;
constexpr int kTileN = 64;
constexpr int kTileK = 32;
constexpr int kWarps = 4;  // 2 x 2, each 32 x 32 of the tile
constexpr int kStages = 2;
constexpr int kChunk = 8;                  // elements in 16 bytes
constexpr int kStrideA = kTileK + kChunk;  // padded: the rows of one ldmatrix then lie in different banks
constexpr int kStrideB = kTileN + kChunk;

template <typename T>
struct Shared {
  alignas(16) T a[kStages][kTileM * kStrideA];
  alignas(16) T b[kStages][kTileK * kStrideB];
};

TF_DEVICE void store(half* to, float value) { *to = __float2half_rn(value); }
TF_DEVICE void store(bf16* to, float value) { *to = __float2bfloat16_rn(value); }

// Copies a tile of kRows x kColumns that begins at (row, column) of source [num_rows, num_columns]; zeros outside it.
template <int kRows, int kColumns, int kStride, typename T>
TF_DEVICE void copy_tile(T* tile, const T* source, int row, int column, int num_rows, int num_columns) {
  constexpr int kChunks = kRows * kColumns / kChunk;
  static_assert(kChunks % (kWarps * kWarpSize) == 0, "each thread copies the same number of chunks");
  for (int i = threadIdx.x; i < kChunks; i += kWarps * kWarpSize) {
    const int r = i / (kColumns / kChunk);
    const int c = i % (kColumns / kChunk) * kChunk;
    const bool is_valid = row + r < num_rows && column + c < num_columns;
    const T* from = source + (is_valid ? static_cast<std::size_t>(row + r) * num_columns + column + c : 0);
    cp_async16(tile + r * kStride + c, from, is_valid);
  }
}

// Multiplies one stage's tiles: 2 x 4 mma of a warp for every 16 of k.
template <typename T>
TF_DEVICE void multiply_stage(float (&sums)[2][4][4], const T* a, const T* b, int warp_m, int warp_n) {
  const int lane = threadIdx.x % kWarpSize;
  for (int k = 0; k < kTileK; k += 16) {
    uint32_t a_fragments[2][4];
    for (int i = 0; i < 2; ++i) {
      ldmatrix_x4(a_fragments[i], a + (warp_m + 16 * i + lane % 16) * kStrideA + k + lane / 16 * 8);
    }
    for (int j = 0; j < 4; j += 2) {
      uint32_t b_pair[4];  // b fragments of two neighbours along n
      ldmatrix_x4_trans(b_pair, b + (k + lane % 16) * kStrideB + warp_n + 8 * j + lane / 16 * 8);
      for (int i = 0; i < 2; ++i) {
        mma_m16n8k16<T>(sums[i][j], a_fragments[i], {b_pair[0], b_pair[1]});
        mma_m16n8k16<T>(sums[i][j + 1], a_fragments[i], {b_pair[2], b_pair[3]});
      }
    }
  }
}

}  // namespace gemm

template <typename T>
TF_GLOBAL void TF_LAUNCH_BOUNDS(gemm::kWarps* kWarpSize) multiply(GemmParams<T> p) {
  using namespace gemm;
  auto& shared = dynamic_shared<Shared<T>>();
  const int row = blockIdx.y * kTileM;
  const int column = blockIdx.x * kTileN;
  const int warp = threadIdx.x / kWarpSize;
  const int warp_m = warp / 2 * 32;
  const int warp_n = warp % 2 * 32;
  const int num_steps = (p.k + kTileK - 1) / kTileK;
  float sums[2][4][4] = {};
  const auto copy_stage = [&](int step) {
    if (step < num_steps) {
      copy_tile<kTileM, kTileK, kStrideA>(shared.a[step % kStages], p.a, row, step * kTileK, p.m, p.k);
      copy_tile<kTileK, kTileN, kStrideB>(shared.b[step % kStages], p.b, step * kTileK, column, p.k, p.n);
    }
    cp_async_commit();
  };
  copy_stage(0);
  for (int step = 0; step < num_steps; ++step) {
    copy_stage(step + 1);
    cp_async_wait<kStages - 1>();
    __syncthreads();
    multiply_stage(sums, shared.a[step % kStages], shared.b[step % kStages], warp_m, warp_n);
    __syncthreads();  // the next step's copy fills the stage that was just read
  }
  const int lane = threadIdx.x % kWarpSize;
  for (int i = 0; i < 2 * 4 * 4; ++i) {
    const int r = row + warp_m + 16 * (i / 16) + lane / 4 + 8 * (i / 2 % 2);
    const int c = column + warp_n + 8 * (i / 4 % 4) + 2 * (lane % 4) + i % 2;
    if (r < p.m && c < p.n) store(p.c + static_cast<std::size_t>(r) * p.n + c, sums[i / 16][i / 4 % 4][i % 4]);
  }
}

template <typename T>
int launch_gemm(const GemmParams<T>& params, Stream stream) {
  using namespace gemm;
  const dim3 grid((params.n + kTileN - 1) / kTileN, (params.m + kTileM - 1) / kTileM);
  return TRTFORGE_LAUNCH(multiply<T>, grid, kWarps * kWarpSize, sizeof(Shared<T>), stream, params);
}

}  // namespace trtforge
