// What the launchers of gemm.h refuse, and why.
#pragma once

#include <cmath>
#include <cstdint>
#include <initializer_list>

#include "../kernels/params_gemm.h"
#include "gemm.h"

namespace trtforge {

// The kernels count rows, columns and tiles in int, and look up to a tile past the end.
constexpr int kMaxMatrixSide = 1 << 30;
constexpr uintptr_t kPointerAlignment = 16;  // bytes that cp.async and ldmatrix move

inline GemmStatus check_pointer(const void* pointer) {
  if (pointer == nullptr) return GemmStatus::kNullPointer;
  return reinterpret_cast<uintptr_t>(pointer) % kPointerAlignment == 0 ? GemmStatus::kOk : GemmStatus::kMisaligned;
}

inline GemmStatus check_optional_pointer(const void* pointer) {
  return pointer == nullptr ? GemmStatus::kOk : check_pointer(pointer);
}

// A number of columns, or K.
inline GemmStatus check_width(int width) {
  if (width <= 0 || width % 8 != 0) return GemmStatus::kBadSize;
  return width <= kMaxMatrixSide ? GemmStatus::kOk : GemmStatus::kTooLarge;
}

inline GemmStatus check_rows(const RowSet& rows) {
  if (rows.num_rows < 0) return GemmStatus::kBadSize;
  if (rows.num_rows > kMaxMatrixSide) return GemmStatus::kTooLarge;
  if (rows.lengths == nullptr) return GemmStatus::kOk;
  if (reinterpret_cast<uintptr_t>(rows.lengths) % alignof(int32_t) != 0) return GemmStatus::kMisaligned;
  if (rows.num_rows == 0) return GemmStatus::kOk;  // S may be 0 then
  const bool is_whole = rows.sequence_length > 0 && rows.num_rows % rows.sequence_length == 0;
  return is_whole ? GemmStatus::kOk : GemmStatus::kBadSequence;
}

inline GemmStatus check_scale(float scale) {
  return std::isfinite(scale) && scale > 0.0f ? GemmStatus::kOk : GemmStatus::kBadScale;
}

inline GemmStatus check_type(ElementType type, const DeviceTraits& device) {
  if (type == ElementType::kHalf) return GemmStatus::kOk;
  if (type != ElementType::kBfloat16) return GemmStatus::kBadChoice;
  return device.compute_capability >= 80 ? GemmStatus::kOk : GemmStatus::kNoBfloat16;
}

inline GemmStatus check_device(const DeviceTraits& device) {
  return device.num_multiprocessors > 0 ? GemmStatus::kOk : GemmStatus::kBadChoice;
}

inline GemmStatus check_tile(TileChoice tile) {
  const bool is_known = tile >= TileChoice::kAuto && tile <= TileChoice::kLarge;
  return is_known ? GemmStatus::kOk : GemmStatus::kBadChoice;
}

inline GemmStatus check_activation(Activation activation) {
  const bool is_known = activation >= Activation::kNone && activation <= Activation::kSilu;
  return is_known ? GemmStatus::kOk : GemmStatus::kBadChoice;
}

inline GemmStatus first_failure(std::initializer_list<GemmStatus> checks) {
  for (const GemmStatus status : checks) {
    if (status != GemmStatus::kOk) return status;
  }
  return GemmStatus::kOk;
}

inline GemmStatus check_epilogue(const EpilogueParams& epilogue) {
  return first_failure({check_rows(epilogue.rows), check_width(epilogue.num_cols),
                        check_activation(epilogue.activation), check_optional_pointer(epilogue.bias),
                        check_optional_pointer(epilogue.residual)});
}

// The status of a launch from what CUDA returned.
inline int launch_status(int cuda_error) {
  return static_cast<int>(cuda_error == 0 ? GemmStatus::kOk : GemmStatus::kLaunchFailed);
}

}  // namespace trtforge
