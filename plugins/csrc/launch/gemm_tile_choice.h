// From a TileChoice to the tile's type, for the launchers of the two GEMMs.
#pragma once

#include "../kernels/tile.cuh"
#include "gemm.h"

namespace trtforge {

// Tiles of a C of num_rows x num_cols, and so blocks of the launch. May be more than a grid can have.
template <typename Tile>
inline int64_t count_tiles(int num_rows, int num_cols) {
  return static_cast<int64_t>(ceil_div(num_rows, Tile::kRows)) * ceil_div(num_cols, Tile::kCols);
}

// Calls launch(Tile{}) with the tile that is asked for or, with kAuto, chosen.
template <typename Launch>
int launch_with_tile(TileChoice tile, const EpilogueParams& epilogue, const DeviceTraits& device, Launch launch) {
  if (tile == TileChoice::kAuto) {
    tile = choose_gemm_tile(epilogue.rows.num_rows, epilogue.num_cols, device.num_multiprocessors);
  }
  if (tile == TileChoice::kLarge) return launch(LargeTile{});
  if (tile == TileChoice::kMedium) return launch(MediumTile{});
  return launch(SmallTile{});
}

}  // namespace trtforge
