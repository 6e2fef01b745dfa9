// From a TileChoice to the tile's type and the grid, for the launchers of the two GEMMs.
#pragma once

#include <climits>
#include <cstdint>

#include "../kernels/tile.cuh"
#include "gemm.h"
#include "gemm_checks.h"

namespace trtforge {

// Tiles of a C of num_rows x num_cols, and so blocks of the launch. May be more than a grid can have.
template <typename Tile>
inline int64_t count_tiles(int num_rows, int num_cols) {
  return static_cast<int64_t>(ceil_div(num_rows, Tile::kRows)) * ceil_div(num_cols, Tile::kCols);
}

// launch(Tile{}, grid) launches a block a tile and returns what CUDA does.
template <typename Tile, typename Launch>
int launch_tiles(const EpilogueParams& epilogue, Launch launch) {
  const int64_t num_tiles = count_tiles<Tile>(epilogue.rows.num_rows, epilogue.num_cols);
  if (num_tiles > INT_MAX) return static_cast<int>(GemmStatus::kTooLarge);
  return launch_status(launch(Tile{}, dim3(static_cast<unsigned>(num_tiles))));
}

// The same with the tile that is asked for or, with kAuto, chosen.
template <typename Launch>
int launch_with_tile(TileChoice tile, const EpilogueParams& epilogue, const DeviceTraits& device, Launch launch) {
  if (tile == TileChoice::kAuto) {
    tile = choose_gemm_tile(epilogue.rows.num_rows, epilogue.num_cols, device.num_multiprocessors);
  }
  if (tile == TileChoice::kLarge) return launch_tiles<LargeTile>(epilogue, launch);
  if (tile == TileChoice::kMedium) return launch_tiles<MediumTile>(epilogue, launch);
  return launch_tiles<SmallTile>(epilogue, launch);
}

}  // namespace trtforge
