// Kernels with one mistake each (kPlanted) that the emulator stops at, and their correct twins. out[i] = in[i].
#pragma once

#include "kernels/device.cuh"
#include "planted_data.cuh"

namespace trtforge {

TF_DEVICE void copy_element(const Arrays& p) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  p.out[i] = p.in[i];
}

template <bool kPlanted>
TF_GLOBAL void divergent_barrier(Arrays p) {
  copy_element(p);
  if (kPlanted && threadIdx.x >= kWarpSize) {
    __syncthreads();  // HERE divergent_barrier
  } else {
    __syncthreads();
  }
  __syncthreads();
}

template <bool kPlanted>
TF_GLOBAL void exit_before_barrier(Arrays p) {
  copy_element(p);
  if (kPlanted && threadIdx.x == 3) return;
  __syncthreads();  // HERE exit_before_barrier
}

template <bool kPlanted>
TF_GLOBAL void different_collectives(Arrays p) {
  copy_element(p);
  int value = 1;
  if (kPlanted && threadIdx.x % kWarpSize >= 16) {
    value = __shfl_xor_sync(kFullWarp, value, 1);  // HERE different_collectives
  } else {
    value = __shfl_xor_sync(kFullWarp, value, 2);
  }
  if (value != 1) p.out[threadIdx.x] = -1.0f;
}

template <bool kPlanted>
TF_GLOBAL void barrier_against_collective(Arrays p) {
  copy_element(p);
  if (kPlanted && threadIdx.x % kWarpSize >= 16) {
    __syncthreads();  // HERE barrier_against_collective
  } else {
    __syncwarp(kPlanted ? kFullWarp : 1u << threadIdx.x % kWarpSize);
  }
}

// The lane has left before the others come, or leaves while they wait for it.
template <bool kPlanted>
TF_GLOBAL void exited_lane_in_mask(Arrays p) {
  copy_element(p);
  if (threadIdx.x % kWarpSize == 0) return;
  __syncwarp(kPlanted ? kFullWarp : kFullWarp & ~1u);  // HERE exited_lane_in_mask
}

template <bool kPlanted>
TF_GLOBAL void exit_while_awaited(Arrays p) {
  copy_element(p);
  if (threadIdx.x % kWarpSize == 31) return;
  __syncwarp(kPlanted ? kFullWarp : kFullWarp & ~(1u << 31));  // HERE exit_while_awaited
}

template <bool kPlanted>
TF_GLOBAL void lane_outside_its_mask(Arrays p) {
  copy_element(p);
  __syncwarp(kPlanted ? 0x7fffffffu : kFullWarp);  // HERE lane_outside_its_mask
}

template <bool kPlanted>
TF_GLOBAL void shuffle_from_outside(Arrays p) {
  copy_element(p);
  if (threadIdx.x % kWarpSize >= 16) return;
  const int value = __shfl_sync(0xffffu, 1, kPlanted ? 20 : 15);  // HERE shuffle_from_outside
  if (value != 1) p.out[threadIdx.x] = -1.0f;
}

// Three lanes, each waiting for the next.
template <bool kPlanted>
TF_GLOBAL void deadlock_of_masks(Arrays p) {
  copy_element(p);
  const unsigned lane = threadIdx.x % kWarpSize;
  if (lane >= 3) return;
  __syncwarp(kPlanted ? 1u << lane | 1u << (lane + 1) % 3 : 7u);  // HERE deadlock_of_masks
}

template <bool kPlanted>
TF_GLOBAL void deadlock_of_blocks(Arrays p) {
  copy_element(p);
  if (kPlanted && blockIdx.x == 1) return;
  grid_sync(p.barrier);  // HERE deadlock_of_blocks
}

template <bool kPlanted>
TF_GLOBAL void grid_barrier_not_zero(Arrays p) {
  copy_element(p);
  if (kPlanted && threadIdx.x == 0) p.barrier->arrived = 1;  // as after a launch that was stopped
  __syncthreads();
  grid_sync(p.barrier);  // HERE grid_barrier_not_zero
}

