// What the attention kernel is given: pointers, sizes and strides. B batch, S sequence, N heads, D head size.
//
// Strides are in elements, so one struct describes both a packed [B, S, 3, N, D] projection (row stride 3 * N * D,
// head stride D, k = q + N * D, v = k + N * D) and three tensors of their own.
#pragma once

#include <cstdint>

#include "params_gemm.h"

namespace trtforge {

struct AttentionParams {
  const void* q;           // [B, S, N, D] by strides, 16-byte aligned
  const void* k;           // [B, S, N, D] by the same strides
  const void* v;           // [B, S, N, D] by the same strides
  const void* bias;        // [B, N, S, S] by the bias strides, 0 where broadcast; added to the scaled scores
  const int32_t* lengths;  // [B], or null: every row and key is valid. Clamped to [0, S]
  void* output;            // [B, S, N * D], contiguous, 16-byte aligned; not read where output_int8 is given
  int8_t* output_int8;  // [B, S, N * D], rows int8_row_bytes(N * D) apart, or null: output / output_scale, rounded once
  float output_scale;

  int64_t batch_stride;  // of q, k and v: from one sample to the next
  int64_t row_stride;    // of q, k and v: from one row of S to the next
  int64_t head_stride;   // of q, k and v: from one head to the next

  int64_t bias_batch_stride;
  int64_t bias_head_stride;
  int64_t bias_row_stride;
  int bias_key_stride;  // 0 or 1

  int batch;
  int sequence;
  int num_heads;
  int head_size;
  float softmax_scale;
  ElementType type;  // of q, k, v, bias and output
  bool is_causal;    // row i sees the keys 0..i (upper-left alignment)
  DeviceTraits device;
};

}  // namespace trtforge
