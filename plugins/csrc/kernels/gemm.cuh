// C = activation(A x B + bias) + residual in half or bf16, sums in float on tensor cores (mma m16n8k16).
//
// A: [M, K] T, B: [K, N] T as ONNX has it, C: [M, N] T. Any M; K and N multiples of 8. tile.cuh gives tiling, shared
// memory and swizzle; gemm_pipeline.cuh the loop over K; epilogue.cuh the way out.
// Everything is a device function of a tile, so that a persistent kernel can run a GEMM as one of its phases.
#pragma once

#include <cstdint>

#include "device.cuh"
#include "epilogue.cuh"
#include "gemm_pipeline.cuh"
#include "params_gemm.h"
#include "rows.cuh"
#include "tile.cuh"
#include "tile_copy.cuh"

namespace trtforge {

template <typename T, typename Tile>
struct FloatOperands {
  using Sum = float;
  static_assert(sizeof(T) == 2, "half or bf16");
  static_assert(Tile::kMmasAcross % 2 == 0, "one ldmatrix_x4 gives the fragments of two mma columns");

  RowStageCopy<Tile, Tile::kRows> a;
  DepthStageCopy<T, Tile> b;
  WarpPart<Tile> warp;

  TF_DEVICE FloatOperands(const GemmParams& params, int first_row, int first_col)
      : a(params.a, static_cast<int64_t>(params.depth) * sizeof(T), params.depth * static_cast<int>(sizeof(T)),
          params.epilogue.rows, first_row),
        b(params.b, params.depth, params.epilogue.num_cols, first_col) {}

  // B lies with N along its rows, and the mma wants K there: ldmatrix transposes. Its 8 x 8 matrices are (low K, cols
  // 0-7), (high K, cols 0-7), (low K, cols 8-15), (high K, cols 8-15).
  TF_DEVICE void load_b_fragments(uint32_t (&b_regs)[Tile::kMmasAcross][2], const unsigned char* stage,
                                  int mma_step) const {
    constexpr int kChunks = Tile::kCols / kChunkElements;
    const int k = mma_step * 16 + warp.lane % 16;
#pragma unroll
    for (int j = 0; j < Tile::kMmasAcross; j += 2) {
      const int chunk = warp.col / kChunkElements + j + warp.lane / 16;
      uint32_t both[4];
      ldmatrix_x4_trans(both, stage + swizzled_offset<kChunks>(k, chunk));
      b_regs[j][0] = both[0];
      b_regs[j][1] = both[1];
      b_regs[j + 1][0] = both[2];
      b_regs[j + 1][1] = both[3];
    }
  }

  TF_DEVICE static void multiply_add(float (&sums)[4], const uint32_t (&a_regs)[4], const uint32_t (&b_regs)[2]) {
    mma_m16n8k16<T>(sums, a_regs, b_regs);
  }
};

// One tile of C. All threads of the block; shared memory is free again on return.
template <typename T, typename Tile>
TF_DEVICE void gemm_tile(const GemmParams& params, GemmShared<Tile>& shared, int first_row, int first_col) {
  const EpilogueParams& epilogue = params.epilogue;
  float sums[Tile::kMmasDown][Tile::kMmasAcross][4] = {};
  if (has_valid_row(epilogue.rows, first_row, first_row + Tile::kRows)) {
    const FloatOperands<T, Tile> operands(params, first_row, first_col);
    multiply_tile<Tile>(sums, operands, shared, ceil_div(params.depth, operands.b.kDepth));
  }
  for_each_chunk<Tile>(sums, first_row, first_col, epilogue, [&](int row, int col, const float(&chunk)[4][2]) {
    float values[kChunkElements] = {};
    if (is_valid_row(epilogue.rows, row)) {
#pragma unroll
      for (int i = 0; i < kChunkElements; ++i) values[i] = chunk[i / 2][i % 2];
      finish_chunk<T>(values, epilogue, row, col);
    }
    store_chunk(static_cast<T*>(epilogue.c) + static_cast<int64_t>(row) * epilogue.num_cols + col, values);
  });
}

// All tiles of C, dealt out to the blocks of the grid.
template <typename T, typename Tile>
TF_DEVICE void gemm_tiles(const GemmParams& params, GemmShared<Tile>& shared) {
  for_each_tile<Tile>(params.epilogue,
                      [&](int first_row, int first_col) { gemm_tile<T, Tile>(params, shared, first_row, first_col); });
}

// Grid: any number of blocks, best one a tile; block: Tile::kThreads; shared memory: sizeof(GemmShared<Tile>).
template <typename T, typename Tile>
TF_GLOBAL void TF_LAUNCH_BOUNDS(Tile::kThreads, Tile::kMinBlocks) gemm_kernel(GemmParams params) {
  gemm_tiles<T, Tile>(params, dynamic_shared<GemmShared<Tile>>());
}

}  // namespace trtforge
