// Fibers: stacks that one OS thread switches between by hand.
#pragma once

#include <cstddef>

// A stack switch of a dozen instructions on x86-64, ucontext elsewhere (and where asked for, to test it).
#if !defined(__x86_64__) && !defined(TRTFORGE_UCONTEXT)
#define TRTFORGE_UCONTEXT
#endif
#if defined(TRTFORGE_UCONTEXT)
#include <ucontext.h>
#endif

namespace trtforge::emulation {

using FiberEntry = void (*)(void* argument);

struct Fiber {
  unsigned char* stack = nullptr;  // lowest usable address; null for the program's own
  FiberEntry entry = nullptr;
  void* argument = nullptr;
#if defined(TRTFORGE_UCONTEXT)
  ucontext_t context{};
#else
  void* stack_pointer = nullptr;
#endif
  const void* sanitizer_bottom = nullptr;  // the stack as AddressSanitizer knows it
  std::size_t sanitizer_bytes = 0;
  void* fake_stack = nullptr;    // AddressSanitizer
  void* race_context = nullptr;  // ThreadSanitizer
};

// Makes `fiber` the one that runs now. It has the program's own stack.
void adopt_fiber(Fiber& fiber);

// Prepares `fiber` to run entry(argument) when first switched to. entry ends in switch_fiber with is_last.
void create_fiber(Fiber& fiber, FiberEntry entry, void* argument);

// Frees what create_fiber took. The fiber has ended.
void destroy_fiber(Fiber& fiber);

// Between launches: what ended fibers had is used again.
void recycle_fibers();

// Leaves `from`, the running fiber, for `to`. is_last: `from` never runs again.
void switch_fiber(Fiber& from, Fiber& to, bool is_last);

}  // namespace trtforge::emulation
