// CUDA's own names, as functions of the global namespace: barriers, shuffles, atomicAdd, casts of bits.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "errors.h"
#include "machine.h"

namespace trtforge::emulation {

struct ShuffleArguments {
  std::uint64_t value;  // the bytes of a T
  unsigned source;      // lane
  std::uint64_t result;
  Location where;
};

inline void run_shuffle(void* const (&arguments)[32], unsigned mask) {
  for (unsigned lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1) == 0) continue;
    auto& own = *static_cast<ShuffleArguments*>(arguments[lane]);
    if ((mask >> own.source & 1) == 0) {
      fail(own.where, "a shuffle with mask %08x reads lane %u, which is not in it", mask, own.source);
    }
    own.result = static_cast<const ShuffleArguments*>(arguments[own.source])->value;
  }
}

template <typename T>
inline T shuffle(const char* name, unsigned mask, T value, unsigned source, Location where) {
  static_assert(std::is_trivially_copyable<T>::value && sizeof(T) <= 8, "a shuffle moves up to 8 bytes");
  ShuffleArguments arguments{0, source, 0, where};
  std::memcpy(&arguments.value, &value, sizeof(T));
  meet_warp({name, mask, where, false, &arguments, run_shuffle});
  std::memcpy(static_cast<void*>(&value), &arguments.result, sizeof(T));
  return value;
}

// Replaces *address by change(*address); returns what it was. Relaxed, as on the device: __threadfence gives order.
template <typename T, typename Change>
inline T change_atomically(T* address, Change change) {
  using Bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
  static_assert(sizeof(T) == sizeof(Bits), "atomics of 4 or 8 bytes");
  auto* place = reinterpret_cast<Bits*>(address);
  Bits before = __atomic_load_n(place, __ATOMIC_RELAXED);
  for (;;) {
    T value;
    std::memcpy(&value, &before, sizeof(T));
    const T changed = change(value);
    Bits after;
    std::memcpy(&after, &changed, sizeof(T));
    if (__atomic_compare_exchange_n(place, &before, after, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return value;
  }
}

}  // namespace trtforge::emulation

inline void __syncthreads(trtforge::emulation::Location where = trtforge::emulation::Location::here()) {
  trtforge::emulation::meet_block(where);
}

inline void __syncwarp(unsigned mask = 0xffffffffu,
                       trtforge::emulation::Location where = trtforge::emulation::Location::here()) {
  trtforge::emulation::meet_warp({"__syncwarp", mask, where, true, nullptr, nullptr});
}

inline void __threadfence() { trtforge::emulation::fence(); }

// Segments of `width` lanes; a source outside the segment gives the lane's own value, as in the CUDA guide.

template <typename T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32,
                     trtforge::emulation::Location where = trtforge::emulation::Location::here()) {
  const unsigned within = static_cast<unsigned>(width) - 1;
  const unsigned lane = (trtforge::emulation::lane_index() & ~within) | (static_cast<unsigned>(source) & within);
  return trtforge::emulation::shuffle("__shfl_sync", mask, value, lane, where);
}

template <typename T>
inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32,
                         trtforge::emulation::Location where = trtforge::emulation::Location::here()) {
  const unsigned own = trtforge::emulation::lane_index();
  const unsigned last = own | (static_cast<unsigned>(width) - 1);
  const unsigned lane = own ^ static_cast<unsigned>(lane_mask);
  return trtforge::emulation::shuffle("__shfl_xor_sync", mask, value, lane <= last ? lane : own, where);
}

template <typename T>
inline T atomicAdd(T* address, std::common_type_t<T> value) {
  return trtforge::emulation::change_atomically(address, [value](T old) { return static_cast<T>(old + value); });
}

template <typename To, typename From>
inline To trtforge_bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline unsigned __float_as_uint(float x) { return trtforge_bits_as<unsigned>(x); }
inline int __float_as_int(float x) { return trtforge_bits_as<int>(x); }
inline float __uint_as_float(unsigned x) { return trtforge_bits_as<float>(x); }
inline float __int_as_float(int x) { return trtforge_bits_as<float>(x); }
