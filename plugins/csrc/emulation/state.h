// The emulator's own state. Kernels and tests include device.h, not this file.
#pragma once

#include <cstddef>
#include <memory>
#include <random>
#include <vector>

#include "../kernels/device.cuh"
#include "fiber.h"
#include "machine.h"
#include "sanitizers.h"

namespace trtforge::emulation {

struct Block;
struct Warp;

// Where threads meet. A barrier of a block or grid includes every lane.
struct Meeting {
  const char* name;
  unsigned mask;
  Location where;
  bool is_barrier;
};

// A meeting that some lanes of a warp (bits of `waiting`) have come to, and others not yet.
struct OpenMeeting {
  Meeting meeting;
  unsigned waiting;
};

struct Copy {
  void* shared;
  const void* global;  // null: zeros
  Location where;
};

struct Lane {
  Fiber fiber;
  void* arguments = nullptr;  // of the collective that it waits at
  Warp* warp = nullptr;
  unsigned index = 0;                     // in its warp
  unsigned thread = 0;                    // in its block
  std::vector<std::vector<Copy>> groups;  // committed and in flight, oldest first
  std::vector<Copy> open_group;
};

struct Warp {
  Lane lanes[kWarpSize];
  Block* block = nullptr;
  unsigned ready = 0;   // one bit per lane
  unsigned exited = 0;  // one bit per lane
  std::vector<OpenMeeting> open;
  // One for each lowest lane of a mask: lanes that meet in different masks give each other no order.
  SyncObject sync[kWarpSize]{};
  unsigned turn[kWarpSize]{};
};

struct Block {
  uint3 index{};
  std::vector<Warp> warps;
  unsigned char* shared = nullptr;
  Meeting barrier{};  // where num_waiting threads wait, the first of them first_waiting
  unsigned first_waiting = 0;
  unsigned num_waiting = 0;
  unsigned num_exited = 0;
  SyncObject sync{};
  unsigned turn = 0;
};

struct Machine {
  Fiber scheduler;
  Lane* current = nullptr;
  std::vector<std::unique_ptr<Block>> blocks;  // alive
  std::vector<Warp*> order;                    // highest priority first
  unsigned lane_flip = 0;                      // lane i takes the turn of lane i ^ lane_flip
  bool is_redrawn = false;
  std::mt19937 random;
  std::size_t num_alive = 0;  // threads
  // The launch.
  std::size_t shared_bytes = 0;
  bool is_cooperative = false;
  void (*body)(const void* call) = nullptr;
  const void* call = nullptr;
  Location where{};
  // The grid barrier.
  GridBarrier* barrier = nullptr;
  std::size_t num_blocks_waiting = 0;
  SyncObject sync{};
  unsigned turn = 0;
  SyncObject fences{};
  SyncObject started{};   // every thread sees what the host did
  SyncObject finished{};  // the host sees what every thread did

  void start(std::size_t bytes, bool has_all_blocks, void (*kernel_body)(const void*), const void* kernel_call,
             Location launch_place) {
    random.seed(options().seed);
    lane_flip = 0;
    shared_bytes = bytes;
    is_cooperative = has_all_blocks;
    body = kernel_body;
    call = kernel_call;
    where = launch_place;
  }
};

extern Machine machine;

// Redraws the order in which warps and lanes run, where the schedule is random.
void draw_priorities();

// The running thread returns from the kernel.
void leave_kernel(Lane& lane);

void allocate_shared(Block& block);
void free_shared(Block& block);

}  // namespace trtforge::emulation
