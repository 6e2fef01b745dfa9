// The emulated GPU: blocks of threads that run as fibers, one at a time, and meet at collectives and barriers.
//
// A thread runs until it has to wait. The last thread to arrive at a collective computes it for all and goes on. Blocks
// of a plain launch run one after another; those of a cooperative launch are alive together.
#pragma once

#include <vector_types.h>

#include <cstddef>
#include <cstdint>

#include "errors.h"

namespace trtforge {
struct GridBarrier;
}

namespace trtforge::emulation {

struct Options {
  // 0: warps, lanes and blocks in sequence. Else the seed of random warp priorities, redrawn at each barrier.
  unsigned seed;
  // Compute capability whose shared memory limit holds: 75, 80, 86, 89, 90, 100, 120.
  int target;
  // Blocks that count_resident_blocks says are resident on a multiprocessor at once.
  int resident_blocks;
};

// TRTFORGE_EMULATION_SEED and TRTFORGE_EMULATION_TARGET where they are set, else 0 and 86, with two resident blocks; a
// program may change them.
Options& options();

// An operation that the lanes of `mask` do together. run sees the arguments of each lane of the mask.
struct Collective {
  const char* name;
  unsigned mask;
  Location where;
  bool orders_memory;
  void* arguments;
  void (*run)(void* const (&arguments)[32], unsigned mask);
};

void meet_warp(const Collective& collective);
void meet_block(Location where);
void meet_grid(GridBarrier* barrier, Location where);
void fence();

// The lane (0..31) of the running thread.
unsigned lane_index();

// The running block's shared memory, of which the kernel asks for num_bytes.
void* shared_memory(std::size_t num_bytes, Location where);

// Fails unless the 16 bytes at `address` are aligned and inside the running block's shared memory.
void check_shared_row(const char* name, const void* address, Location where);

void issue_copy(void* shared, const void* global, bool is_valid, Location where);
void commit_copies();
void wait_for_copies(int num_newest);

// Runs body(call) for each thread. Returns 0, or a cudaError_t where a real launch would.
int launch(dim3 grid, dim3 block, std::size_t shared_bytes, bool is_cooperative, void (*body)(const void* call),
           const void* call, Location where);

}  // namespace trtforge::emulation
