// What a whole transformer block is told: the operands of trtforge::AttentionFFN_*, version 1.
//
//   post-norm: h = norm1(x + attention(x)),  y = norm2(h + ffn(h))
//   pre-norm:  h = x + attention(norm1(x)),  y = h + ffn(norm2(h))
//
// Named dims: B batch, S sequence, H width, N heads, F inner width. "T" is the element type named by `type`. Pointers
// are 16-byte aligned, those of attention_bias on 2 and of lengths on 4.
#pragma once

#include <cstddef>
#include <cstdint>

#include "params_gemm.h"

namespace trtforge {

// The order of the LayerNorms and the residual Adds.
enum class NormOrder : int { kPre = 0, kPost = 1 };

// How a block is computed. The numbers are also TensorRT's tactics, which are positive.
enum class BlockStrategy : int {
  kAuto = 0,        // choose_block_strategy in launch/block.h decides
  kLaunches = 1,    // a short sequence of launches, one a phase
  kPersistent = 2,  // one cooperative launch, with a barrier of the grid between phases
};

// A x W + bias, with K inputs and W columns.
struct BlockLinear {
  const void* weight;   // [K, W] T; of an int8 block [W, K] int8, K a multiple of 16
  const void* bias;     // [W] T
  const float* scales;  // [W]: weight[w] stands for weight[w] * scales[w]. Read only where the block is int8
  float input_scale;    // of A. Read only where the block is int8
};

struct BlockNorm {
  const void* gamma;  // [H] T
  const void* beta;   // [H] T
};

struct BlockParams {
  const void* x;               // [B, S, H] T
  const void* attention_bias;  // [each 1 or the full size of B, N, S, S] T, added to the scaled scores
  int attention_bias_dims[4];
  const int32_t* lengths;  // [B] or null: rows s >= lengths[b] are padding: hidden as keys, zero in y
  void* y;                 // [B, S, H] T, apart from x
  void* workspace;         // block_workspace_bytes(params), content of no meaning before and after
  size_t workspace_bytes;

  BlockLinear qkv;   // [H, 3 H]: columns of all heads' q, then k, then v
  BlockLinear out;   // [H, H]
  BlockLinear up;    // [H, F]
  BlockLinear down;  // [F, H]
  BlockNorm norm1;
  BlockNorm norm2;

  int batch;
  int sequence;
  int width;
  int inner_width;
  int num_heads;
  float softmax_scale;
  float epsilon;
  Activation activation;
  NormOrder order;
  ElementType type;
  bool is_causal;
  bool is_int8;
  BlockStrategy strategy;
  DeviceTraits device;
};

}  // namespace trtforge
