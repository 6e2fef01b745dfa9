// Kernels with one mistake each (kPlanted) that gives wrong data or reads what it must not, and their correct twins.
//
// Each kernel writes out[i] = in[source(i)]; the table in planted.cpp gives source. A mark `HERE name` is on the line
// that a report has to name.
#pragma once

#include "kernels/device.cuh"

namespace trtforge {

struct Arrays {
  const float* in;
  float* out;
  float* scratch;  // global, one for each element
  unsigned* counter;
  GridBarrier* barrier;
};

constexpr int kThreads = 64;
constexpr int kRowFloats = 4;  // 16 bytes

struct Floats {
  alignas(16) float data[kThreads];
};

struct Rows {
  alignas(16) float data[kWarpSize * kRowFloats];
};

inline constexpr int kPreviousWarp = kThreads - kWarpSize;

// The second warp reads what the first wrote. In sequence the first is always in time.
template <bool kPlanted>
TF_GLOBAL void missing_syncthreads(Arrays p) {
  auto& shared = dynamic_shared<Floats>();
  const unsigned t = threadIdx.x;
  shared.data[t] = p.in[t];
  if (!kPlanted) __syncthreads();
  p.out[t] = shared.data[t < kPreviousWarp ? t : t - kPreviousWarp];
}

// The buffer is filled again while the second warp may still have to read it.
template <bool kPlanted>
TF_GLOBAL void missing_syncthreads_before_reuse(Arrays p) {
  auto& shared = dynamic_shared<Floats>();
  const unsigned t = threadIdx.x;
  shared.data[t] = p.in[t];
  __syncthreads();
  p.out[t] = shared.data[kThreads - 1 - t];
  if (!kPlanted) __syncthreads();
  shared.data[t] = 0.0f;
}

// The same, where the buffer is filled with the zeros of copies that are not valid: in sequence, after its readers.
template <bool kPlanted>
TF_GLOBAL void missing_syncthreads_before_zero_fill(Arrays p) {
  auto& shared = dynamic_shared<Floats>();
  const unsigned t = threadIdx.x;
  constexpr unsigned kFirst = kThreads - kThreads / kRowFloats;  // the last threads fill a row each
  shared.data[t] = p.in[t];
  __syncthreads();
  p.out[t] = shared.data[t];
  if (!kPlanted) __syncthreads();
  if (t >= kFirst) cp_async16(static_cast<float*>(shared.data) + (t - kFirst) * kRowFloats, p.in, false);
  cp_async_commit();
  cp_async_wait<0>();
}

// A shuffle orders no memory, so it does not stand in for __syncwarp.
template <bool kPlanted>
TF_GLOBAL void missing_syncwarp(Arrays p) {
  auto& shared = dynamic_shared<Floats>();
  const unsigned t = threadIdx.x;
  shared.data[t] = p.in[t];
  const int one = __shfl_xor_sync(kFullWarp, 1, 1);
  if (!kPlanted) __syncwarp();
  p.out[t] = shared.data[t ^ one];
}

// A row that was there already is copied again, and read before it has arrived.
template <bool kPlanted>
TF_GLOBAL void missing_copy_wait(Arrays p) {
  auto& shared = dynamic_shared<Rows>();
  float* row = shared.data + threadIdx.x * kRowFloats;
  for (int i = 0; i < kRowFloats; ++i) row[i] = p.in[threadIdx.x * kRowFloats + i];
  cp_async16(row, p.in + threadIdx.x * kRowFloats, true);
  cp_async_commit();
  cp_async_wait<kPlanted ? 1 : 0>();
  for (int i = 0; i < kRowFloats; ++i) p.out[threadIdx.x * kRowFloats + i] = row[i];
  cp_async_wait<0>();
}

// A wait shows a thread its own copies only.
template <bool kPlanted>
TF_GLOBAL void missing_syncwarp_after_copy(Arrays p) {
  auto& shared = dynamic_shared<Rows>();
  const unsigned t = threadIdx.x;
  cp_async16(shared.data + t * kRowFloats, p.in + t * kRowFloats, true);
  cp_async_commit();
  cp_async_wait<0>();
  if (!kPlanted) __syncwarp();
  for (int i = 0; i < kRowFloats; ++i) p.out[t * kRowFloats + i] = shared.data[(t ^ 1) * kRowFloats + i];
}

// Each block reads what the block before it wrote.
template <bool kPlanted>
TF_GLOBAL void missing_grid_sync(Arrays p) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  const unsigned size = gridDim.x * blockDim.x;
  p.scratch[i] = p.in[i];
  if (!kPlanted) grid_sync(p.barrier);
  p.out[i] = p.scratch[blockIdx.x == 0 ? i : i - blockDim.x];
  grid_sync(p.barrier);
  p.scratch[size - 1 - i] = 0.0f;
}

