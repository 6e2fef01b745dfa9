// Global memory of an emulated kernel: exactly as long as asked for, so that AddressSanitizer sees one element too far.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>

namespace trtforge::emulation {

// An array aligned as by cudaMalloc, whose bytes are 0xff (NaN) until written.
template <typename T>
class GlobalMemory {
  static_assert(std::is_trivially_copyable<T>::value, "device memory holds bytes");

 public:
  explicit GlobalMemory(std::size_t size) : size_(size) {
    constexpr std::size_t kAlignBytes = 256;
    void* memory = nullptr;
    if (posix_memalign(&memory, kAlignBytes, size == 0 ? 1 : size * sizeof(T)) != 0) throw std::bad_alloc();
    std::memset(memory, 0xff, size * sizeof(T));
    data_ = static_cast<T*>(memory);
  }
  ~GlobalMemory() { std::free(data_); }
  GlobalMemory(const GlobalMemory&) = delete;
  GlobalMemory& operator=(const GlobalMemory&) = delete;

  T* data() { return data_; }
  const T* data() const { return data_; }
  std::size_t size() const { return size_; }
  T& operator[](std::size_t i) { return data_[i]; }
  const T& operator[](std::size_t i) const { return data_[i]; }

 private:
  T* data_ = nullptr;
  std::size_t size_;
};

}  // namespace trtforge::emulation
