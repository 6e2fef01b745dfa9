// C = activation(scales * (A x B) + bias) + residual with A and B in int8, sums exact in int32 (mma m16n8k32).
//
// A: [M, K] int8, one scale. B: [N, K] int8, a scale for each column of C. C: [M, N] T, or int8 with a scale of its
// own. The mma takes B with K in adjacent bytes, and ldmatrix transposes 2-byte elements only. So B is [N, K], and its
// fragments are read as A's are: whoever makes the weight's codes transposes it, once and on the host (for a block that
// is the lowering to trtforge::AttentionFFN_*_int8). Rows of int8 matrices start at multiples of 16 bytes. Where K % 16
// == 8, the last chunk of a row holds 8 bytes past K: whatever they are in A, they meet zeros in B.
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

template <typename Tile>
struct Int8Operands {
  using Sum = int32_t;
  static constexpr int kChunks = Tile::kDepthBytes / kChunkBytes;
  static_assert(Tile::kMmasAcross % 2 == 0, "one ldmatrix_x4 gives the fragments of two mma columns");

  RowStageCopy<Tile, Tile::kRows> a;
  RowStageCopy<Tile, Tile::kCols> b;
  WarpPart<Tile> warp;

  TF_DEVICE Int8Operands(const GemmS8Params& params, int first_row, int first_col)
      : a(params.a, int8_row_bytes(params.depth), params.depth, params.epilogue.rows, first_row),
        b(params.b, int8_row_bytes(params.depth), params.depth, RowSet{params.epilogue.num_cols, 0, nullptr},
          first_col) {}

  // The 8 x 8 matrices of ldmatrix are (cols 0-7, low K), (cols 0-7, high K), (cols 8-15, low K), (cols 8-15, high K).
  TF_DEVICE void load_b_fragments(uint32_t (&b_regs)[Tile::kMmasAcross][2], const unsigned char* stage,
                                  int mma_step) const {
#pragma unroll
    for (int j = 0; j < Tile::kMmasAcross; j += 2) {
      const int col = warp.col + j * kMmaCols + warp.lane / 16 * 8 + warp.lane % 8;
      uint32_t both[4];
      ldmatrix_x4(both, stage + swizzled_offset<kChunks>(col, 2 * mma_step + warp.lane / 8 % 2));
      b_regs[j][0] = both[0];
      b_regs[j][1] = both[1];
      b_regs[j + 1][0] = both[2];
      b_regs[j + 1][1] = both[3];
    }
  }

  TF_DEVICE static void multiply_add(int32_t (&sums)[4], const uint32_t (&a_regs)[4], const uint32_t (&b_regs)[2]) {
    mma_m16n8k32_s8(sums, a_regs, b_regs);
  }
};

// One tile of C. All threads of the block; shared memory is free again on return.
template <typename T, typename Tile>
TF_DEVICE void gemm_s8_tile(const GemmS8Params& params, GemmShared<Tile>& shared, int first_row, int first_col) {
  const EpilogueParams& epilogue = params.epilogue;
  int32_t sums[Tile::kMmasDown][Tile::kMmasAcross][4] = {};
  if (has_valid_row(epilogue.rows, first_row, first_row + Tile::kRows)) {
    const Int8Operands<Tile> operands(params, first_row, first_col);
    multiply_tile<Tile>(sums, operands, shared, ceil_div(params.depth, Tile::kDepthBytes));
  }
  for_each_chunk<Tile>(sums, first_row, first_col, epilogue, [&](int row, int col, const int32_t(&chunk)[4][2]) {
    float values[kChunkElements] = {};
    if (is_valid_row(epilogue.rows, row)) {
      load_chunk(values, params.b_scales + col);
#pragma unroll
      for (int i = 0; i < kChunkElements; ++i) {
        values[i] = static_cast<float>(chunk[i / 2][i % 2]) * (params.a_scale * values[i]);
      }
      finish_chunk<T>(values, epilogue, row, col);
    }
    if (params.c_int8 != nullptr) {
      store_quantized_chunk(params.c_int8 + row * int8_row_bytes(epilogue.num_cols) + col, values, params.c_scale);
    } else {
      store_chunk(static_cast<T*>(epilogue.c) + static_cast<int64_t>(row) * epilogue.num_cols + col, values);
    }
  });
}

// All tiles of C, dealt out to the blocks of the grid.
template <typename T, typename Tile>
TF_DEVICE void gemm_tiles(const GemmS8Params& params, GemmShared<Tile>& shared) {
  for_each_tile<Tile>(params.epilogue, [&](int first_row, int first_col) {
    gemm_s8_tile<T, Tile>(params, shared, first_row, first_col);
  });
}

// Grid: any number of blocks, best one a tile; block: Tile::kThreads; shared memory: sizeof(GemmShared<Tile>).
template <typename T, typename Tile>
TF_GLOBAL void TF_LAUNCH_BOUNDS(Tile::kThreads, Tile::kMinBlocks) gemm_s8_kernel(GemmS8Params params) {
  gemm_tiles<T, Tile>(params, dynamic_shared<GemmShared<Tile>>());
}

}  // namespace trtforge