// The last block to arrive at a counter reads what the others wrote before they arrived.
template <bool kPlanted>
TF_GLOBAL void missing_threadfence(Arrays p) {
  const unsigned t = threadIdx.x;
  p.scratch[blockIdx.x * blockDim.x + t] = p.in[blockIdx.x * blockDim.x + t];
  if (!kPlanted) __threadfence();
  const bool is_last = atomicAdd(p.counter, 1u) + 1 == gridDim.x * blockDim.x;
  if (!kPlanted) __threadfence();
  if (!is_last) return;
  for (unsigned i = 0; i < gridDim.x * blockDim.x; ++i) p.out[i] = p.scratch[i];
}

// Blocks of one launch run in any order, so none may overwrite what another wrote. The emulator runs the second block
// on the stacks of the first, the last thread's first; so each place is written by two threads on one stack.
template <bool kPlanted>
TF_GLOBAL void blocks_write_one_place(Arrays p) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  const unsigned place = blockIdx.x == 0 ? threadIdx.x : kThreads - 1 - threadIdx.x;
  p.scratch[kPlanted ? place : i] = p.in[i];
  p.out[i] = p.in[i];
}

// Zero times what nobody wrote is zero only where memory happens to hold a number.
template <bool kPlanted>
TF_GLOBAL void unwritten_shared(Arrays p) {
  auto& shared = dynamic_shared<Floats>();
  if (!kPlanted || threadIdx.x != 5) shared.data[threadIdx.x] = p.in[threadIdx.x];
  p.out[threadIdx.x] = p.in[threadIdx.x] + 0.0f * shared.data[threadIdx.x];
}

template <bool kPlanted>
TF_GLOBAL void out_of_bounds_read(Arrays p) {
  const unsigned last = kThreads - 1;
  const float next = p.in[kPlanted || threadIdx.x < last ? threadIdx.x + 1 : last];  // HERE out_of_bounds_read
  p.out[threadIdx.x] = next == -1.0f ? next : p.in[threadIdx.x];
}

template <bool kPlanted>
TF_GLOBAL void out_of_bounds_copy(Arrays p) {
  auto& shared = dynamic_shared<Rows>();
  const unsigned t = threadIdx.x;
  float* row = shared.data + t * kRowFloats;
  const bool is_last = t == kWarpSize - 1;
  cp_async16(row, p.in + (t + 1) * kRowFloats, kPlanted || !is_last);  // HERE out_of_bounds_copy
  cp_async_commit();
  cp_async_wait<0>();
  const float next = row[0];
  for (int i = 0; i < kRowFloats; ++i) {
    p.out[t * kRowFloats + i] = next == -1.0f ? next : p.in[t * kRowFloats + i];
  }
}

template <bool kPlanted>
TF_GLOBAL void out_of_bounds_shared_write(Arrays p) {
  auto& shared = dynamic_shared<Floats>();
  float* data = shared.data;
  data[threadIdx.x + (kPlanted ? 1 : 0)] = p.in[threadIdx.x];  // HERE out_of_bounds_shared_write
  p.out[threadIdx.x] = p.in[threadIdx.x];
}

struct TwoArrays {
  alignas(16) float data[kThreads / 2];
  float behind[kThreads / 2];
};

// Inside the block's shared memory, but not inside the array.
template <bool kPlanted>
TF_GLOBAL void index_past_array(Arrays p) {
  auto& shared = dynamic_shared<TwoArrays>();
  const unsigned t = threadIdx.x;
  const unsigned size = kThreads / 2;
  if (kPlanted || t < size) shared.data[t] = p.in[t];  // HERE index_past_array
  if (!kPlanted && t >= size) shared.behind[t - size] = p.in[t];
  p.out[t] = p.in[t];
}

template <bool kPlanted>
TF_GLOBAL void misaligned_vector_load(Arrays p) {
  const unsigned row = threadIdx.x / kRowFloats * kRowFloats;
  const float* from = p.in + (row == 0 && kPlanted ? 1 : row);
  const float4 values = *reinterpret_cast<const float4*>(from);  // HERE misaligned_vector_load
  const float4 right = *reinterpret_cast<const float4*>(p.in + row);
  p.out[threadIdx.x] = values.x == -1.0f ? right.y : p.in[threadIdx.x];
}

}  // namespace trtforge
