#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "state.h"

uint3 threadIdx{}, blockIdx{};
dim3 blockDim, gridDim;

namespace trtforge::emulation {

Machine machine;

namespace {

constexpr int kInvalidConfiguration = 9;  // cudaErrorInvalidConfiguration
constexpr unsigned kMaxThreads = 1024;

unsigned number_from_environment(const char* name, unsigned otherwise) {
  const char* text = std::getenv(name);
  if (text == nullptr) return otherwise;
  char* end = nullptr;
  const unsigned long number = std::strtoul(text, &end, 10);
  if (end == text || *end != '\0') fail({__FILE__, __LINE__}, "%s is \"%s\", not a number", name, text);
  return static_cast<unsigned>(number);
}

// Dynamic shared memory that one block may ask for, KiB (CUDA programming guide, technical specifications).
std::size_t shared_limit_bytes(int target, Location where) {
  struct Limit {
    int target;
    std::size_t kib;
  };
  constexpr Limit kLimits[] = {{75, 64}, {80, 163}, {86, 99}, {89, 99}, {90, 227}, {100, 227}, {120, 99}};
  for (const Limit& limit : kLimits) {
    if (limit.target == target) return limit.kib * 1024;
  }
  fail(where, "unknown target sm_%d", target);
}

// Never returns, so ThreadSanitizer must not count it among the functions entered.
__attribute__((no_sanitize("thread"))) void run_thread(void* argument) {
  acquire_order(machine.started, 0);
  auto& lane = *static_cast<Lane*>(argument);
  machine.body(machine.call);
  leave_kernel(lane);
  switch_fiber(lane.fiber, machine.scheduler, true);
}

void create_block(unsigned index) {
  const Unseen unseen;
  const unsigned num_warps = blockDim.x / kWarpSize;
  machine.blocks.push_back(std::make_unique<Block>());
  Block& block = *machine.blocks.back();
  block.index = uint3{index % gridDim.x, index / gridDim.x % gridDim.y, index / gridDim.x / gridDim.y};
  block.warps = std::vector<Warp>(num_warps);
  allocate_shared(block);
  for (unsigned w = 0; w < num_warps; ++w) {
    Warp& warp = block.warps[w];
    warp.block = &block;
    warp.ready = kFullWarp;
    machine.order.push_back(&warp);
    for (unsigned l = 0; l < kWarpSize; ++l) {
      Lane& lane = warp.lanes[l];
      lane.warp = &warp;
      lane.index = l;
      lane.thread = w * kWarpSize + l;
      create_fiber(lane.fiber, run_thread, &lane);
    }
  }
  machine.num_alive += blockDim.x;
}

void destroy_blocks() {
  for (auto& block : machine.blocks) {
    for (Warp& warp : block->warps) {
      for (Lane& lane : warp.lanes) destroy_fiber(lane.fiber);
    }
    free_shared(*block);
  }
  machine.blocks.clear();
  machine.order.clear();
}

void run_lane(Warp& warp, unsigned index) {
  Lane& lane = warp.lanes[index];
  machine.current = &lane;
  threadIdx = uint3{lane.thread, 0, 0};
  blockIdx = warp.block->index;
  switch_fiber(machine.scheduler, lane.fiber, false);
  machine.current = nullptr;
}

// Runs the ready lanes of one warp until it has none, or until a barrier has drawn new priorities.
void run_warp(Warp& warp) {
  machine.is_redrawn = false;
  while (warp.ready != 0) {
    for (unsigned i = 0; i < kWarpSize; ++i) {
      const unsigned index = i ^ machine.lane_flip;
      if ((warp.ready >> index & 1) == 0) continue;
      run_lane(warp, index);
      if (machine.is_redrawn) return;
    }
  }
}

[[noreturn]] void fail_deadlock() {
  for (auto& block : machine.blocks) {
    for (Warp& warp : block->warps) {
      if (warp.open.empty()) continue;
      const OpenMeeting& open = warp.open.front();
      machine.current = &warp.lanes[__builtin_ctz(open.waiting)];
      fail(open.meeting.where, "deadlock: no thread can run, and this one waits at %s", open.meeting.name);
    }
  }
  fail({__FILE__, __LINE__}, "deadlock with no waiting thread");
}

void run_blocks() {
  draw_priorities();
  while (machine.num_alive > 0) {
    const auto warp = std::find_if(machine.order.begin(), machine.order.end(), [](Warp* w) { return w->ready; });
    if (warp == machine.order.end()) fail_deadlock();
    run_warp(**warp);
  }
  destroy_blocks();
}

std::vector<unsigned> block_order(unsigned num_blocks) {
  std::vector<unsigned> order(num_blocks);
  for (unsigned i = 0; i < num_blocks; ++i) order[i] = i;
  if (options().seed != 0) std::shuffle(order.begin(), order.end(), machine.random);
  return order;
}

}  // namespace

void draw_priorities() {
  machine.is_redrawn = true;
  if (options().seed == 0) return;
  std::shuffle(machine.order.begin(), machine.order.end(), machine.random);
  machine.lane_flip = machine.random() % kWarpSize;
}

void fail(Location where, const char* format, ...) {
  std::fflush(stdout);
  std::fprintf(stderr, "%s:%d: emulation error: ", where.file, where.line);
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  if (machine.current != nullptr) {
    const uint3 block = machine.current->warp->block->index;
    std::fprintf(stderr, " (block %u,%u,%u, thread %u)", block.x, block.y, block.z, machine.current->thread);
  }
  std::fprintf(stderr, "\n");
  std::_Exit(kErrorStatus);
}

Options& options() {
  static Options values{number_from_environment("TRTFORGE_EMULATION_SEED", 0),
                        static_cast<int>(number_from_environment("TRTFORGE_EMULATION_TARGET", 86)), 2};
  return values;
}

int launch(dim3 grid, dim3 block, std::size_t shared_bytes, bool is_cooperative, void (*body)(const void* call),
           const void* call, Location where) {
  if (machine.current != nullptr) fail(where, "a kernel launches a kernel");
  const unsigned num_blocks = grid.x * grid.y * grid.z;
  if (num_blocks == 0 || block.x == 0 || block.x > kMaxThreads) return kInvalidConfiguration;
  if (block.y != 1 || block.z != 1 || block.x % kWarpSize != 0) {
    fail(where, "a block of %u x %u x %u threads: blocks are one-dimensional, a multiple of 32", block.x, block.y,
         block.z);
  }
  const std::size_t limit = shared_limit_bytes(options().target, where);
  if (shared_bytes > limit) {
    fail(where, "%zu bytes of dynamic shared memory; sm_%d has %zu", shared_bytes, options().target, limit);
  }
  {
    const Unseen unseen;
    gridDim = grid;
    blockDim = block;
    machine.start(shared_bytes, is_cooperative, body, call, where);
    adopt_fiber(machine.scheduler);
    release_order(machine.started, 0);
    for (const unsigned index : block_order(num_blocks)) {
      create_block(index);
      if (!is_cooperative) run_blocks();
    }
    if (is_cooperative) run_blocks();
    recycle_fibers();
  }
  acquire_order(machine.finished, 0);
  return 0;
}

}  // namespace trtforge::emulation