template <bool kPlanted>
TF_GLOBAL void copy_in_flight_at_exit(Arrays p) {
  auto& shared = dynamic_shared<Floats>();
  copy_element(p);
  if (threadIdx.x < 4) {
    cp_async16(shared.data + 4 * threadIdx.x, p.in + 4 * threadIdx.x, true);  // HERE copy_in_flight_at_exit
  }
  cp_async_commit();
  if (!kPlanted) cp_async_wait<0>();
}

template <bool kPlanted>
TF_GLOBAL void copy_never_committed(Arrays p) {
  auto& shared = dynamic_shared<Floats>();
  copy_element(p);
  if (threadIdx.x < 4) {
    cp_async16(shared.data + 4 * threadIdx.x, p.in + 4 * threadIdx.x, true);  // HERE copy_never_committed
  }
  if (!kPlanted) cp_async_commit();
  cp_async_wait<0>();
}

template <bool kPlanted>
TF_GLOBAL void misaligned_copy_to_shared(Arrays p) {
  auto& shared = dynamic_shared<Floats>();
  copy_element(p);
  if (threadIdx.x < 4) {
    cp_async16(shared.data + 4 * threadIdx.x + (kPlanted ? 1 : 0), p.in, true);  // HERE misaligned_copy_to_shared
  }
  cp_async_commit();
  cp_async_wait<0>();
}

template <bool kPlanted>
TF_GLOBAL void misaligned_copy_from_global(Arrays p) {
  auto& shared = dynamic_shared<Floats>();
  copy_element(p);
  if (threadIdx.x < 4) {
    const float* from = p.in + (kPlanted ? 2 : 0);
    cp_async16(shared.data + 4 * threadIdx.x, from, true);  // HERE misaligned_copy_from_global
  }
  cp_async_commit();
  cp_async_wait<0>();
}

template <bool kPlanted>
TF_GLOBAL void copy_outside_shared(Arrays p) {
  auto& shared = dynamic_shared<Floats>();
  copy_element(p);
  float* data = shared.data;
  if (threadIdx.x < 4) {
    cp_async16(data + 4 * threadIdx.x + (kPlanted ? kThreads : 0), p.in, true);  // HERE copy_outside_shared
  }
  cp_async_commit();
  cp_async_wait<0>();
}

template <bool kPlanted>
TF_GLOBAL void misaligned_ldmatrix(Arrays p) {
  auto& shared = dynamic_shared<Floats>();
  copy_element(p);
  shared.data[threadIdx.x] = 0.0f;
  __syncthreads();
  uint32_t r[2];
  ldmatrix_x2(r, shared.data + threadIdx.x % 8 * 4 + (kPlanted ? 2 : 0));  // HERE misaligned_ldmatrix
}

// Only the addresses of lanes 0..15 are used, but sm_75 wants all to be valid.
template <bool kPlanted>
TF_GLOBAL void ldmatrix_outside_shared(Arrays p) {
  auto& shared = dynamic_shared<Floats>();
  copy_element(p);
  shared.data[threadIdx.x] = 0.0f;
  __syncthreads();
  uint32_t r[2];
  const unsigned row = kPlanted ? threadIdx.x % kWarpSize : threadIdx.x % 16;
  ldmatrix_x2_trans(r, static_cast<float*>(shared.data) + row * 4);  // HERE ldmatrix_outside_shared
}

template <bool kPlanted>
TF_GLOBAL void too_little_shared(Arrays p) {
  using Asked = std::conditional_t<kPlanted, float[2 * kThreads], float[kThreads]>;
  auto& shared = dynamic_shared<Asked>();  // HERE too_little_shared
  shared[threadIdx.x] = 0.0f;
  copy_element(p);
}

template <bool kPlanted>
TF_GLOBAL void grid_sync_in_plain_launch(Arrays p) {
  copy_element(p);
  if (kPlanted) grid_sync(p.barrier);  // HERE grid_sync_in_plain_launch
}

}  // namespace trtforge
