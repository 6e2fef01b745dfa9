#include "fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "sanitizers.h"

#if !defined(TRTFORGE_UCONTEXT)
// Saves the registers that a callee must keep and the stack pointer, and takes those of the other fiber. Kernels leave
// the floating-point control words alone, so they need no saving.
asm(R"(
    .text
    .globl trtforge_swap_stacks
    .type trtforge_swap_stacks, @function
trtforge_swap_stacks:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size trtforge_swap_stacks, .-trtforge_swap_stacks
)");
extern "C" void trtforge_swap_stacks(void** saved, void* next);
#endif

namespace trtforge::emulation {

namespace {

constexpr std::size_t kPageBytes = 4096;
// Sanitizers widen every frame with guard zones.
constexpr std::size_t kStackBytes = (kHasAddressSanitizer ? 256 : 64) * 1024;

// What a fiber needs and the next one can use again.
struct Slot {
  unsigned char* stack;
  void* race_context;
};

std::vector<Slot> free_slots;
// For ThreadSanitizer a slot used again is the same thread, which never races with itself. So within a launch each
// thread gets a slot of its own; after it the host has seen them all end, and they are free again.
std::vector<Slot> spent_slots;
constexpr std::size_t kMaxSpentSlots = 4096;  // the sanitizer knows 8128 threads

// A stack above one page that faults: an overflow ends the program instead of writing into the next stack.
unsigned char* map_stack() {
  void* base = mmap(nullptr, kStackBytes + kPageBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED || mprotect(base, kPageBytes, PROT_NONE) != 0) {
    std::fprintf(stderr, "emulation error: no memory for another thread's stack\n");
    std::abort();
  }
  return static_cast<unsigned char*>(base) + kPageBytes;
}

Slot take_slot() {
  if (free_slots.empty()) {
    Slot slot{map_stack(), nullptr};
#if defined(__SANITIZE_THREAD__)
    slot.race_context = __tsan_create_fiber(0);
#endif
    return slot;
  }
  const Slot slot = free_slots.back();
  free_slots.pop_back();
#if defined(__SANITIZE_ADDRESS__)
  ASAN_UNPOISON_MEMORY_REGION(slot.stack, kStackBytes);  // guard zones of frames that were left, not returned from
#endif
  return slot;
}

void give_slot(const Slot& slot) {
  if (!kHasThreadSanitizer) {
    free_slots.push_back(slot);
  } else if (spent_slots.size() < kMaxSpentSlots) {
    spent_slots.push_back(slot);
  } else {
    munmap(slot.stack - kPageBytes, kStackBytes + kPageBytes);  // makes the sanitizer forget the stack's accesses
#if defined(__SANITIZE_THREAD__)
    __tsan_destroy_fiber(slot.race_context);
#endif
  }
}

Fiber* running = nullptr;
Fiber* previous = nullptr;

// What each fiber does on arriving from a switch.
__attribute__((no_sanitize("thread"))) void finish_switch() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(running->fake_stack, &previous->sanitizer_bottom, &previous->sanitizer_bytes);
#endif
}

__attribute__((no_sanitize("thread"))) void start_fiber() {
  finish_switch();
  running->entry(running->argument);
  std::abort();  // entry never returns
}

}  // namespace

void adopt_fiber(Fiber& fiber) {
#if defined(__SANITIZE_THREAD__)
  fiber.race_context = __tsan_get_current_fiber();
#endif
  running = &fiber;
}

void create_fiber(Fiber& fiber, FiberEntry entry, void* argument) {
  fiber = Fiber{};
  const Slot slot = take_slot();
  fiber.stack = slot.stack;
  fiber.race_context = slot.race_context;
  fiber.entry = entry;
  fiber.argument = argument;
  fiber.sanitizer_bottom = fiber.stack;
  fiber.sanitizer_bytes = kStackBytes;
#if !defined(TRTFORGE_UCONTEXT)
  constexpr int kSavedRegisters = 6;
  auto* top = reinterpret_cast<std::uintptr_t*>(fiber.stack + kStackBytes);
  *--top = 0;  // start_fiber's return address: none. The stack is then aligned as after a call.
  *--top = reinterpret_cast<std::uintptr_t>(&start_fiber);
  for (int i = 0; i < kSavedRegisters; ++i) *--top = 0;
  fiber.stack_pointer = top;
#else
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack;
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, &start_fiber, 0);
#endif
}

void destroy_fiber(Fiber& fiber) {
  give_slot({fiber.stack, fiber.race_context});
  fiber.stack = nullptr;
}

void recycle_fibers() {
  free_slots.insert(free_slots.end(), spent_slots.begin(), spent_slots.end());
  spent_slots.clear();
}

__attribute__((no_sanitize("thread"))) void switch_fiber(Fiber& from, Fiber& to, [[maybe_unused]] bool is_last) {
  previous = &from;
  running = &to;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(is_last ? nullptr : &from.fake_stack, to.sanitizer_bottom, to.sanitizer_bytes);
#endif
#if defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(to.race_context, __tsan_switch_to_fiber_no_sync);
#endif
#if !defined(TRTFORGE_UCONTEXT)
  trtforge_swap_stacks(&from.stack_pointer, to.stack_pointer);
#else
  swapcontext(&from.context, &to.context);
#endif
  finish_switch();
}

}  // namespace trtforge::emulation
