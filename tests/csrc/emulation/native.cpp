// Shuffles, atomicAdd, copies, arithmetic and the grid barrier, each against what CUDA's guide says of it.
#include <cmath>
#include <cstdio>

#include "emulation/global_memory.h"
#include "kernels/device.cuh"

namespace trtforge {

namespace {

int num_failed = 0;

void expect(bool is_right, const char* what) {
  if (is_right) return;
  ++num_failed;
  std::printf("wrong: %s\n", what);
}

constexpr int kValues = 5;  // of each lane

TF_GLOBAL void exchange(double* out) {
  const int lane = threadIdx.x;
  double* own = out + lane * kValues;
  own[0] = __shfl_sync(kFullWarp, lane + 0.5, 35);  // the source counts modulo the width
  own[1] = __shfl_sync(kFullWarp, lane, 3, 8);      // each segment's own lane 3
  own[2] = __shfl_xor_sync(kFullWarp, static_cast<float>(lane), 5);
  own[3] = __shfl_xor_sync(kFullWarp, lane, 8, 8);  // an earlier segment can be read, a later one cannot
  own[4] = __half2float(__shfl_xor_sync(kFullWarp, __float2half_rn(static_cast<float>(lane)), 1));
}

void check_exchange() {
  emulation::GlobalMemory<double> out(32 * kValues);
  expect(TRTFORGE_LAUNCH(exchange, 1, 32, 0, nullptr, out.data()) == 0, "exchange launch");
  for (int lane = 0; lane < 32; ++lane) {
    const double* own = out.data() + lane * kValues;
    expect(own[0] == 3.5, "__shfl_sync of a double");
    expect(own[1] == lane / 8 * 8 + 3, "__shfl_sync with a width");
    expect(own[2] == (lane ^ 5), "__shfl_xor_sync");
    expect(own[3] == (lane % 16 < 8 ? lane : lane - 8), "__shfl_xor_sync with a width");
    expect(own[4] == (lane ^ 1), "__shfl_xor_sync of a half");
  }
}

struct Counters {
  unsigned count;
  float sum;
};

TF_GLOBAL void count(Counters* counters) {
  atomicAdd(&counters->count, 2);
  atomicAdd(&counters->sum, 0.5f);
}

void check_atomics() {
  emulation::GlobalMemory<Counters> counters(1);
  counters[0] = {0, 0.0f};
  expect(TRTFORGE_LAUNCH(count, 3, 64, 0, nullptr, counters.data()) == 0, "count launch");
  expect(counters[0].count == 3 * 64 * 2, "atomicAdd of an unsigned");
  expect(counters[0].sum == 3 * 64 * 0.5f, "atomicAdd of a float");
}

struct CopyParams {
  const float* in;  // [32, 8]
  float* out;       // [32, 8]
  float* early;     // [32, 4], what shared memory held while the second group was in flight
};

struct TwoRows {
  alignas(16) float data[32][8];
};

TF_GLOBAL void copy(CopyParams p) {
  auto& shared = dynamic_shared<TwoRows>();
  const unsigned t = threadIdx.x;
  for (float& value : shared.data[t]) value = 0.0f;
  cp_async16(shared.data[t], p.in + t * 8, t % 2 == 0);  // odd lanes: zeros, and nothing is read
  cp_async_commit();
  cp_async16(shared.data[t] + 4, p.in + t * 8 + 4, true);
  cp_async_commit();
  cp_async_wait<1>();
  for (int i = 0; i < 4; ++i) p.early[t * 4 + i] = shared.data[t][4 + i];
  for (int i = 0; i < 4; ++i) p.out[t * 8 + i] = shared.data[t][i];
  cp_async_wait<0>();
  for (int i = 4; i < 8; ++i) p.out[t * 8 + i] = shared.data[t][i];
}

void check_copies() {
  emulation::GlobalMemory<float> in(32 * 8);
  emulation::GlobalMemory<float> out(32 * 8);
  emulation::GlobalMemory<float> early(32 * 4);
  for (unsigned i = 0; i < in.size(); ++i) in[i] = static_cast<float>(i + 1);
  const CopyParams params{in.data(), out.data(), early.data()};
  expect(TRTFORGE_LAUNCH(copy, 1, 32, sizeof(TwoRows), nullptr, params) == 0, "copy launch");
  for (unsigned i = 0; i < out.size(); ++i) {
    const bool is_zero = i / 8 % 2 == 1 && i % 8 < 4;
    expect(out[i] == (is_zero ? 0.0f : in[i]), "cp_async16");
  }
  for (unsigned i = 0; i < early.size(); ++i) expect(std::isnan(early[i]), "a copy is late, and NaN until it comes");
}

struct SumParams {
  float* values;  // [blocks]
  float* out;     // [blocks]
  GridBarrier* barrier;
};

// Rounds of "every block reads all the others' values, then writes its own".
TF_GLOBAL void sum_blocks(SumParams p) {
  for (int round = 0; round < 3; ++round) {
    float sum = 0.0f;
    for (unsigned i = 0; i < gridDim.x; ++i) sum += p.values[i];
    grid_sync(p.barrier);
    if (threadIdx.x == 0) p.values[blockIdx.x] = sum + blockIdx.x;
    grid_sync(p.barrier);
  }
  if (threadIdx.x == 0) p.out[blockIdx.x] = p.values[blockIdx.x];
}

void check_grid_sync() {
  constexpr int kBlocks = 3;
  emulation::GlobalMemory<float> values(kBlocks);
  emulation::GlobalMemory<float> out(kBlocks);
  emulation::GlobalMemory<GridBarrier> barrier(1);
  barrier[0] = {0, 0};
  const SumParams params{values.data(), out.data(), barrier.data()};
  for (int launch = 0; launch < 2; ++launch) {  // a launch leaves the barrier as the next one needs it
    for (int i = 0; i < kBlocks; ++i) values[i] = 1.0f;
    expect(TRTFORGE_LAUNCH_COOPERATIVE(sum_blocks, kBlocks, 64, 0, nullptr, params) == 0, "sum launch");
    float expected[kBlocks] = {1.0f, 1.0f, 1.0f};
    for (int round = 0; round < 3; ++round) {
      const float sum = expected[0] + expected[1] + expected[2];
      for (int i = 0; i < kBlocks; ++i) expected[i] = sum + static_cast<float>(i);
    }
    for (int i = 0; i < kBlocks; ++i) expect(out[i] == expected[i], "grid_sync");
  }
  expect(barrier[0].arrived == 0 && barrier[0].generation == 12, "the barrier after two launches of six");
}

void check_arithmetic() {
  for (const float x : {0.0f, -3.25f, 0.7f, 11.0f}) {
    const double wide = x;
    expect(std::fabs(ex2(x) - std::exp2(wide)) <= 0x1p-23 * std::exp2(wide), "ex2");
  }
  expect(ex2(-INFINITY) == 0.0f && std::isnan(ex2(NAN)), "ex2 of -infinity and NaN");
  expect(__float_as_uint(1.0f) == 0x3f800000u && __uint_as_float(0x40000000u) == 2.0f, "casts of bits");
}

}  // namespace

}  // namespace trtforge

int main() {
  trtforge::check_exchange();
  trtforge::check_atomics();
  trtforge::check_copies();
  trtforge::check_grid_sync();
  trtforge::check_arithmetic();
  return trtforge::num_failed == 0 ? 0 : 1;
}
