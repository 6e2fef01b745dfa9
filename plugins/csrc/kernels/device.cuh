// The device interface of every kernel: tensor-core, copy and barrier instructions behind thin wrappers.
//
// All PTX and every use of __CUDA_ARCH__ is in this file. With TRTFORGE_EMULATION defined, the same kernel source
// compiles with g++ and runs on the CPU: emulation/device.h then gives a twin of each name below.
//
// Rules for a kernel, checked by the emulator where it can:
//  - template <...> TF_GLOBAL void name(Params params), Params trivially copyable, with raw pointers; where the kernel
//    indexes into it, const TF_GRID_CONSTANT Params params, which keeps it in constant memory;
//  - blocks are one-dimensional and a multiple of 32 threads;
//  - shared memory is the one dynamic block, taken as a typed struct with dynamic_shared<S>(); never bare __shared__;
//  - shuffles, ldmatrix and mma order no memory between lanes: only __syncwarp, __syncthreads and grid_sync do,
//    and __threadfence together with an atomic;
//  - no thread leaves the kernel while others of its block still wait at a barrier.
// Native names that work in both: threadIdx, blockIdx, blockDim, gridDim, __syncthreads, __syncwarp, __shfl_sync,
// __shfl_xor_sync, atomicAdd, __threadfence, __float_as_uint, __uint_as_float, __float_as_int, __int_as_float, fmaf and
// the other functions of <cmath>, and the arithmetic of cuda_fp16.h and cuda_bf16.h. Vector loads (uint4, float4 through
// reinterpret_cast) are plain C++. CUDA's global min and max are not there: fminf, fmaxf or a comparison. Nor is __ldg,
// which would read past what an earlier phase of the same launch wrote.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

struct CUstream_st;

namespace trtforge {

using half = __half;
using bf16 = __nv_bfloat16;
using Stream = CUstream_st*;  // cudaStream_t, without the runtime's header

// State of grid_sync, in global memory: zero before the first launch, left reusable by every launch that ends.
struct GridBarrier {
  unsigned arrived;
  unsigned generation;
};

constexpr int kWarpSize = 32;
constexpr unsigned kFullWarp = 0xffffffffu;

}  // namespace trtforge

#ifdef TRTFORGE_EMULATION
#include "../emulation/device.h"
#else

#define TF_DEVICE __device__ __forceinline__
#define TF_HOST_DEVICE __host__ __device__ __forceinline__
#define TF_GLOBAL __global__
#define TF_GRID_CONSTANT __grid_constant__
#define TF_LAUNCH_BOUNDS(...) __launch_bounds__(__VA_ARGS__)

namespace trtforge {

// ---- Tensor cores. lane = 4 * group + t (t in 0..3), as in the PTX ISA's fragment figures.

template <typename T>
TF_DEVICE void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

// d[16, 8] += a[16, 16] * b[16, 8]; a row-major, b column-major; products exact, sums in fp32.
template <>
TF_DEVICE void mma_m16n8k16<half>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if __CUDA_ARCH__ >= 800
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else  // sm_75 has k = 8 only: the first two registers of a and the first of b hold k 0..7, the others k 8..15
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(b[0]));
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[2]), "r"(a[3]), "r"(b[1]));
#endif
}

// sm_75 has no bf16 mma: the kernel traps there, and a launcher refuses bf16 before it comes to that.
template <>
TF_DEVICE void mma_m16n8k16<bf16>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  __trap();
#endif
}

// d[16, 8] += a[16, 32] * b[32, 8], int8 operands (four to a register, lowest k in the lowest byte), int32 sums. A sum
// that overflows wraps on the device and is an error of UndefinedBehaviorSanitizer on the emulator.
TF_DEVICE void mma_m16n8k32_s8(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if __CUDA_ARCH__ >= 800
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else  // sm_75 has m8n8k16 only: two halves of m (d[0..1] and d[2..3]), two of k (b[0] and b[1])
  for (int k = 0; k < 2; ++k) {
    for (int m = 0; m < 2; ++m) {
      asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
                   : "+r"(d[2 * m]), "+r"(d[2 * m + 1])
                   : "r"(a[2 * k + m]), "r"(b[k]));
    }
  }
#endif
}

// ---- Shared memory to fragments. Lane 8 i + j gives the address of row j (16 bytes) of 8 x 8 matrix i; register i
// of a lane holds elements 2 t, 2 t + 1 of row `group` of matrix i (of its transpose with _trans). The x2 forms use
// the addresses of lanes 0..15, but every lane must give a valid one (sm_75 asks for it).

TF_DEVICE unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

TF_DEVICE void ldmatrix_x4(uint32_t (&r)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(shared_row))
               : "memory");
}

TF_DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(shared_row))
               : "memory");
}

TF_DEVICE void ldmatrix_x2(uint32_t (&r)[2], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(shared_row))
               : "memory");
}

