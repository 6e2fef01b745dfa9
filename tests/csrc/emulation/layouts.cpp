// The emulator's fragments against CUTLASS's description of the same instructions, a source apart from the PTX ISA's
// figures that the emulator follows: a mistake in either shows as a difference.
//
// The numbers are the shapes and strides of include/cute/atom/mma_traits_sm80.hpp (SM80_16x8x16_F32F16F16F32_TN, the
// bf16 one, SM80_16x8x32_S32S8S8S32_TN) and copy_traits_sm75.hpp (SM75_U32x{2,4}_LDSM_N, SM75_U16x{4,8}_LDSM_T) in
// https://github.com/NVIDIA/cutlass. Each maps (thread, value) to a place: for mma, row + num_rows * column; for
// ldmatrix, a bit of the rows laid end to end in the order of the lanes that address them.
#include <cstdio>
#include <cstring>
#include <random>

#include "emulation/global_memory.h"
#include "kernels/device.cuh"

namespace trtforge {

namespace {

// A place is the sum of digit * stride; thread and value are split into digits, the first of which counts fastest.
struct Layout {
  int thread_shape[2], thread_stride[2];
  int value_shape[3], value_stride[3];

  int place(int thread, int value) const {
    int sum = 0;
    for (int i = 0; i < 2; thread /= thread_shape[i], ++i) sum += thread % thread_shape[i] * thread_stride[i];
    for (int i = 0; i < 3; value /= value_shape[i], ++i) sum += value % value_shape[i] * value_stride[i];
    return sum;
  }
};

constexpr Layout kA16{{4, 8}, {32, 1}, {2, 2, 2}, {16, 8, 128}};
constexpr Layout kB16{{4, 8}, {16, 1}, {2, 2, 1}, {8, 64, 0}};
constexpr Layout kA8{{4, 8}, {64, 1}, {4, 2, 2}, {16, 8, 256}};
constexpr Layout kB8{{4, 8}, {32, 1}, {4, 2, 1}, {8, 128, 0}};
constexpr Layout kD{{4, 8}, {32, 1}, {2, 2, 1}, {16, 8, 0}};
constexpr Layout kMatrices{{32, 1}, {32, 0}, {32, 4, 1}, {1, 1024, 0}};
constexpr Layout kMatricesTransposed{{4, 8}, {256, 16}, {16, 2, 4}, {1, 128, 1024}};

// sm_75's smaller instructions (mma_traits_sm75.hpp: SM75_16x8x8_F32F16F16F32_TN, SM75_8x8x16_S32S8S8S32_TN).
constexpr Layout kA16Sm75{{4, 8}, {32, 1}, {2, 2, 1}, {16, 8, 0}};
constexpr Layout kB16Sm75{{4, 8}, {16, 1}, {2, 1, 1}, {8, 0, 0}};
constexpr Layout kOperand8Sm75{{4, 8}, {32, 1}, {4, 1, 1}, {8, 0, 0}};
constexpr Layout kD8Sm75{{4, 8}, {16, 1}, {2, 1, 1}, {8, 0, 0}};

template <typename T>
struct Number;
template <>
struct Number<half> {
  using Sum = float;
  static half make(int value) { return __float2half_rn(static_cast<float>(value)); }
};
template <>
struct Number<bf16> {
  using Sum = float;
  static bf16 make(int value) { return __float2bfloat16_rn(static_cast<float>(value)); }
};
template <>
struct Number<std::int8_t> {
  using Sum = std::int32_t;
  static std::int8_t make(int value) { return static_cast<std::int8_t>(value); }
};

template <typename Sum>
struct Registers {
  const std::uint32_t* a;  // [32, 4]
  const std::uint32_t* b;  // [32, 2]
  Sum* d;                  // [32, 4]
};

template <typename T>
TF_GLOBAL void multiply_once(Registers<typename Number<T>::Sum> p) {
  std::uint32_t a[4];
  std::uint32_t b[2];
  typename Number<T>::Sum d[4];
  std::memcpy(a, p.a + threadIdx.x * 4, sizeof(a));
  std::memcpy(b, p.b + threadIdx.x * 2, sizeof(b));
  std::memcpy(d, p.d + threadIdx.x * 4, sizeof(d));
  if constexpr (std::is_same<T, std::int8_t>::value) {
    mma_m16n8k32_s8(d, a, b);
  } else {
    mma_m16n8k16<T>(d, a, b);
  }
  std::memcpy(p.d + threadIdx.x * 4, d, sizeof(d));
}

// d = c + a * b on random small integers, so that every sum is exact. Returns the number of wrong elements.
template <typename T>
int check_mma(const Layout& a_layout, const Layout& b_layout) {
  constexpr int kK = 32 / sizeof(T);
  constexpr int kPacked = 4 / sizeof(T);
  using Sum = typename Number<T>::Sum;
  std::mt19937 random(7);
  std::uniform_int_distribution<int> values(-8, 8);
  int a[16 * kK], b[8 * kK], c[16 * 8];  // [k][m], [k][n], [n][m], as the layouts count
  for (int& x : a) x = values(random);
  for (int& x : b) x = values(random);
  for (int& x : c) x = values(random);
  emulation::GlobalMemory<T> a_registers(32 * 4 * kPacked);
  emulation::GlobalMemory<T> b_registers(32 * 2 * kPacked);
  emulation::GlobalMemory<Sum> d(32 * 4);
  for (int thread = 0; thread < 32; ++thread) {
    for (int v = 0; v < 4 * kPacked; ++v) {
      a_registers[thread * 4 * kPacked + v] = Number<T>::make(a[a_layout.place(thread, v)]);
    }
    for (int v = 0; v < 2 * kPacked; ++v) {
      b_registers[thread * 2 * kPacked + v] = Number<T>::make(b[b_layout.place(thread, v)]);
    }
    for (int v = 0; v < 4; ++v) d[thread * 4 + v] = static_cast<Sum>(c[kD.place(thread, v)]);
  }
  const Registers<Sum> registers{reinterpret_cast<const std::uint32_t*>(a_registers.data()),
                                 reinterpret_cast<const std::uint32_t*>(b_registers.data()), d.data()};
  if (TRTFORGE_LAUNCH(multiply_once<T>, 1, 32, 0, nullptr, registers) != 0) return -1;
  int num_wrong = 0;
  for (int thread = 0; thread < 32; ++thread) {
    for (int v = 0; v < 4; ++v) {
      const int place = kD.place(thread, v);
      int sum = c[place];
      for (int k = 0; k < kK; ++k) sum += a[16 * k + place % 16] * b[8 * k + place / 16];
      if (d[thread * 4 + v] != static_cast<Sum>(sum)) ++num_wrong;
    }
  }
  return num_wrong;
}

// Values of `whole` from first_value on, against those of `part` moved by (row, column); the number that differ.
int count_differences(const Layout& whole, int whole_rows, int first_value, const Layout& part, int part_rows,
                      int num_values, int row, int column) {
  int num_different = 0;
  for (int thread = 0; thread < 32; ++thread) {
    for (int v = 0; v < num_values; ++v) {
      const int in_part = part.place(thread, v);
      const int moved = in_part % part_rows + row + whole_rows * (in_part / part_rows + column);
      if (whole.place(thread, first_value + v) != moved) ++num_different;
    }
  }
  return num_different;
}

// device.cuh makes one mma of several on sm_75, by registers: which ones is right only if these layouts agree.
int check_sm_75_parts() {
  int num_different = 0;
  for (int k = 0; k < 2; ++k) {
    num_different += count_differences(kA16, 16, 4 * k, kA16Sm75, 16, 4, 0, 8 * k);     // a[2k], a[2k + 1]
    num_different += count_differences(kB16, 8, 2 * k, kB16Sm75, 8, 2, 0, 8 * k);       // b[k]
    num_different += count_differences(kB8, 8, 4 * k, kOperand8Sm75, 8, 4, 0, 16 * k);  // b[k]
    for (int m = 0; m < 2; ++m) {
      num_different += count_differences(kA8, 16, 4 * (2 * k + m), kOperand8Sm75, 8, 4, 8 * m, 16 * k);  // a[2k + m]
    }
  }
  for (int m = 0; m < 2; ++m) {
    num_different += count_differences(kD, 16, 2 * m, kD8Sm75, 8, 2, 8 * m, 0);  // d[2m], d[2m + 1]
  }
  return num_different;
}

struct Rows {
  alignas(16) std::uint16_t elements[32 * 8];
};

template <int num_matrices, bool is_transposed>
TF_GLOBAL void load_once(std::uint32_t* registers) {
  auto& shared = dynamic_shared<Rows>();
  for (unsigned i = 0; i < 8; ++i)
    shared.elements[threadIdx.x * 8 + i] = static_cast<std::uint16_t>(threadIdx.x * 8 + i);
  __syncwarp();
  const std::uint16_t* row = shared.elements + threadIdx.x * 8;
  std::uint32_t r[num_matrices];
  if constexpr (num_matrices == 4) {
    is_transposed ? ldmatrix_x4_trans(r, row) : ldmatrix_x4(r, row);
  } else {
    is_transposed ? ldmatrix_x2_trans(r, row) : ldmatrix_x2(r, row);
  }
  for (int i = 0; i < num_matrices; ++i) registers[threadIdx.x * num_matrices + i] = r[i];
}

// Row l is lane l's and holds 8 l .. 8 l + 7, so an element's number is its bit offset / 16.
template <int num_matrices, bool is_transposed>
int check_ldmatrix() {
  const Layout& layout = is_transposed ? kMatricesTransposed : kMatrices;
  emulation::GlobalMemory<std::uint32_t> registers(32 * num_matrices);
  const auto kernel = load_once<num_matrices, is_transposed>;
  if (TRTFORGE_LAUNCH(kernel, 1, 32, sizeof(Rows), nullptr, registers.data()) != 0) return -1;
  int num_wrong = 0;
  for (int thread = 0; thread < 32; ++thread) {
    for (int v = 0; v < 2 * num_matrices; ++v) {
      const unsigned found = registers[thread * num_matrices + v / 2] >> 16 * (v % 2) & 0xffff;
      if (found != static_cast<unsigned>(layout.place(thread, 16 * v) / 16)) ++num_wrong;
    }
  }
  return num_wrong;
}

}  // namespace

}  // namespace trtforge

int main() {
  using namespace trtforge;
  std::printf("mma f16 %d\n", check_mma<half>(kA16, kB16));
  std::printf("mma bf16 %d\n", check_mma<bf16>(kA16, kB16));
  std::printf("mma s8 %d\n", check_mma<std::int8_t>(kA8, kB8));
  std::printf("parts of mma on sm_75 %d\n", check_sm_75_parts());
  std::printf("ldmatrix x4 %d\n", check_ldmatrix<4, false>());
  std::printf("ldmatrix x4 trans %d\n", check_ldmatrix<4, true>());
  std::printf("ldmatrix x2 %d\n", check_ldmatrix<2, false>());
  std::printf("ldmatrix x2 trans %d\n", check_ldmatrix<2, true>());
}
