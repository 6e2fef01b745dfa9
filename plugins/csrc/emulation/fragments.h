// mma and ldmatrix on the registers of a whole warp, with the fragment layouts of the PTX ISA (sections "Matrix
// fragments for mma.m16n8k16", "... mma.m16n8k32", "ldmatrix").
#pragma once

#include <cstdint>
#include <cstring>

#include "../kernels/device.cuh"

namespace trtforge::emulation {

template <typename D>
struct MmaArguments {
  D (&d)[4];
  const std::uint32_t (&a)[4];
  const std::uint32_t (&b)[2];
};

struct MatrixRow {
  unsigned char bytes[16];
  std::uint32_t* result;  // one register for each matrix
};

inline float widen(half bits) { return __half2float(bits); }
inline float widen(bf16 bits) { return __bfloat162float(bits); }
inline std::int32_t widen(std::int8_t bits) { return bits; }

// d[16, 8] += a[16, kK] * b[kK, 8], element type T, for every lane of the warp. A register holds kPacked elements with
// rising k; the lane's registers go along m first (a: rows group and group + 8), then along k, half the tile each.
template <typename T, typename D, int kK>
inline void multiply_tiles(void* const (&arguments)[32]) {
  constexpr int kPacked = 4 / sizeof(T);
  static_assert(kK == 8 * kPacked, "two halves of k, four lanes each");
  D a[16][kK];
  D b[kK][8];
  D d[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto& own = *static_cast<const MmaArguments<D>*>(arguments[lane]);
    const int group = lane / 4;
    const int t = lane % 4;
    T elements[4][kPacked];
    std::memcpy(elements, own.a, sizeof(own.a));
    for (int r = 0; r < 4; ++r) {
      for (int i = 0; i < kPacked; ++i) {
        a[group + 8 * (r % 2)][kK / 2 * (r / 2) + kPacked * t + i] = widen(elements[r][i]);
      }
    }
    std::memcpy(elements, own.b, sizeof(own.b));
    for (int r = 0; r < 2; ++r) {
      for (int i = 0; i < kPacked; ++i) b[kK / 2 * r + kPacked * t + i][group] = widen(elements[r][i]);
    }
    for (int i = 0; i < 4; ++i) d[group + 8 * (i / 2)][2 * t + i % 2] = own.d[i];
  }
  for (int m = 0; m < 16; ++m) {
    for (int k = 0; k < kK; ++k) {
      for (int n = 0; n < 8; ++n) d[m][n] += a[m][k] * b[k][n];
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    const auto& own = *static_cast<const MmaArguments<D>*>(arguments[lane]);
    for (int i = 0; i < 4; ++i) own.d[i] = d[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2];
  }
}

template <typename T>
inline void run_mma_m16n8k16(void* const (&arguments)[32], unsigned) {
  multiply_tiles<T, float, 16>(arguments);
}

inline void run_mma_m16n8k32_s8(void* const (&arguments)[32], unsigned) {
  multiply_tiles<std::int8_t, std::int32_t, 32>(arguments);
}

template <int num_matrices, bool is_transposed>
inline void run_ldmatrix(void* const (&arguments)[32], unsigned) {
  for (int i = 0; i < num_matrices; ++i) {
    std::uint16_t matrix[8][8];
    for (int j = 0; j < 8; ++j) {
      std::memcpy(matrix[j], static_cast<const MatrixRow*>(arguments[8 * i + j])->bytes, sizeof(matrix[j]));
    }
    for (int lane = 0; lane < 32; ++lane) {
      const int group = lane / 4;
      const int column = 2 * (lane % 4);
      const std::uint16_t low = is_transposed ? matrix[column][group] : matrix[group][column];
      const std::uint16_t high = is_transposed ? matrix[column + 1][group] : matrix[group][column + 1];
      static_cast<const MatrixRow*>(arguments[lane])->result[i] = low | static_cast<std::uint32_t>(high) << 16;
    }
  }
}

}  // namespace trtforge::emulation
