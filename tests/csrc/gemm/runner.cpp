// Runs GEMM, LayerNorm and quantize cases through their launchers on the emulator.
//
//   runner FOLDER < CASES     a case a line: id=0 op=gemm type=half m=7 n=72 k=64 ...
//
// Operands are FOLDER/<id>.<name>, results are written beside them. For each case one line is printed: id,
// status (for choose_tile and count_conflicts: the answer), the status's text.
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <set>
#include <string>

#include "../../../plugins/csrc/emulation/machine.h"
#include "../../../plugins/csrc/kernels/tile.cuh"
#include "../../../plugins/csrc/launch/gemm.h"
#include "case_files.h"
#include "phases.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

using namespace trtforge;

namespace {

// Rows of padding may not be read: under AddressSanitizer a read of one is an error.
void poison_padding([[maybe_unused]] const RowSet& rows, [[maybe_unused]] const Buffer& matrix,
                    [[maybe_unused]] std::size_t row_bytes, [[maybe_unused]] bool is_poisoned) {
#ifdef __SANITIZE_ADDRESS__
  if (rows.lengths == nullptr || matrix.as() == nullptr) return;
  for (int row = 0; row < rows.num_rows; ++row) {
    if (row % rows.sequence_length < rows.lengths[row / rows.sequence_length]) continue;
    const void* start = matrix.as<unsigned char>() + row * row_bytes;
    if (is_poisoned) {
      ASAN_POISON_MEMORY_REGION(start, row_bytes);
    } else {
      ASAN_UNPOISON_MEMORY_REGION(start, row_bytes);
    }
  }
#endif
}

ElementType element_type(const Case& c) {
  if (c.text("type") == "half") return ElementType::kHalf;
  if (c.text("type") == "bf16") return ElementType::kBfloat16;
  return static_cast<ElementType>(c.number("type"));
}

RowSet row_set(const Case& c, const Buffer& lengths) {
  return {c.number("m"), c.has("s") ? c.number("s") : 0, c.hand_over("lengths", lengths.as<int32_t>())};
}

DeviceTraits device_traits(const Case& c) {
  return {c.has("sm") ? c.number("sm") : 80, c.has("num_multiprocessors") ? c.number("num_multiprocessors") : 4};
}

// Bytes of a result; none for the sizes of cases that are refused, where nothing is written.
std::size_t byte_count(int64_t rows, int64_t row_bytes) {
  constexpr int64_t kLargestSide = 1 << 20;
  const bool is_real = rows > 0 && row_bytes > 0 && rows <= kLargestSide && row_bytes <= kLargestSide;
  return static_cast<std::size_t>(is_real ? rows * row_bytes : 0);
}

EpilogueParams epilogue(const Case& c, const Buffer& result, const Buffer& bias, const Buffer& residual,
                        const Buffer& lengths) {
  EpilogueParams params{};
  params.c = c.hand_over("c", result.as());
  params.bias = c.hand_over("bias", bias.as());
  params.residual = c.hand_over("residual", residual.as());
  params.rows = row_set(c, lengths);
  params.num_cols = c.number("n");
  params.activation = static_cast<Activation>(c.number("activation"));
  return params;
}

int run_gemm(const Case& c) {
  const Buffer a = c.read("a"), b = c.read("b"), bias = c.read("bias"), lengths = c.read("lengths");
  const Buffer residual = c.read("residual");
  const Buffer own_result(byte_count(c.number("m"), 2 * c.number("n")));
  const Buffer& result = c.has("in_place") ? residual : own_result;
  GemmParams params{};
  params.a = c.hand_over("a", a.as());
  params.b = c.hand_over("b", b.as());
  params.depth = c.number("k");
  params.epilogue = epilogue(c, result, bias, residual, lengths);
  params.type = element_type(c);
  params.tile = static_cast<TileChoice>(c.number("tile"));
  params.device = device_traits(c);
  poison_padding(params.epilogue.rows, a, 2 * params.depth, true);
  if (!c.has("in_place")) poison_padding(params.epilogue.rows, residual, 2 * params.epilogue.num_cols, true);
  const int status = launch_gemm(params, nullptr);
  poison_padding(params.epilogue.rows, a, 2 * params.depth, false);
  poison_padding(params.epilogue.rows, residual, 2 * params.epilogue.num_cols, false);
  c.write("c", result);
  return status;
}

int run_gemm_s8(const Case& c) {
  const Buffer a = c.read("a"), b = c.read("b_transposed"), scales = c.read("b_scales"), bias = c.read("bias");
  const Buffer lengths = c.read("lengths"), residual = c.read("residual");
  const Buffer result(byte_count(c.number("m"), 2 * c.number("n")));
  const Buffer result_int8(byte_count(c.number("m"), int8_row_bytes(c.number("n"))));

  GemmS8Params params{};
  params.a = c.hand_over("a", a.as<int8_t>());
  params.b = c.hand_over("b", b.as<int8_t>());
  params.b_scales = c.hand_over("b_scales", scales.as<float>());
  params.a_scale = c.real("a_scale");
  params.depth = c.number("k");
  params.epilogue = epilogue(c, result, bias, residual, lengths);
  params.c_int8 = c.has("c_scale") ? c.hand_over("c_int8", result_int8.as<int8_t>()) : nullptr;
  params.c_scale = c.has("c_scale") ? c.real("c_scale") : 0.0f;
  params.type = element_type(c);
  params.tile = static_cast<TileChoice>(c.number("tile"));
  params.device = device_traits(c);
  const std::size_t a_row_bytes = static_cast<std::size_t>(int8_row_bytes(params.depth));
  poison_padding(params.epilogue.rows, a, a_row_bytes, true);
  poison_padding(params.epilogue.rows, residual, 2 * params.epilogue.num_cols, true);
  const int status = launch_gemm_s8(params, nullptr);
  poison_padding(params.epilogue.rows, a, a_row_bytes, false);
  poison_padding(params.epilogue.rows, residual, 2 * params.epilogue.num_cols, false);
  c.write("c", c.has("c_scale") ? result_int8 : result);
  return status;
}

int run_layernorm(const Case& c) {
  const Buffer x = c.read("x"), gamma = c.read("gamma"), beta = c.read("beta"), lengths = c.read("lengths");
  const Buffer y(byte_count(c.number("m"), 2 * c.number("n")));
  const Buffer y_int8(byte_count(c.number("m"), int8_row_bytes(c.number("n"))));
  LayerNormParams params{};
  params.x = c.hand_over("x", x.as());
  params.gamma = c.hand_over("gamma", gamma.as());
  params.beta = c.hand_over("beta", beta.as());
  params.y = c.has("no_y") ? nullptr : c.hand_over("y", y.as());
  params.y_int8 = c.has("y_scale") ? y_int8.as<int8_t>() : nullptr;
  params.y_scale = c.has("y_scale") ? c.real("y_scale") : 0.0f;
  params.epsilon = c.real("epsilon");
  params.rows = row_set(c, lengths);
  params.width = c.number("n");
  params.type = element_type(c);
  params.device = device_traits(c);
  poison_padding(params.rows, x, 2 * params.width, true);
  const int status = launch_layernorm(params, nullptr);
  poison_padding(params.rows, x, 2 * params.width, false);
  c.write("y", y);
  c.write("y_int8", y_int8);
  return status;
}

int run_quantize(const Case& c) {
  const Buffer x = c.read("x"), lengths = c.read("lengths");
  const Buffer y_int8(byte_count(c.number("m"), int8_row_bytes(c.number("n"))));
  const QuantizeParams params{c.hand_over("x", x.as()), y_int8.as<int8_t>(), c.real("y_scale"),
                              row_set(c, lengths),      c.number("n"),       element_type(c),
                              device_traits(c)};
  poison_padding(params.rows, x, 2 * params.width, true);
  const int status = launch_quantize(params, nullptr);
  poison_padding(params.rows, x, 2 * params.width, false);
  c.write("y_int8", y_int8);
  return status;
}

// How many of the 8 rows that ldmatrix reads at once find their place in a 128-byte line of banks taken, over all
// chunks of rows of kChunks; and 1 more where two chunks of a tile share one place.
template <int kChunks>
int count_conflicts() {
  constexpr int kRows = 16, kBand = 8, kLineChunks = 8;
  int conflicts = 0;
  std::set<int> places;
  for (int band = 0; band < kRows; band += kBand) {
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      std::set<int> banks;
      for (int row = band; row < band + kBand; ++row) {
        const int place = swizzled_offset<kChunks>(row, chunk) / kChunkBytes;
        banks.insert(place % kLineChunks);
        places.insert(place);
      }
      conflicts += kBand - static_cast<int>(banks.size());
    }
  }
  const bool is_one_to_one =
      static_cast<int>(places.size()) == kRows * kChunks && *places.rbegin() == kRows * kChunks - 1;
  return conflicts + (is_one_to_one ? 0 : 1);
}

int run_case(const Case& c) {
  emulation::options().seed = c.has("seed") ? static_cast<unsigned>(c.number("seed")) : 0;
  const std::string& op = c.text("op");
  if (op == "gemm") return run_gemm(c);
  if (op == "gemm_s8") return run_gemm_s8(c);
  if (op == "layernorm") return run_layernorm(c);
  if (op == "quantize") return run_quantize(c);
  if (op == "phases") return run_phases(c);
  if (op == "count_conflicts") return count_conflicts<4>() + count_conflicts<8>() + count_conflicts<16>();
  if (op == "choose_tile") {
    return static_cast<int>(choose_gemm_tile(c.number("m"), c.number("n"), c.number("num_multiprocessors")));
  }
  fail("unknown op " + op);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) fail("usage: runner FOLDER < CASES");
  for (std::string line; std::getline(std::cin, line);) {
    const Case c(argv[1], line);
    const int status = run_case(c);
    std::printf("%s %d %s\n", c.text("id").c_str(), status, gemm_status_text(status));
    std::fflush(stdout);
  }
  return 0;
}
