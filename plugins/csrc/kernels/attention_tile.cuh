// The parts of an attention tile: its constants, its shared memory, and the four steps on fragments.
//
// Fragments are those of mma.m16n8k16 (PTX ISA, "Matrix Fragments for mma.m16n8k16"). With g = lane / 4, t = lane % 4:
//   A [16 rows][16 k]  a0 (g, 2t) a1 (g + 8, 2t) a2 (g, 2t + 8) a3 (g + 8, 2t + 8), each with its right neighbour
//   B [16 k][8 n]      b0 (k 2t, n g) b1 (k 2t + 8, n g), each with the k below it
//   C [16 rows][8 n]   c0 c1 (g, 2t) (g, 2t + 1)   c2 c3 (g + 8, ..)
// Scores S = Q K^T: A is Q [rows][D], B is K^T, and ldmatrix gives it from the rows of K [keys][D].
// Output O = P V:   A is P [rows][keys], B is V [keys][D], read by columns: ldmatrix.trans.
// A C fragment of two neighbouring score tiles is, packed to T, the A fragment of 16 keys: P never leaves the
// registers.
#pragma once

#include <cstdint>
#include <cstring>

#include "chunk.cuh"
#include "device.cuh"

namespace trtforge {

// T: half or bf16. kHeadSize: D. A block of 4 warps, as the GEMM tiles have, computes 16 rows a warp, kKeys keys at a
// time: 64 up to D = 64; above it 32, which keeps two stages of K and V under 48 KB and the accumulators in registers.
template <typename T_, int kHeadSize_>
struct AttentionTile {
  using T = T_;
  static constexpr int kHeadSize = kHeadSize_;
  static constexpr int kWarps = 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRows = 16 * kWarps;
  static constexpr int kKeys = kHeadSize <= 64 ? 64 : 32;
  // What ptxas is asked to leave registers for; the accumulators of D = 128 admit no more.
  static constexpr int kBlocksPerMultiprocessor = kHeadSize <= 32 ? 4 : kHeadSize <= 96 ? 3 : 2;
  static constexpr int kChunksPerRow = kHeadSize / kChunkElements;
  static constexpr int kLanesPerRow = kChunksPerRow % 8 == 0 ? 8 : 4;
  static constexpr int kRowsAtOnce = kThreads / kLanesPerRow;    // rows of K and V that the block copies in one pass
  static constexpr int kRowStride = kHeadSize + kChunkElements;  // elements of a row in shared memory

  static_assert(sizeof(T) == 2, "fragments and copies assume 16-bit elements");
  static_assert(kHeadSize % 16 == 0, "Q K^T takes 16 elements of D per mma, and ldmatrix_x4_trans 16 columns of V");
  static_assert(kKeys % kRowsAtOnce == 0, "every thread copies the same number of rows");
  static_assert(kKeys % 16 == 0, "P V takes 16 keys per mma");
  static_assert((kRowStride / kChunkElements) % 2 == 1, "rows of an odd number of chunks start at different banks");

  // Two stages, so that tile j + 1 arrives while tile j is computed.
  // Banks: a row is an odd number of 16-byte chunks (D / 8 is even, plus one of padding), so the eight rows of an 8 x 8
  // matrix start at eight different chunks modulo 8, and ldmatrix reads 128 bytes from all 32 banks, with and without
  // .trans. cp.async writes eight chunks at a time: one row's with eight lanes a row, without conflict; two rows' with
  // four, of which a few meet in a bank. The padding is never read.
  struct alignas(16) Shared {
    T keys[2][kKeys][kRowStride];
    T values[2][kKeys][kRowStride];
  };
  static_assert(sizeof(Shared) <= 48 * 1024, "fits what a kernel may have without raising its limit");

  using Query = uint32_t[kHeadSize / 16][4];  // A fragments of this warp's rows, held for all keys
  using Scores = float[kKeys / 8][4];         // C fragments of [16 rows][kKeys]
  using Output = float[kHeadSize / 8][4];     // C fragments of [16 rows][D]
};

TF_DEVICE int lane_index() { return static_cast<int>(threadIdx.x) % 32; }

// Two floats, rounded to T, as a fragment register: the lower one in the lower half.
template <typename T>
TF_DEVICE uint32_t pack_pair(float low, float high) {
  const typename PairOf<T>::Type pair = PairOf<T>::from(low, high);
  uint32_t bits;
  memcpy(&bits, &pair, sizeof(bits));
  return bits;
}

// Q goes from global memory to registers: it is read once a row tile, so a stop in shared memory would only cost
// space and a barrier. Plain loads, not __ldg: in a persistent kernel the same launch has written Q.
// query: [S, D] by row_stride; row: this lane's two rows; rows at or past num_rows are zero and not read.
template <typename Tile>
TF_DEVICE void load_query(typename Tile::Query& fragments, const typename Tile::T* query, int64_t row_stride,
                          const int (&row)[2], int num_rows) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint32_t* pairs = reinterpret_cast<const uint32_t*>(query + row[r] * row_stride) + lane_index() % 4;
    const bool is_valid = row[r] < num_rows;
#pragma unroll
    for (int k = 0; k < Tile::kHeadSize / 16; ++k) {
      fragments[k][r] = is_valid ? pairs[8 * k] : 0u;
      fragments[k][r + 2] = is_valid ? pairs[8 * k + 4] : 0u;
    }
  }
}

