// The hooks of AddressSanitizer and ThreadSanitizer that fibers need; each is empty where the program is built without
// that sanitizer.
//
// ThreadSanitizer sees each emulated thread as a thread of its own. It is told of an order between two of them only
// where CUDA gives one (release on arrival, acquire on leaving), so a missing barrier is a race in whatever order the
// fibers happen to run. The emulator's own accesses are hidden from it (class Unseen). It remembers the last four
// accesses to each 8 bytes, so it can miss a race on a place that many threads use: the random orders may still show
// that one.
#pragma once

#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

namespace trtforge::emulation {

#if defined(__SANITIZE_THREAD__)
constexpr bool kHasThreadSanitizer = true;
#else
constexpr bool kHasThreadSanitizer = false;
#endif
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kHasAddressSanitizer = true;
#else
constexpr bool kHasAddressSanitizer = false;
#endif

// Hides the accesses of its scope from ThreadSanitizer.
class Unseen {
 public:
#if defined(__SANITIZE_THREAD__)
  Unseen() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~Unseen() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
#else
  Unseen() {}
  ~Unseen() {}
#endif
  Unseen(const Unseen&) = delete;
  Unseen& operator=(const Unseen&) = delete;
};

// Where a happens-before edge passes from one thread to another: two objects used in turn, so that a thread that runs
// ahead to the next barrier does not give its later work to one that is still leaving this barrier.
struct SyncObject {
  alignas(8) unsigned char pair[2][8];
};

inline void release_order([[maybe_unused]] SyncObject& sync, [[maybe_unused]] unsigned turn) {
#if defined(__SANITIZE_THREAD__)
  __tsan_release(sync.pair[turn & 1]);
#endif
}

inline void acquire_order([[maybe_unused]] SyncObject& sync, [[maybe_unused]] unsigned turn) {
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(sync.pair[turn & 1]);
#endif
}

}  // namespace trtforge::emulation
