// Which rows of an activation matrix exist and are not padding.
#pragma once

#include "device.cuh"
#include "params_gemm.h"

namespace trtforge {

// True where `row` is a token: inside the matrix, and before the end of its sequence.
TF_DEVICE bool is_valid_row(const RowSet& rows, int row) {
  if (row >= rows.num_rows) return false;
  if (rows.lengths == nullptr) return true;
  return row % rows.sequence_length < rows.lengths[row / rows.sequence_length];
}

// True where [begin, end) holds a token. A tile for which this is false is neither loaded nor multiplied.
// Only the first row that a sequence has in the range needs a look: padding is at a sequence's end.
TF_DEVICE bool has_valid_row(const RowSet& rows, int begin, int end) {
  if (end > rows.num_rows) end = rows.num_rows;
  if (rows.lengths == nullptr) return begin < end;
  while (begin < end) {
    if (is_valid_row(rows, begin)) return true;
    begin += rows.sequence_length - begin % rows.sequence_length;
  }
  return false;
}

}  // namespace trtforge
