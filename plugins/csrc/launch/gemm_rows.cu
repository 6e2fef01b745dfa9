// The kernels around a GEMM that work row by row: LayerNorm and quantization.
#include <cmath>

#include "../kernels/layernorm.cuh"
#include "gemm.h"
#include "gemm_checks.h"

namespace trtforge {
namespace {

// A warp a row, but no more than fill the device several times over: warps take further rows in turn.
unsigned count_blocks(const RowSet& rows, const DeviceTraits& device) {
  const int64_t num_blocks = (static_cast<int64_t>(rows.num_rows) + kRowsPerBlock - 1) / kRowsPerBlock;
  const int64_t full_grid = static_cast<int64_t>(device.num_multiprocessors) * 16;
  return static_cast<unsigned>(num_blocks < full_grid ? num_blocks : full_grid);
}

GemmStatus check_output(const void* y_int8, float scale) {
  return y_int8 == nullptr ? GemmStatus::kOk : first_failure({check_pointer(y_int8), check_scale(scale)});
}

GemmStatus check(const LayerNormParams& params) {
  const bool is_epsilon_good = std::isfinite(params.epsilon) && params.epsilon >= 0.0f;
  const GemmStatus status =
      first_failure({check_rows(params.rows), check_width(params.width), check_type(params.type, params.device),
                     check_device(params.device), is_epsilon_good ? GemmStatus::kOk : GemmStatus::kBadScale});
  if (status != GemmStatus::kOk || params.rows.num_rows == 0) return status;
  const void* any_output = params.y != nullptr ? params.y : params.y_int8;
  return first_failure({check_pointer(params.x), check_pointer(params.gamma), check_optional_pointer(params.beta),
                        check_pointer(any_output), check_output(params.y_int8, params.y_scale)});
}

GemmStatus check(const QuantizeParams& params) {
  const GemmStatus status =
      first_failure({check_rows(params.rows), check_width(params.width), check_type(params.type, params.device),
                     check_device(params.device), check_scale(params.scale)});
  if (status != GemmStatus::kOk || params.rows.num_rows == 0) return status;
  return first_failure({check_pointer(params.x), check_pointer(params.y_int8)});
}

}  // namespace

int launch_layernorm(const LayerNormParams& params, Stream stream) {
  const GemmStatus status = check(params);
  if (status != GemmStatus::kOk || params.rows.num_rows == 0) return static_cast<int>(status);
  const dim3 grid(count_blocks(params.rows, params.device));
  return launch_status(params.type == ElementType::kHalf
                           ? TRTFORGE_LAUNCH(layernorm_kernel<half>, grid, dim3(kRowThreads), 0, stream, params)
                           : TRTFORGE_LAUNCH(layernorm_kernel<bf16>, grid, dim3(kRowThreads), 0, stream, params));
}

int launch_quantize(const QuantizeParams& params, Stream stream) {
  const GemmStatus status = check(params);
  if (status != GemmStatus::kOk || params.rows.num_rows == 0) return static_cast<int>(status);
  const dim3 grid(count_blocks(params.rows, params.device));
  return launch_status(params.type == ElementType::kHalf
                           ? TRTFORGE_LAUNCH(quantize_kernel<half>, grid, dim3(kRowThreads), 0, stream, params)
                           : TRTFORGE_LAUNCH(quantize_kernel<bf16>, grid, dim3(kRowThreads), 0, stream, params));
}

}  // namespace trtforge
