// Runs one planted mistake (`planted NAME`), or every correct twin in turn (`planted twins`).
//
// Exit status: 0 the data is right, 1 it is wrong; the emulator and the sanitizers have their own.
#include <cstdio>
#include <cstring>

#include "emulation/global_memory.h"
#include "planted_data.cuh"
#include "planted_errors.cuh"

namespace trtforge {

namespace {

using Kernel = void (*)(Arrays);

struct Case {
  const char* name;
  Kernel planted;
  Kernel twin;
  unsigned num_blocks;
  unsigned num_threads;
  unsigned num_elements;
  bool is_cooperative;
  unsigned (*source)(unsigned i);  // out[i] = in[source(i)]
};

unsigned same(unsigned i) { return i; }
unsigned neighbour(unsigned i) { return i ^ 1; }
unsigned neighbour_row(unsigned i) { return i ^ kRowFloats; }
unsigned mirror(unsigned i) { return kThreads - 1 - i; }
unsigned previous_warp(unsigned i) { return i < kPreviousWarp ? i : i - kPreviousWarp; }
unsigned previous_block(unsigned i) { return i < kThreads ? i : i - kThreads; }

// Two warps of one block; one warp that copies rows; two blocks; two blocks alive together.
#define BLOCK_CASE(name, source) {#name, name<true>, name<false>, 1, kThreads, kThreads, false, source}
#define ROWS_CASE(name, source) {#name, name<true>, name<false>, 1, kWarpSize, kWarpSize * kRowFloats, false, source}
#define BLOCKS_CASE(name, source) {#name, name<true>, name<false>, 2, kThreads, 2 * kThreads, false, source}
#define GRID_CASE(name, source) {#name, name<true>, name<false>, 2, kThreads, 2 * kThreads, true, source}

constexpr Case kCases[] = {
    BLOCK_CASE(missing_syncthreads, previous_warp),
    BLOCK_CASE(missing_syncthreads_before_reuse, mirror),
    BLOCK_CASE(missing_syncthreads_before_zero_fill, same),
    BLOCK_CASE(missing_syncwarp, neighbour),
    ROWS_CASE(missing_copy_wait, same),
    ROWS_CASE(missing_syncwarp_after_copy, neighbour_row),
    GRID_CASE(missing_grid_sync, previous_block),
    BLOCKS_CASE(missing_threadfence, same),
    BLOCKS_CASE(blocks_write_one_place, same),
    BLOCK_CASE(unwritten_shared, same),
    BLOCK_CASE(out_of_bounds_read, same),
    ROWS_CASE(out_of_bounds_copy, same),
    BLOCK_CASE(out_of_bounds_shared_write, same),
    BLOCK_CASE(index_past_array, same),
    BLOCK_CASE(misaligned_vector_load, same),
    BLOCK_CASE(divergent_barrier, same),
    BLOCK_CASE(exit_before_barrier, same),
    BLOCK_CASE(different_collectives, same),
    BLOCK_CASE(barrier_against_collective, same),
    BLOCK_CASE(exited_lane_in_mask, same),
    BLOCK_CASE(exit_while_awaited, same),
    BLOCK_CASE(lane_outside_its_mask, same),
    BLOCK_CASE(shuffle_from_outside, same),
    BLOCK_CASE(deadlock_of_masks, same),
    GRID_CASE(deadlock_of_blocks, same),
    GRID_CASE(grid_barrier_not_zero, same),
    BLOCK_CASE(copy_in_flight_at_exit, same),
    BLOCK_CASE(copy_never_committed, same),
    BLOCK_CASE(misaligned_copy_to_shared, same),
    BLOCK_CASE(misaligned_copy_from_global, same),
    BLOCK_CASE(copy_outside_shared, same),
    BLOCK_CASE(misaligned_ldmatrix, same),
    BLOCK_CASE(ldmatrix_outside_shared, same),
    BLOCK_CASE(too_little_shared, same),
    BLOCKS_CASE(grid_sync_in_plain_launch, same),
};

bool run_case(const Case& tested, bool is_planted) {
  emulation::GlobalMemory<float> in(tested.num_elements);
  emulation::GlobalMemory<float> out(tested.num_elements);
  emulation::GlobalMemory<float> scratch(tested.num_elements);
  emulation::GlobalMemory<unsigned> counter(1);
  emulation::GlobalMemory<GridBarrier> barrier(1);
  for (unsigned i = 0; i < tested.num_elements; ++i) in[i] = static_cast<float>(i + 1);
  counter[0] = 0;
  barrier[0] = {0, 0};
  const Arrays arrays{in.data(), out.data(), scratch.data(), counter.data(), barrier.data()};
  const std::size_t shared_bytes =
      sizeof(float) * tested.num_threads * (tested.num_threads == kWarpSize ? kRowFloats : 1);
  const Kernel kernel = is_planted ? tested.planted : tested.twin;
  const int status =
      tested.is_cooperative
          ? TRTFORGE_LAUNCH_COOPERATIVE(kernel, tested.num_blocks, tested.num_threads, shared_bytes, nullptr, arrays)
          : TRTFORGE_LAUNCH(kernel, tested.num_blocks, tested.num_threads, shared_bytes, nullptr, arrays);
  bool is_right = status == 0;
  for (unsigned i = 0; i < tested.num_elements; ++i) is_right = is_right && out[i] == in[tested.source(i)];
  return is_right;
}

// Mistakes of the launch itself.
int run_launch(const char* name) {
  constexpr std::size_t kTooMuchBytes = 228 * 1024;  // above every target's limit
  const Arrays arrays{};
  Kernel kernel = lane_outside_its_mask<false>;
  if (std::strcmp(name, "shared_above_limit") == 0) {
    return TRTFORGE_LAUNCH(kernel, 1, kThreads, kTooMuchBytes, nullptr, arrays);  // HERE shared_above_limit
  }
  if (std::strcmp(name, "partial_warp") == 0) {
    return TRTFORGE_LAUNCH(kernel, 1, kThreads - 1, 0, nullptr, arrays);  // HERE partial_warp
  }
  if (std::strcmp(name, "empty_grid") == 0) return TRTFORGE_LAUNCH(kernel, 0, kThreads, 0, nullptr, arrays);
  std::fprintf(stderr, "no case named %s\n", name);
  return 2;
}

int run(const char* name) {
  const bool is_twins = std::strcmp(name, "twins") == 0;
  for (const Case& tested : kCases) {
    if (!is_twins && std::strcmp(name, tested.name) != 0) continue;
    const bool is_right = run_case(tested, !is_twins);
    std::printf("%s: %s\n", tested.name, is_right ? "right" : "wrong data");
    if (!is_twins || !is_right) return is_right ? 0 : 1;
  }
  return is_twins ? 0 : run_launch(name);
}

}  // namespace

}  // namespace trtforge

int main(int argc, char** argv) { return argc == 2 ? trtforge::run(argv[1]) : 2; }
