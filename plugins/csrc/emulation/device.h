// The g++ twin of kernels/device.cuh, which includes it and documents each function.
//
// Functions that threads do together, and those that can be called wrongly, take the place of the call as a last
// argument that kernels leave to its default.
#pragma once

#include <vector_types.h>

#include <cmath>
#include <cstring>
#include <type_traits>

#include "../kernels/device.cuh"
#include "errors.h"
#include "fragments.h"
#include "machine.h"

#define TF_DEVICE inline
#define TF_HOST_DEVICE inline
#define TF_GLOBAL
#define TF_GRID_CONSTANT
#define TF_LAUNCH_BOUNDS(...)

// Set for the running thread at each switch of fibers.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace trtforge {

using emulation::Location;

// ---- Tensor cores and their loads.

template <typename T>
inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                         Location where = Location::here()) {
  if (std::is_same<T, bf16>::value && emulation::options().target == 75) {
    emulation::fail(where, "sm_75 has no bf16 mma");
  }
  emulation::MmaArguments<float> arguments{d, a, b};
  emulation::meet_warp({"mma_m16n8k16", kFullWarp, where, false, &arguments, emulation::run_mma_m16n8k16<T>});
}

inline void mma_m16n8k32_s8(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                            Location where = Location::here()) {
  emulation::MmaArguments<int32_t> arguments{d, a, b};
  emulation::meet_warp({"mma_m16n8k32_s8", kFullWarp, where, false, &arguments, emulation::run_mma_m16n8k32_s8});
}

namespace emulation {

// Each lane reads its own row before it meets the others: nothing orders the row after a write of another lane.
template <int num_matrices, bool is_transposed>
inline void load_matrices(const char* name, uint32_t (&r)[num_matrices], const void* shared_row, Location where) {
  check_shared_row(name, shared_row, where);
  MatrixRow row{{}, r};
  if (lane_index() < 8 * num_matrices) std::memcpy(row.bytes, shared_row, sizeof(row.bytes));
  meet_warp({name, kFullWarp, where, false, &row, run_ldmatrix<num_matrices, is_transposed>});
}

}  // namespace emulation

inline void ldmatrix_x4(uint32_t (&r)[4], const void* shared_row, Location where = Location::here()) {
  emulation::load_matrices<4, false>("ldmatrix_x4", r, shared_row, where);
}

inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* shared_row, Location where = Location::here()) {
  emulation::load_matrices<4, true>("ldmatrix_x4_trans", r, shared_row, where);
}

inline void ldmatrix_x2(uint32_t (&r)[2], const void* shared_row, Location where = Location::here()) {
  emulation::load_matrices<2, false>("ldmatrix_x2", r, shared_row, where);
}

inline void ldmatrix_x2_trans(uint32_t (&r)[2], const void* shared_row, Location where = Location::here()) {
  emulation::load_matrices<2, true>("ldmatrix_x2_trans", r, shared_row, where);
}

// ---- Copies: the destination holds NaN from here until the wait.

inline void cp_async16(void* shared, const void* global, bool is_valid, Location where = Location::here()) {
  emulation::issue_copy(shared, global, is_valid, where);
}

inline void cp_async_commit() { emulation::commit_copies(); }

template <int N>
inline void cp_async_wait() {
  static_assert(N >= 0, "a number of groups");
  emulation::wait_for_copies(N);
}

inline void grid_sync(GridBarrier* barrier, Location where = Location::here()) { emulation::meet_grid(barrier, where); }

// ---- Arithmetic, rounded exactly.

inline float ex2(float x) { return std::exp2(x); }

// ---- Shared memory and launches.

template <typename S>
inline S& dynamic_shared(Location where = Location::here()) {
  static_assert(alignof(S) <= 16, "dynamic shared memory is aligned to 16 bytes");
  static_assert(std::is_trivially_default_constructible<S>::value, "no constructor runs on shared memory");
  return *static_cast<S*>(emulation::shared_memory(sizeof(S), where));
}

inline int zero_memory(void* memory, std::size_t num_bytes, Stream) {
  std::memset(memory, 0, num_bytes);
  return 0;
}

// The CPU has no multiprocessors: the number is an option.
template <typename Params>
inline int count_resident_blocks(int* num_blocks, void (*)(Params), int, std::size_t) {
  *num_blocks = emulation::options().resident_blocks;
  return 0;
}

template <typename Params>
inline int launch_kernel(void (*kernel)(Params), dim3 grid, dim3 block, std::size_t shared_bytes, Stream,
                         std::common_type_t<Params> params, bool is_cooperative, Location where = Location::here()) {
  static_assert(std::is_trivially_copyable<Params>::value, "kernel parameters are copied as bytes");
  struct Call {
    void (*kernel)(Params);
    const Params* params;
  };
  const Call call{kernel, &params};
  const auto body = [](const void* argument) {
    const Call* of_thread = static_cast<const Call*>(argument);
    of_thread->kernel(*of_thread->params);
  };
  return emulation::launch(grid, block, shared_bytes, is_cooperative, body, &call, where);
}

}  // namespace trtforge

#include "native.h"
