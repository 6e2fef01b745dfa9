#include "../kernels/gemm_s8.cuh"
#include "gemm.h"
#include "gemm_checks.h"
#include "gemm_tile_choice.h"

namespace trtforge {
namespace {

GemmStatus check(const GemmS8Params& params) {
  const bool is_int8 = params.c_int8 != nullptr;
  const GemmStatus status =
      first_failure({check_epilogue(params.epilogue), check_width(params.depth), check_type(params.type, params.device),
                     check_device(params.device), check_tile(params.tile), check_scale(params.a_scale),
                     is_int8 ? check_scale(params.c_scale) : GemmStatus::kOk,
                     params.depth > kMaxInt8Depth ? GemmStatus::kTooLarge : GemmStatus::kOk});
  if (status != GemmStatus::kOk || params.epilogue.rows.num_rows == 0) return status;
  return first_failure({check_pointer(params.a), check_pointer(params.b), check_pointer(params.b_scales),
                        check_pointer(is_int8 ? params.c_int8 : params.epilogue.c)});
}

template <typename T>
int launch(const GemmS8Params& params, Stream stream) {
  return launch_with_tile(params.tile, params.epilogue, params.device, [&](auto tile, dim3 grid) {
    using Tile = decltype(tile);
    return TRTFORGE_LAUNCH((gemm_s8_kernel<T, Tile>), grid, dim3(Tile::kThreads), sizeof(GemmShared<Tile>), stream,
                           params);
  });
}

}  // namespace

int launch_gemm_s8(const GemmS8Params& params, Stream stream) {
  const GemmStatus status = check(params);
  if (status != GemmStatus::kOk || params.epilogue.rows.num_rows == 0) return static_cast<int>(status);
  return params.type == ElementType::kHalf ? launch<half>(params, stream) : launch<bf16>(params, stream);
}

}  // namespace trtforge
