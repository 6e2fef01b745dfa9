// The GEMM and LayerNorm device functions as phases of one persistent kernel, with fewer blocks than tiles, so that
// each block takes several tiles in turn through the same shared memory.
#include "phases.h"

#include <cstdint>

#include "../../../plugins/csrc/kernels/gemm.cuh"
#include "../../../plugins/csrc/kernels/layernorm.cuh"

namespace trtforge {

struct PhasesParams {
  GemmParams up;
  GemmParams down;
  LayerNormParams norm;
  GridBarrier* barrier;
};

template <typename T, typename Tile>
TF_GLOBAL void TF_LAUNCH_BOUNDS(Tile::kThreads) phases_kernel(PhasesParams params) {
  auto& shared = dynamic_shared<GemmShared<Tile>>();
  gemm_tiles<T, Tile>(params.up, shared);
  grid_sync(params.barrier);
  gemm_tiles<T, Tile>(params.down, shared);
  grid_sync(params.barrier);
  layernorm_rows<T>(params.norm);
}

}  // namespace trtforge

using namespace trtforge;

int run_phases(const Case& c) {
  using Tile = SmallTile;
  const int m = c.number("m"), h = c.number("h"), f = c.number("f");
  const Buffer x = c.read("x"), w_up = c.read("w_up"), b_up = c.read("b_up"), w_down = c.read("w_down");
  const Buffer b_down = c.read("b_down"), gamma = c.read("gamma"), beta = c.read("beta"), lengths = c.read("lengths");
  const Buffer up(static_cast<std::size_t>(m) * f * 2), down(static_cast<std::size_t>(m) * h * 2);
  const Buffer y(static_cast<std::size_t>(m) * h * 2);
  const RowSet rows{m, c.number("s"), lengths.as<int32_t>()};
  GridBarrier barrier{};

  PhasesParams params{};
  params.up.a = x.as();
  params.up.b = w_up.as();
  params.up.depth = h;
  params.up.epilogue = {up.as(), b_up.as(), nullptr, rows, f, Activation::kGelu};
  params.down.a = up.as();
  params.down.b = w_down.as();
  params.down.depth = f;
  params.down.epilogue = {down.as(), b_down.as(), x.as(), rows, h, Activation::kNone};
  params.norm.x = down.as();
  params.norm.gamma = gamma.as();
  params.norm.beta = beta.as();
  params.norm.y = y.as();
  params.norm.epsilon = c.real("epsilon");
  params.norm.rows = rows;
  params.norm.width = h;
  params.barrier = &barrier;
  const int status = TRTFORGE_LAUNCH_COOPERATIVE((phases_kernel<half, Tile>), dim3(c.number("num_blocks")),
                                                 dim3(Tile::kThreads), sizeof(GemmShared<Tile>), nullptr, params);
  c.write("y", y);
  return status;
}
