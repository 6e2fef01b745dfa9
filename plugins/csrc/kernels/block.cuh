// A whole transformer block in one cooperative launch: the phases of a BlockPlan, with a grid barrier between two.
//
// The grid is what fits on the device at once, or less where no phase has as many tiles. In each phase the blocks take
// tiles (rows, for a norm) in turn, so any grid is right, and the order of sums does not depend on it.
//
// One loop runs all phases, with the kind of phase as a uniform branch: the code of a GEMM is there once and not four
// times, so the four products of a block find it in the instruction cache. The operands stay in constant memory.
//
// Writes of a phase are seen in the next: grid_sync orders global memory, and nothing that a phase writes is read
// through the read-only cache (a test looks at the PTX). Shared memory is one block of 48 KB that each phase takes
// over; every tile function leaves it free on return.
#pragma once

#include "attention.cuh"
#include "block_plan.h"
#include "device.cuh"
#include "gemm.cuh"
#include "gemm_s8.cuh"
#include "layernorm.cuh"
#include "tile.cuh"

namespace trtforge {

template <typename AttentionTile>
union BlockShared {
  GemmShared<SmallTile> small;
  GemmShared<MediumTile> medium;
  typename AttentionTile::Shared attention;
};

constexpr int kBlockThreads = SmallTile::kThreads;
// The accumulators of attention at D = 128 take over 200 registers; two blocks also fill shared memory (48 KB each).
constexpr int kMinPersistentBlocks = 2;

// The large tile is for products of more rows than are worth a persistent kernel, and would cost it registers.
template <typename T, typename AttentionTile, typename Product>
TF_DEVICE void run_product(const Product& product, BlockShared<AttentionTile>& shared) {
  if (product.tile == TileChoice::kSmall) {
    gemm_tiles<T, SmallTile>(product, shared.small);
  } else {
    gemm_tiles<T, MediumTile>(product, shared.medium);
  }
}

// AttentionTile: names T and the head size.
template <typename AttentionTile, bool kIsInt8>
TF_DEVICE void run_phase(const BlockPlan& plan, const BlockPhase& phase, BlockShared<AttentionTile>& shared) {
  using T = typename AttentionTile::T;
  switch (phase.kind) {
    case PhaseKind::kNorm:
      return layernorm_rows<T>(plan.norms[phase.index]);
    case PhaseKind::kQuantize:
      if constexpr (kIsInt8) quantize_rows<T>(plan.quantize);
      return;
    case PhaseKind::kAttention:
      return attention_tiles<AttentionTile>(plan.attention, shared.attention, plan.attention.is_causal);
    case PhaseKind::kProduct:
      if constexpr (kIsInt8) {
        run_product<T>(plan.products_s8[phase.index], shared);
      } else {
        run_product<T>(plan.products[phase.index], shared);
      }
  }
}

// sync(i) comes before phase i.
template <typename AttentionTile, bool kIsInt8, typename Sync>
TF_DEVICE void run_phases(const BlockPlan& plan, BlockShared<AttentionTile>& shared, Sync sync) {
#pragma unroll 1
  for (int i = 0; i < plan.num_phases; ++i) {
    if (i > 0) sync(i);
    run_phase<AttentionTile, kIsInt8>(plan, plan.phases[i], shared);
  }
}

// Grid: at most what is resident at once; block: kBlockThreads; shared memory: sizeof(BlockShared<AttentionTile>).
template <typename AttentionTile, bool kIsInt8>
TF_GLOBAL void TF_LAUNCH_BOUNDS(kBlockThreads, kMinPersistentBlocks)
    block_kernel(const TF_GRID_CONSTANT BlockPlan plan) {
  auto& shared = dynamic_shared<BlockShared<AttentionTile>>();
  run_phases<AttentionTile, kIsInt8>(plan, shared, [&](int) { grid_sync(plan.barrier); });
}

}  // namespace trtforge
