// Block tiles of the GEMM kernels, and the layout of their operands in shared memory.
//
// A block of 4 warps computes a kRows x kCols tile of C; the warps form a 2 x 2 grid over it. K is walked in steps of
// kDepthBytes bytes per row of A (32 or 64 half / bf16 elements, 64 or 128 int8 elements), through a ring of kStages
// stages that cp.async fills ahead of use. One stage holds
//   A        [kRows][kDepthBytes]           rows of C's tile, K along the row
//   B        [kDepthBytes / 2][kCols] T     half and bf16: as it lies in memory, K down the rows
//   B int8   [kCols][kDepthBytes]           transposed weights, K along the row
// which is kRows * kDepthBytes + kCols * kDepthBytes bytes for each type. All three tiles take 48 KB of shared memory,
// what every target gives a block without asking: two blocks run on an SM of 100 KB or more, one on sm_75.
//
//            C tile     K step    stages   a warp's part   for
//   small    32 x 64    128 B     4        16 x 32         few rows: many blocks, many bytes in flight
//   medium   64 x 64    128 B     3        32 x 32         in between
//   large    128 x 128  64 B      3        64 x 64         many rows: each element read from shared memory feeds 64
//                                                          products, so that mma and not ldmatrix is the limit
//
// Swizzle: ldmatrix and cp.async move chunks of 16 bytes, of which a 128-byte line of the 32 banks holds 8. ldmatrix
// reads the same chunk of 8 consecutive rows at once, which would lie in the same banks. So chunk c of row r is kept at
// chunk c ^ key(r): with 8 or more chunks in a row, key = r % 8, and the 8 rows use 8 different chunks of a line; with
// 4, where a line holds two rows, key = (r / 2) % 4, and rows of even and odd number use 4 chunks each of either half.
// A warp's cp.async writes whole rows, chunk by chunk: a permutation of the chunks of a line, again without conflict.
//
// The products of an element of C are added in ascending order of K, 16 (32 for int8) in one mma, whatever the tile:
// the choice of tile changes no bit of the result.
#pragma once

#include <cstdint>

#include "chunk.cuh"
#include "device.cuh"

namespace trtforge {

constexpr int kMmaRows = 16;
constexpr int kMmaCols = 8;
constexpr int kMmaDepthBytes = 32;  // K of one mma: 16 half or bf16, 32 int8

template <int kRows_, int kCols_, int kDepthBytes_, int kStages_>
struct GemmTile {
  static constexpr int kRows = kRows_;
  static constexpr int kCols = kCols_;
  static constexpr int kDepthBytes = kDepthBytes_;
  static constexpr int kStages = kStages_;
  static constexpr int kWarpGrid = 2;
  static constexpr int kThreads = kWarpSize * kWarpGrid * kWarpGrid;
  static constexpr int kMinBlocks = 2;  // on an SM: the compiler may use the registers that shared memory leaves idle
  static constexpr int kWarpRows = kRows / kWarpGrid;
  static constexpr int kWarpCols = kCols / kWarpGrid;
  static constexpr int kMmasDown = kWarpRows / kMmaRows;
  static constexpr int kMmasAcross = kWarpCols / kMmaCols;

  static_assert(kWarpRows % kMmaRows == 0, "a warp's rows are whole mma tiles");
  static_assert(kWarpCols % 32 == 0, "the epilogue gives the 4 lanes of a quad 8 adjacent columns each");
  static_assert(kDepthBytes == 64 || kDepthBytes % 128 == 0, "the swizzle knows rows of 4 chunks or a multiple of 8");
  static_assert(kStages >= 2, "a stage is filled while another is multiplied");
  static_assert(kStages * (kRows + kCols) * kDepthBytes <= 48 * 1024, "a block asks for no more than 48 KB");
};

using SmallTile = GemmTile<32, 64, 128, 4>;
using MediumTile = GemmTile<64, 64, 128, 3>;
using LargeTile = GemmTile<128, 128, 64, 3>;

template <typename Tile>
struct alignas(kChunkBytes) GemmShared {
  unsigned char a[Tile::kStages][Tile::kRows * Tile::kDepthBytes];
  unsigned char b[Tile::kStages][Tile::kCols * Tile::kDepthBytes];
};

// Byte offset of a chunk in a tile whose rows have kChunks chunks.
template <int kChunks>
TF_DEVICE int swizzled_offset(int row, int chunk) {
  static_assert(kChunks == 4 || kChunks % 8 == 0, "the swizzle knows rows of 4 chunks or a multiple of 8");
  const int key = kChunks == 4 ? (row / 2) % 4 : row % 8;
  return (row * kChunks + (chunk ^ key)) * kChunkBytes;
}

// The part of a block tile that the calling warp computes.
template <typename Tile>
struct WarpPart {
  int row;  // first row and column inside the block tile
  int col;
  int lane;

  TF_DEVICE WarpPart() {
    const int thread = static_cast<int>(threadIdx.x);
    const int warp = thread / kWarpSize;
    row = warp / Tile::kWarpGrid * Tile::kWarpRows;
    col = warp % Tile::kWarpGrid * Tile::kWarpCols;
    lane = thread % kWarpSize;
  }
};

// Where tile number `index` of a grid of tiles lies. Tiles are numbered down strips of kStrip rows of tiles, so that
// the blocks that run together share the columns of B and the rows of A that the L2 cache holds.
struct TilePosition {
  static constexpr int kStrip = 8;
  int row;  // in tiles
  int col;

  TF_DEVICE TilePosition(int index, int tiles_down, int tiles_across) {
    const int strip = index / (kStrip * tiles_across);
    const int first = strip * kStrip;
    const int height = tiles_down - first < kStrip ? tiles_down - first : kStrip;
    const int in_strip = index - strip * kStrip * tiles_across;
    row = first + in_strip % height;
    col = in_strip / height;
  }
};

}  // namespace trtforge
