// A persistent block that leaves out the grid barrier before one of its phases.
//
//   skipped_sync float|int8 NUMBER      phases are counted from 0; before phase 0 there is none, so 0 leaves out
//   nothing
//
// Prints the number of phases, and whether the result is that of a sequence of launches.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "emulation/global_memory.h"
#include "kernels/block.cuh"
#include "launch/block_launches.h"
#include "launch/block_planning.h"
#include "launch/block_workspace.h"

using namespace trtforge;

namespace {

constexpr int kBatch = 2, kSequence = 40, kWidth = 64, kInner = 96, kHeads = 2;
// Fewer than tiles, so that each block has several in turn; and no divisor of the rows of tiles, so that none reads in
// a phase only what it wrote itself in the one before.
constexpr unsigned kNumBlocks = 2;
constexpr std::size_t kRowsWide = kBatch * kSequence * kWidth;

struct Params {
  BlockPlan plan;
  int skipped;
};

template <bool kIsInt8>
TF_GLOBAL void skipping_kernel(const TF_GRID_CONSTANT Params params) {
  using Tile = AttentionTile<half, kWidth / kHeads>;
  auto& shared = dynamic_shared<BlockShared<Tile>>();
  run_phases<Tile, kIsInt8>(params.plan, shared, [&](int phase) {
    if (phase != params.skipped) grid_sync(params.plan.barrier);
  });
}

// One array serves as every operand of its type: what counts is that the results tell apart.
struct Operands {
  emulation::GlobalMemory<half> halves{kWidth * 3 * kWidth};
  emulation::GlobalMemory<int8_t> codes{kWidth * 3 * kWidth};
  emulation::GlobalMemory<float> scales{3 * kWidth};
  emulation::GlobalMemory<half> y{kRowsWide};

  Operands() {
    std::mt19937 random(1);
    for (std::size_t i = 0; i < halves.size(); ++i) {
      halves[i] = __float2half(static_cast<float>(random() % 1024) / 1024 - 0.5f);
      codes[i] = static_cast<int8_t>(random() % 255 - 127);
    }
    for (std::size_t i = 0; i < scales.size(); ++i) scales[i] = 1.0f / 512;
  }

  BlockLinear linear(bool is_int8) const {
    const void* weight = is_int8 ? static_cast<const void*>(codes.data()) : halves.data();
    return {weight, halves.data(), scales.data(), 1.0f / 64};
  }
};

BlockParams params_of(bool is_int8, Operands& operands) {
  BlockParams params{};
  params.x = operands.halves.data() + kWidth;
  params.attention_bias = operands.halves.data();
  for (int& dim : params.attention_bias_dims) dim = 1;
  params.y = operands.y.data();
  params.qkv = params.out = params.up = params.down = operands.linear(is_int8);
  params.norm1 = params.norm2 = {operands.halves.data(), operands.halves.data()};
  params.batch = kBatch;
  params.sequence = kSequence;
  params.width = kWidth;
  params.inner_width = kInner;
  params.num_heads = kHeads;
  params.softmax_scale = 0.25f;
  params.epsilon = 1e-5f;
  params.activation = Activation::kGelu;
  params.order = is_int8 ? NormOrder::kPost : NormOrder::kPre;
  params.is_int8 = is_int8;
  params.device = {86, 1};
  return params;
}

template <bool kIsInt8>
int run(int skipped) {
  Operands operands;
  BlockParams params = params_of(kIsInt8, operands);
  emulation::GlobalMemory<unsigned char> workspace(BlockWorkspace(params).num_bytes);
  params.workspace = workspace.data();
  Params launched{plan_block(params), skipped};
  if (launch_block_phases(launched.plan, nullptr) != 0) return 2;
  emulation::GlobalMemory<half> expected(kRowsWide);
  std::memcpy(static_cast<void*>(expected.data()), operands.y.data(), kRowsWide * sizeof(half));

  std::memset(static_cast<void*>(operands.y.data()), 0xff, kRowsWide * sizeof(half));
  std::memset(workspace.data(), 0xff, workspace.size());
  *launched.plan.barrier = {0, 0};
  for (int i = 0; i < kNumBlockProducts; ++i) {
    launched.plan.products[i].tile = launched.plan.products_s8[i].tile = TileChoice::kSmall;
  }
  const int status =
      TRTFORGE_LAUNCH_COOPERATIVE(skipping_kernel<kIsInt8>, kNumBlocks, kBlockThreads,
                                  sizeof(BlockShared<AttentionTile<half, kWidth / kHeads>>), nullptr, launched);
  const bool is_same = std::memcmp(expected.data(), operands.y.data(), kRowsWide * sizeof(half)) == 0;
  std::printf("%d phases, %s\n", launched.plan.num_phases, is_same ? "same" : "different");
  return status;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const int skipped = std::atoi(argv[2]);
  return std::strcmp(argv[1], "int8") == 0 ? run<true>(skipped) : run<false>(skipped);
}
