// How threads meet: collectives of a warp, the barrier of a block, the barrier of a grid, and the end of the kernel.
#include <cstring>
#include <utility>

#include "state.h"

namespace trtforge::emulation {

namespace {

bool is_same(const char* a, const char* b) { return a == b || std::strcmp(a, b) == 0; }

bool is_same(const Meeting& a, const Meeting& b) {
  return a.where.line == b.where.line && a.mask == b.mask && a.is_barrier == b.is_barrier && is_same(a.name, b.name) &&
         is_same(a.where.file, b.where.file);
}

[[noreturn]] void fail_exited(const Meeting& meeting, unsigned lane) {
  fail(meeting.where, "%s with mask %08x names lane %u, which has left the kernel", meeting.name, meeting.mask, lane);
}

// Adds the lane to the meeting, which it opens as the first. Two lanes that name each other at different places would
// wait for ever.
OpenMeeting& join_meeting(Lane& lane, const Meeting& meeting) {
  Warp& warp = *lane.warp;
  const unsigned own = 1u << lane.index;
  OpenMeeting* joined = nullptr;
  for (OpenMeeting& other : warp.open) {
    if (is_same(meeting, other.meeting)) {
      other.waiting |= own;
      joined = &other;
    } else if ((meeting.mask & other.waiting) != 0 && (other.meeting.mask & own) != 0) {
      fail(meeting.where,
           "lanes at different collectives: lane %u is at %s (mask %08x), lane %d at %s (mask %08x), %s:%d", lane.index,
           meeting.name, meeting.mask, __builtin_ctz(other.waiting), other.meeting.name, other.meeting.mask,
           other.meeting.where.file, other.meeting.where.line);
    }
  }
  if (joined != nullptr) return *joined;
  warp.open.push_back({meeting, own});
  return warp.open.back();
}

void close_meeting(Warp& warp, const Meeting& meeting) {
  for (std::size_t i = 0; i < warp.open.size(); ++i) {
    if (!is_same(meeting, warp.open[i].meeting)) continue;
    warp.ready |= warp.open[i].waiting;
    warp.open.erase(warp.open.begin() + static_cast<std::ptrdiff_t>(i));
    return;
  }
}

void wait(Lane& lane) {
  lane.warp->ready &= ~(1u << lane.index);
  switch_fiber(lane.fiber, machine.scheduler, false);
}

// Counts the running thread in; true for the last of its block.
bool join_barrier(Lane& lane, const Meeting& meeting) {
  Block& block = *lane.warp->block;
  if (block.num_exited != 0) {
    fail(meeting.where, "divergent barrier: thread %u is at %s, but %u threads of its block have left the kernel",
         lane.thread, meeting.name, block.num_exited);
  }
  if (block.num_waiting == 0) {
    block.barrier = meeting;
    block.first_waiting = lane.thread;
  } else if (!is_same(meeting, block.barrier)) {
    fail(meeting.where, "divergent barrier: thread %u is at %s, thread %u at %s, %s:%d", lane.thread, meeting.name,
         block.first_waiting, block.barrier.name, block.barrier.where.file, block.barrier.where.line);
  }
  join_meeting(lane, meeting);
  return ++block.num_waiting == block.warps.size() * kWarpSize;
}

void open_barrier(Block& block) {
  for (Warp& warp : block.warps) close_meeting(warp, block.barrier);
  block.num_waiting = 0;
  ++block.turn;
}

void run_collective(Warp& warp, const Collective& collective) {
  if (collective.run == nullptr) return;
  void* arguments[kWarpSize];
  for (unsigned i = 0; i < kWarpSize; ++i) arguments[i] = warp.lanes[i].arguments;
  collective.run(arguments, collective.mask);
}

void check_copies_arrived(Lane& lane) {
  lane.groups.push_back(std::move(lane.open_group));
  for (const std::vector<Copy>& group : lane.groups) {  // an empty group is nothing in flight
    if (!group.empty()) fail(group.front().where, "the thread left the kernel with this copy in flight");
  }
}

}  // namespace

unsigned lane_index() { return threadIdx.x % kWarpSize; }

void fence() {
  acquire_order(machine.fences, 0);
  release_order(machine.fences, 0);
}

void meet_warp(const Collective& collective) {
  const Unseen unseen;
  Lane& lane = *machine.current;
  Warp& warp = *lane.warp;
  const Meeting meeting{collective.name, collective.mask, collective.where, false};
  if ((collective.mask >> lane.index & 1) == 0) {
    fail(collective.where, "lane %u calls %s with mask %08x, which lacks it", lane.index, collective.name,
         collective.mask);
  }
  const unsigned exited = collective.mask & warp.exited;
  if (exited != 0) fail_exited(meeting, static_cast<unsigned>(__builtin_ctz(exited)));
  lane.arguments = collective.arguments;
  const unsigned lowest = static_cast<unsigned>(__builtin_ctz(collective.mask));
  const unsigned turn = warp.turn[lowest];
  if (collective.orders_memory) release_order(warp.sync[lowest], turn);
  if (join_meeting(lane, meeting).waiting == collective.mask) {
    close_meeting(warp, meeting);
    if (collective.orders_memory) ++warp.turn[lowest];
    run_collective(warp, collective);
  } else {
    wait(lane);
  }
  if (collective.orders_memory) acquire_order(warp.sync[lowest], turn);
}

void meet_block(Location where) {
  const Unseen unseen;
  Lane& lane = *machine.current;
  Block& block = *lane.warp->block;
  const unsigned turn = block.turn;
  release_order(block.sync, turn);
  if (join_barrier(lane, {"__syncthreads", kFullWarp, where, true})) {
    open_barrier(block);
    draw_priorities();
  } else {
    wait(lane);
  }
  acquire_order(block.sync, turn);
}

void meet_grid(GridBarrier* barrier, Location where) {
  const Unseen unseen;
  Lane& lane = *machine.current;
  if (!machine.is_cooperative) fail(where, "grid_sync in a launch that is not cooperative");
  if (barrier->arrived != 0) fail(where, "grid_sync on a barrier that was not zero: arrived is %u", barrier->arrived);
  if (machine.barrier != nullptr && machine.barrier != barrier) fail(where, "grid_sync on two barriers at once");
  machine.barrier = barrier;
  const unsigned turn = machine.turn;
  release_order(machine.sync, turn);
  const bool is_last_of_block = join_barrier(lane, {"grid_sync", kFullWarp, where, true});
  if (is_last_of_block && ++machine.num_blocks_waiting == machine.blocks.size()) {
    ++barrier->generation;
    ++machine.turn;
    machine.barrier = nullptr;
    machine.num_blocks_waiting = 0;
    for (auto& block : machine.blocks) open_barrier(*block);
    draw_priorities();
  } else {
    wait(lane);
  }
  acquire_order(machine.sync, turn);
}

void leave_kernel(Lane& lane) {
  const Unseen unseen;
  Warp& warp = *lane.warp;
  Block& block = *warp.block;
  check_copies_arrived(lane);
  for (const OpenMeeting& other : warp.open) {
    if (!other.meeting.is_barrier && (other.meeting.mask >> lane.index & 1) != 0)
      fail_exited(other.meeting, lane.index);
  }
  if (block.num_waiting != 0) {
    fail(block.barrier.where, "divergent barrier: thread %u waits at %s, but thread %u has left the kernel",
         block.first_waiting, block.barrier.name, lane.thread);
  }
  ++block.num_exited;
  warp.exited |= 1u << lane.index;
  warp.ready &= ~(1u << lane.index);
  --machine.num_alive;
  release_order(machine.finished, 0);
}

}  // namespace trtforge::emulation