// Starts the copy of one tile of K and V. keys, values: [S, D] by row_stride; those at or past num_keys become zero
// and are not read. to_keys, to_values: [kKeys][kRowStride] in shared memory. Eight or four lanes copy a row
// together, so that a thread's columns are constants beside one address a row.
template <typename Tile>
TF_DEVICE void load_keys_and_values(typename Tile::T (&to_keys)[Tile::kKeys][Tile::kRowStride],
                                    typename Tile::T (&to_values)[Tile::kKeys][Tile::kRowStride],
                                    const typename Tile::T* keys, const typename Tile::T* values, int64_t row_stride,
                                    int first_key, int num_keys) {
  const int first_column = static_cast<int>(threadIdx.x) % Tile::kLanesPerRow * kChunkElements;
#pragma unroll
  for (int pass = 0; pass < Tile::kKeys / Tile::kRowsAtOnce; ++pass) {
    const int row = pass * Tile::kRowsAtOnce + static_cast<int>(threadIdx.x) / Tile::kLanesPerRow;
    const bool is_valid = first_key + row < num_keys;
    const int64_t offset = is_valid ? (first_key + row) * row_stride : 0;
#pragma unroll
    for (int start = 0; start < Tile::kHeadSize; start += Tile::kLanesPerRow * kChunkElements) {
      const int column = start + first_column;
      if (Tile::kChunksPerRow % Tile::kLanesPerRow != 0 && column >= Tile::kHeadSize) break;
      cp_async16(&to_keys[row][column], keys + offset + column, is_valid);
      cp_async16(&to_values[row][column], values + offset + column, is_valid);
    }
  }
  cp_async_commit();
}

// scores = Q K^T, unscaled. keys: [kKeys][kRowStride]. One ldmatrix_x4 gives the B fragments of 16 keys: lanes 0-7 and
// 8-15 address the two halves of k for the first eight keys, lanes 16-31 for the next eight.
template <typename Tile>
TF_DEVICE void compute_scores(typename Tile::Scores& scores, const typename Tile::Query& query,
                              const typename Tile::T (&keys)[Tile::kKeys][Tile::kRowStride]) {
  const int row = lane_index() / 16 * 8 + lane_index() % 8;
  const int column = lane_index() / 8 % 2 * 8;
#pragma unroll
  for (int n = 0; n < Tile::kKeys / 16; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) scores[2 * n][c] = scores[2 * n + 1][c] = 0.0f;
#pragma unroll
    for (int k = 0; k < Tile::kHeadSize / 16; ++k) {
      uint32_t fragment[4];
      ldmatrix_x4(fragment, &keys[16 * n + row][16 * k + column]);
      mma_m16n8k16<typename Tile::T>(scores[2 * n], query[k], {fragment[0], fragment[1]});
      mma_m16n8k16<typename Tile::T>(scores[2 * n + 1], query[k], {fragment[2], fragment[3]});
    }
  }
}

// Scores of keys that a row does not see become -inf. first_key: the key of this lane's scores[0][0]; num_keys: of each
// of the lane's two rows.
template <typename Tile>
TF_DEVICE void mask_scores(typename Tile::Scores& scores, int first_key, const int (&num_keys)[2]) {
#pragma unroll
  for (int n = 0; n < Tile::kKeys / 8; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (first_key + 8 * n + c % 2 >= num_keys[c / 2]) scores[n][c] = -INFINITY;
    }
  }
}

// output = output * rescale + P V, P being the weights rounded to T. values: [kKeys][kRowStride]. One ldmatrix_x4_trans
// gives the B fragments of 16 columns: lanes 0-15 address 16 keys of the first eight columns, lanes 16-31 of the next.
template <typename Tile>
TF_DEVICE void accumulate_output(typename Tile::Output& output, const float (&rescale)[2],
                                 const typename Tile::Scores& weights,
                                 const typename Tile::T (&values)[Tile::kKeys][Tile::kRowStride]) {
  using T = typename Tile::T;
  const int row = lane_index() % 16;
  const int column = lane_index() / 16 * 8;
#pragma unroll
  for (int n = 0; n < Tile::kHeadSize / 8; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) output[n][c] *= rescale[c / 2];
  }
#pragma unroll
  for (int k = 0; k < Tile::kKeys / 16; ++k) {
    const float(&left)[4] = weights[2 * k];
    const float(&right)[4] = weights[2 * k + 1];
    const uint32_t weight[4] = {pack_pair<T>(left[0], left[1]), pack_pair<T>(left[2], left[3]),
                                pack_pair<T>(right[0], right[1]), pack_pair<T>(right[2], right[3])};
#pragma unroll
    for (int n = 0; n < Tile::kHeadSize / 16; ++n) {
      uint32_t fragment[4];
      ldmatrix_x4_trans(fragment, &values[16 * k + row][16 * n + column]);
      mma_m16n8k16<T>(output[2 * n], weight, {fragment[0], fragment[1]});
      mma_m16n8k16<T>(output[2 * n + 1], weight, {fragment[2], fragment[3]});
    }
  }
}

}  // namespace trtforge
