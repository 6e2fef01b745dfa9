// A mistake in a kernel ends the program, with the place in the kernel's source.
#pragma once

namespace trtforge::emulation {

// The exit status after an emulation error, apart from those of the sanitizers and of a test that failed.
constexpr int kErrorStatus = 70;

// A place in the kernel's source: the call of the function that takes Location::here() as its default argument.
struct Location {
  const char* file;
  int line;

  static constexpr Location here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

// Prints `FILE:LINE: emulation error: ...` with the block and thread that runs, and exits.
[[noreturn]] __attribute__((format(printf, 2, 3))) void fail(Location where, const char* format, ...);

}  // namespace trtforge::emulation
