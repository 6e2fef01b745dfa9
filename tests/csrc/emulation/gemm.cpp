// The GEMM on the emulator against float64: `gemm M N K` prints the worst error as a share of its bound, for fp16 and
// bf16, and exits 1 where one is over.
#include "gemm.cuh"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "emulation/global_memory.h"

namespace trtforge {

namespace {

inline float widen(half x) { return __half2float(x); }
inline float widen(bf16 x) { return __bfloat162float(x); }

template <typename T>
void fill(emulation::GlobalMemory<T>& memory, std::mt19937& random) {
  std::uniform_real_distribution<float> values(-1.0f, 1.0f);
  for (std::size_t i = 0; i < memory.size(); ++i) gemm::store(&memory[i], values(random));
}

// |error| / (rounding of the result + k roundings of an fp32 sum). unit: half the distance of 1 to the next T.
template <typename T>
double worst_share(int m, int n, int k, double unit) {
  emulation::GlobalMemory<T> a(static_cast<std::size_t>(m) * k);
  emulation::GlobalMemory<T> b(static_cast<std::size_t>(k) * n);
  emulation::GlobalMemory<T> c(static_cast<std::size_t>(m) * n);
  std::mt19937 random(1);
  fill(a, random);
  fill(b, random);
  if (launch_gemm<T>({a.data(), b.data(), c.data(), m, n, k}, nullptr) != 0) return INFINITY;
  constexpr double kFloatUnit = 1.0 / (1 << 24);
  double worst = 0.0;
  for (int row = 0; row < m; ++row) {
    for (int column = 0; column < n; ++column) {
      double sum = 0.0;
      double magnitude = 0.0;
      for (int i = 0; i < k; ++i) {
        const double product = static_cast<double>(widen(a[row * k + i])) * widen(b[i * n + column]);
        sum += product;
        magnitude += std::fabs(product);
      }
      const double share =
          std::fabs(widen(c[row * n + column]) - sum) / (unit * std::fabs(sum) + (k + 1) * kFloatUnit * magnitude);
      if (!(share <= worst)) worst = share;  // NaN too
    }
  }
  return worst;
}

}  // namespace

}  // namespace trtforge

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const int m = std::atoi(argv[1]);
  const int n = std::atoi(argv[2]);
  const int k = std::atoi(argv[3]);
  const double fp16 = trtforge::worst_share<trtforge::half>(m, n, k, 1.0 / (1 << 11));
  const double bf16 = trtforge::worst_share<trtforge::bf16>(m, n, k, 1.0 / (1 << 8));
  std::printf("fp16 %.3f bf16 %.3f\n", fp16, bf16);
  return fp16 <= 1.0 && bf16 <= 1.0 ? 0 : 1;
}
