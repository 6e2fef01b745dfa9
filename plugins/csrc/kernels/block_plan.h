// A transformer block as a list of phases, each with the operands of one kernel. Made once, by the launcher, for both
// strategies: the phases are launched one by one, or follow each other inside one kernel. Either way the same device
// functions get the same operands, so that both give the same bits.
#pragma once

#include "attention_params.h"
#include "device.cuh"
#include "params_gemm.h"

namespace trtforge {

enum class PhaseKind : int { kNorm, kQuantize, kAttention, kProduct };

// What is done, and the number of its operands in the arrays of BlockPlan.
struct BlockPhase {
  PhaseKind kind;
  int index;
};

constexpr int kMaxBlockPhases = 8;    // of an int8 block with post-norm
constexpr int kNumBlockProducts = 4;  // QKV, out, up, down

// Every phase needs all that the phase before it wrote.
struct BlockPlan {
  BlockPhase phases[kMaxBlockPhases];
  int num_phases;
  bool is_int8;  // products are in products_s8, else in products
  LayerNormParams norms[2];
  QuantizeParams quantize;
  AttentionParams attention;
  GemmParams products[kNumBlockProducts];
  GemmS8Params products_s8[kNumBlockProducts];
  GridBarrier* barrier;  // of the persistent kernel, zero before its launch
};
static_assert(sizeof(BlockPlan) <= 4096, "what every driver takes as the parameters of a kernel");

}  // namespace trtforge
