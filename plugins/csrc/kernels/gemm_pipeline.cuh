// The loop over K that all GEMM kernels share: a ring of stages in shared memory, filled by cp.async ahead of use.
//
// Operands is the part that depends on the element type:
//   Sum                                      float or int32_t
//   a, b                                     copies of the operands: start(stage, step) starts that of K step `step`
//   warp                                     the calling warp's part of the tile
//   load_b_fragments(b_regs, stage, step)    B's fragments for mma step `step` of a stage
//   multiply_add(sums, a_regs, b_regs)       one mma
#pragma once

#include <cstdint>

#include "device.cuh"
#include "params_gemm.h"
#include "tile.cuh"

namespace trtforge {

// Fragments of A for one mma step: kMmasDown tiles of 16 rows x 32 bytes. A stage: [kRows][kDepthBytes], swizzled.
// The 8 x 8 matrices of ldmatrix are (rows 0-7, low K), (rows 8-15, low K), (rows 0-7, high K), (rows 8-15, high K),
// in the order of the mma's registers, for 2-byte and for int8 elements alike.
template <typename Tile>
TF_DEVICE void load_a_fragments(uint32_t (&a)[Tile::kMmasDown][4], const unsigned char* stage,
                                const WarpPart<Tile>& warp, int mma_step) {
  constexpr int kChunks = Tile::kDepthBytes / kChunkBytes;
#pragma unroll
  for (int i = 0; i < Tile::kMmasDown; ++i) {
    const int row = warp.row + i * kMmaRows + warp.lane % 16;
    ldmatrix_x4(a[i], stage + swizzled_offset<kChunks>(row, 2 * mma_step + warp.lane / 16));
  }
}

template <typename Tile, typename Operands>
TF_DEVICE void start_copies(const Operands& operands, GemmShared<Tile>& shared, int stage, int step) {
  operands.a.start(shared.a[stage], step);
  operands.b.start(shared.b[stage], step);
}

// Adds the products of a stage to the warp's accumulators.
template <typename Tile, typename Operands>
TF_DEVICE void multiply_stage(typename Operands::Sum (&sums)[Tile::kMmasDown][Tile::kMmasAcross][4],
                              const Operands& operands, const GemmShared<Tile>& shared, int stage) {
#pragma unroll
  for (int step = 0; step < Tile::kDepthBytes / kMmaDepthBytes; ++step) {
    uint32_t a_regs[Tile::kMmasDown][4];
    uint32_t b_regs[Tile::kMmasAcross][2];
    load_a_fragments<Tile>(a_regs, shared.a[stage], operands.warp, step);
    operands.load_b_fragments(b_regs, shared.b[stage], step);
#pragma unroll
    for (int i = 0; i < Tile::kMmasDown; ++i) {
#pragma unroll
      for (int j = 0; j < Tile::kMmasAcross; ++j) Operands::multiply_add(sums[i][j], a_regs[i], b_regs[j]);
    }
  }
}

// sums += A tile x B tile over num_steps K steps. Each stage is copied kStages - 1 steps ahead. One barrier a step: it
// shows every thread's copies to all, and says that all have done with the stage that is filled next.
// On return no copy is in flight and no thread reads shared memory any more.
template <typename Tile, typename Operands>
TF_DEVICE void multiply_tile(typename Operands::Sum (&sums)[Tile::kMmasDown][Tile::kMmasAcross][4],
                             const Operands& operands, GemmShared<Tile>& shared, int num_steps) {
  constexpr int kAhead = Tile::kStages - 1;
  for (int step = 0; step < kAhead; ++step) {
    if (step < num_steps) start_copies(operands, shared, step, step);
    cp_async_commit();
  }
  int stage = 0;
  int free_stage = kAhead;
  for (int step = 0; step < num_steps; ++step) {
    cp_async_wait<kAhead - 1>();
    __syncthreads();
    if (step + kAhead < num_steps) start_copies(operands, shared, free_stage, step + kAhead);
    cp_async_commit();  // also where nothing is left to copy: the wait counts groups
    multiply_stage<Tile>(sums, operands, shared, stage);
    stage = stage + 1 == Tile::kStages ? 0 : stage + 1;
    free_stage = free_stage + 1 == Tile::kStages ? 0 : free_stage + 1;
  }
  cp_async_wait<0>();
  __syncthreads();
}

// Calls work(first_row, first_col) for the tiles of C that fall to the calling block: every gridDim.x-th.
template <typename Tile, typename Work>
TF_DEVICE void for_each_tile(const EpilogueParams& params, Work work) {
  const int tiles_down = ceil_div(params.rows.num_rows, Tile::kRows);
  const int tiles_across = ceil_div(params.num_cols, Tile::kCols);
  const int num_tiles = tiles_down * tiles_across;  // a launcher has seen to it that int holds this
  for (int64_t index = blockIdx.x; index < num_tiles; index += gridDim.x) {
    const TilePosition position(static_cast<int>(index), tiles_down, tiles_across);
    work(position.row * Tile::kRows, position.col * Tile::kCols);
  }
}

}  // namespace trtforge
