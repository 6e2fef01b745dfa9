// Copies of one pipeline stage from global to shared memory, 16 bytes a thread and instruction, with cp.async.
//
// What lies outside the matrix, or is padding, is not read and arrives as zeros, which add nothing to a product.
// What a thread needs to know of its rows or columns is worked out once for the whole of K.
#pragma once

#include <cstdint>

#include "device.cuh"
#include "rows.cuh"
#include "tile.cuh"

namespace trtforge {

// Stages whose rows are rows of the matrix: A, and the transposed B of int8. Stage: [kRows][kDepthBytes], swizzled.
// Each thread copies one chunk column in kPasses rows, kRowsAtOnce apart.
template <typename Tile, int kRows>
struct RowStageCopy {
  static constexpr int kChunks = Tile::kDepthBytes / kChunkBytes;
  static constexpr int kRowsAtOnce = Tile::kThreads / kChunks;
  static constexpr int kPasses = kRows / kRowsAtOnce;
  static_assert(kRows % kRowsAtOnce == 0, "every thread copies the same number of chunks");
  static_assert(kRowsAtOnce % 8 == 0, "the swizzle key is the same in every pass");
  static_assert(kPasses <= 32, "one bit a pass");

  const unsigned char* matrix;  // [*, row_bytes]
  int64_t first_byte;           // of this thread's first row
  int64_t row_bytes;            // from one row to the next
  int depth_bytes;              // of a row that hold data
  int chunk_byte;               // this thread's chunk inside a stage's row
  int offset;                   // this thread's first chunk inside a stage
  unsigned valid_passes;        // bit p: the row of pass p exists and is not padding

  TF_DEVICE RowStageCopy(const void* matrix_, int64_t row_bytes_, int depth_bytes_, const RowSet& rows, int first_row)
      : matrix(static_cast<const unsigned char*>(matrix_)), row_bytes(row_bytes_), depth_bytes(depth_bytes_) {
    const int thread = static_cast<int>(threadIdx.x);
    const int row = thread / kChunks;
    chunk_byte = thread % kChunks * kChunkBytes;
    first_byte = (first_row + row) * row_bytes + chunk_byte;
    offset = swizzled_offset<kChunks>(row, thread % kChunks);
    valid_passes = 0;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (is_valid_row(rows, first_row + row + pass * kRowsAtOnce)) valid_passes |= 1u << pass;
    }
  }

  // Starts the copy of K step `step` into `stage`.
  TF_DEVICE void start(unsigned char* stage, int step) const {
    const int depth = step * Tile::kDepthBytes;
    const bool has_depth = depth + chunk_byte < depth_bytes;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const bool is_valid = has_depth && (valid_passes >> pass & 1u) != 0;
      const int64_t byte = is_valid ? first_byte + pass * kRowsAtOnce * row_bytes + depth : 0;
      cp_async16(stage + offset + pass * kRowsAtOnce * Tile::kDepthBytes, matrix + byte, is_valid);
    }
  }
};

// Stages whose rows are K: the row-major B of half and bf16. Stage: [kDepth][kCols], swizzled.
template <typename T, typename Tile>
struct DepthStageCopy {
  static constexpr int kDepth = Tile::kDepthBytes / static_cast<int>(sizeof(T));
  static constexpr int kChunks = Tile::kCols / kChunkElements;
  static constexpr int kRowsAtOnce = Tile::kThreads / kChunks;
  static constexpr int kPasses = kDepth / kRowsAtOnce;
  static_assert(sizeof(T) * kChunkElements == kChunkBytes, "a chunk is 8 elements");
  static_assert(kDepth % kRowsAtOnce == 0, "every thread copies the same number of chunks");
  static_assert(kRowsAtOnce % 8 == 0, "the swizzle key is the same in every pass");

  const T* matrix;  // [K, N]
  int depth;        // K
  int num_cols;     // N
  int row;          // this thread's first row inside a stage
  int col;          // this thread's first column of the matrix
  int offset;       // this thread's first chunk inside a stage

  TF_DEVICE DepthStageCopy(const void* matrix_, int depth_, int num_cols_, int first_col)
      : matrix(static_cast<const T*>(matrix_)), depth(depth_), num_cols(num_cols_) {
    const int thread = static_cast<int>(threadIdx.x);
    row = thread / kChunks;
    col = first_col + thread % kChunks * kChunkElements;
    offset = swizzled_offset<kChunks>(row, thread % kChunks);
  }

  TF_DEVICE void start(unsigned char* stage, int step) const {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int k = step * kDepth + row + pass * kRowsAtOnce;
      const bool is_valid = k < depth && col < num_cols;
      const int64_t element = is_valid ? static_cast<int64_t>(k) * num_cols + col : 0;
      cp_async16(stage + offset + pass * kRowsAtOnce * kChunks * kChunkBytes, matrix + element, is_valid);
    }
  }
};

}  // namespace trtforge