TF_DEVICE void ldmatrix_x2_trans(uint32_t (&r)[2], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(shared_row))
               : "memory");
}

// ---- Global to shared memory, 16 bytes, both addresses aligned to 16.

// Copies in the background; writes zeros where not valid, and global is then not read.
TF_DEVICE void cp_async16(void* shared, const void* global, bool is_valid) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(shared_address(shared)), "l"(global), "r"(is_valid ? 16 : 0)
               : "memory");
#else  // sm_75: a plain copy
  *static_cast<uint4*>(shared) = is_valid ? *static_cast<const uint4*>(global) : uint4{0, 0, 0, 0};
#endif
}

// Closes a group of this thread's copies.
TF_DEVICE void cp_async_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most the N newest groups of this thread are in flight. Other threads see the data after a barrier.
template <int N>
TF_DEVICE void cp_async_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

// ---- A barrier of all blocks of a cooperative launch; what was written to global memory before it is seen after it.
TF_DEVICE void grid_sync(GridBarrier* barrier) {
  __syncthreads();
  if (threadIdx.x == 0) {
    const unsigned num_blocks = gridDim.x * gridDim.y * gridDim.z;
    volatile unsigned* generation = &barrier->generation;
    const unsigned before = *generation;  // read before arriving: afterwards the barrier may open at any time
    __threadfence();
    if (atomicAdd(&barrier->arrived, 1u) == num_blocks - 1) {
      barrier->arrived = 0;
      __threadfence();
      *generation = before + 1;
    } else {
      while (*generation == before) {
      }
    }
    __threadfence();
  }
  __syncthreads();
}

// ---- Arithmetic: 2 ** x in one instruction, within 2 ulp (PTX ISA), subnormals flushed to zero. The emulator's twin
// rounds exactly.
TF_DEVICE float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---- Shared memory and launches.

extern __shared__ __align__(16) unsigned char trtforge_dynamic_shared[];

// The block's dynamic shared memory as an S; its contents are undefined at first.
template <typename S>
TF_DEVICE S& dynamic_shared() {
  static_assert(alignof(S) <= 16, "dynamic shared memory is aligned to 16 bytes");
  static_assert(std::is_trivially_default_constructible<S>::value, "no constructor runs on shared memory");
  return *reinterpret_cast<S*>(trtforge_dynamic_shared);
}

// Writes zeros in the order of the stream; returns a cudaError_t as int.
inline int zero_memory(void* memory, std::size_t num_bytes, Stream stream) {
  return static_cast<int>(cudaMemsetAsync(memory, 0, num_bytes, stream));
}

// How many blocks of a kernel are resident on one multiprocessor of the current device at once: with all of them a
// cooperative launch is full. Returns a cudaError_t as int. At most 48 KiB of shared memory.
template <typename Params>
inline int count_resident_blocks(int* num_blocks, void (*kernel)(Params), int num_threads, std::size_t shared_bytes) {
  return static_cast<int>(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
      num_blocks, reinterpret_cast<const void*>(kernel), num_threads, shared_bytes));
}

// Launches; returns a cudaError_t as int. Above 48 KiB a kernel has to ask for its dynamic shared memory.
template <typename Params>
inline int launch_kernel(void (*kernel)(Params), dim3 grid, dim3 block, std::size_t shared_bytes, Stream stream,
                         std::common_type_t<Params> params, bool is_cooperative) {
  static_assert(std::is_trivially_copyable<Params>::value, "kernel parameters are copied as bytes");
  constexpr std::size_t kStaticLimitBytes = 48 * 1024;
  const void* function = reinterpret_cast<const void*>(kernel);
  if (shared_bytes > kStaticLimitBytes) {
    const cudaError_t raised =
        cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (raised != cudaSuccess) return static_cast<int>(raised);
  }
  void* arguments[] = {&params};
  const cudaError_t status = is_cooperative
                                 ? cudaLaunchCooperativeKernel(function, grid, block, arguments, shared_bytes, stream)
                                 : cudaLaunchKernel(function, grid, block, arguments, shared_bytes, stream);
  return static_cast<int>(status);
}

}  // namespace trtforge

#endif  // TRTFORGE_EMULATION

// A kernel with template arguments goes in parentheses: TRTFORGE_LAUNCH((gemm<half, 64>), ...). The emulator runs the
// kernel at once, on the CPU.
#define TRTFORGE_LAUNCH(kernel, grid, block, shared_bytes, stream, params) \
  ::trtforge::launch_kernel(kernel, grid, block, shared_bytes, stream, params, false)
#define TRTFORGE_LAUNCH_COOPERATIVE(kernel, grid, block, shared_bytes, stream, params) \
  ::trtforge::launch_kernel(kernel, grid, block, shared_bytes, stream, params, true)
