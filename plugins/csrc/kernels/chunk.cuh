// Eight adjacent elements as floats. A chunk of half or bf16 is the 16 bytes that one vector instruction moves.
#pragma once

#include <cstdint>
#include <cstring>

#include "device.cuh"
#include "params_gemm.h"

namespace trtforge {

constexpr int kChunkElements = 8;
constexpr int kChunkBytes = 16;

TF_HOST_DEVICE int ceil_div(int value, int divisor) { return value / divisor + (value % divisor != 0); }

// Bytes from one row of an int8 matrix to the next.
TF_HOST_DEVICE int64_t int8_row_bytes(int64_t num_cols) {
  return (num_cols + kInt8RowAlignment - 1) / kInt8RowAlignment * kInt8RowAlignment;
}

TF_DEVICE float2 float_pair_from(__half2 pair) { return __half22float2(pair); }
TF_DEVICE float2 float_pair_from(__nv_bfloat162 pair) { return __bfloat1622float2(pair); }

// The pair type of T and its rounding (half to even) from two floats.
template <typename T>
struct PairOf;

template <>
struct PairOf<half> {
  using Type = __half2;
  TF_DEVICE static Type from(float low, float high) { return __floats2half2_rn(low, high); }
};

template <>
struct PairOf<bf16> {
  using Type = __nv_bfloat162;
  TF_DEVICE static Type from(float low, float high) { return __floats2bfloat162_rn(low, high); }
};

// source: 8 x T, 16-byte aligned.
template <typename T>
TF_DEVICE void load_chunk(float (&values)[kChunkElements], const T* source) {
  static_assert(sizeof(T) * kChunkElements == kChunkBytes, "a chunk is one 16-byte vector");
  const uint4 bits = *reinterpret_cast<const uint4*>(source);
  typename PairOf<T>::Type pairs[kChunkElements / 2];
  memcpy(static_cast<void*>(pairs), &bits, kChunkBytes);
#pragma unroll
  for (int i = 0; i < kChunkElements / 2; ++i) {
    const float2 pair = float_pair_from(pairs[i]);
    values[2 * i] = pair.x;
    values[2 * i + 1] = pair.y;
  }
}

// source: 8 floats, 16-byte aligned.
TF_DEVICE void load_chunk(float (&values)[kChunkElements], const float* source) {
  const float4 low = *reinterpret_cast<const float4*>(source);
  const float4 high = *reinterpret_cast<const float4*>(source + 4);
  memcpy(values, &low, kChunkBytes);
  memcpy(values + 4, &high, kChunkBytes);
}

// target: 8 x T, 16-byte aligned.
template <typename T>
TF_DEVICE void store_chunk(T* target, const float (&values)[kChunkElements]) {
  typename PairOf<T>::Type pairs[kChunkElements / 2];
#pragma unroll
  for (int i = 0; i < kChunkElements / 2; ++i) pairs[i] = PairOf<T>::from(values[2 * i], values[2 * i + 1]);
  uint4 bits;
  memcpy(&bits, pairs, kChunkBytes);
  *reinterpret_cast<uint4*>(target) = bits;
}

// The int8 that stands for value: as QuantizeLinear with zero-point 0 has it, which divides. NaN, which int8 cannot
// hold, becomes 0.
TF_DEVICE int8_t quantize_value(float value, float scale) {
  const float rounded = rintf(value / scale);
  if (rounded != rounded) return 0;
  return static_cast<int8_t>(fminf(fmaxf(rounded, -128.0f), 127.0f));
}

// target: 2 x int8, 2-byte aligned.
TF_DEVICE void store_quantized_pair(int8_t* target, float low, float high, float scale) {
  const int8_t bytes[2] = {quantize_value(low, scale), quantize_value(high, scale)};
  uint16_t bits;
  memcpy(&bits, bytes, sizeof(bits));
  *reinterpret_cast<uint16_t*>(target) = bits;
}

// target: 8 x int8, 8-byte aligned.
TF_DEVICE void store_quantized_chunk(int8_t* target, const float (&values)[kChunkElements], float scale) {
  int8_t bytes[kChunkElements];
#pragma unroll
  for (int i = 0; i < kChunkElements; ++i) bytes[i] = quantize_value(values[i], scale);
  uint2 bits;
  memcpy(&bits, bytes, sizeof(bits));
  *reinterpret_cast<uint2*>(target) = bits;
}

}  // namespace trtforge
