#include "../kernels/gemm.cuh"
#include "gemm.h"
#include "gemm_checks.h"
#include "gemm_tile_choice.h"

namespace trtforge {

const char* gemm_status_text(int status) {
  switch (static_cast<GemmStatus>(status)) {
    case GemmStatus::kOk:
      return "ok";
    case GemmStatus::kNullPointer:
      return "a pointer that the kernel needs is null";
    case GemmStatus::kMisaligned:
      return "a matrix, bias or scale does not start on 16 bytes (lengths: 4 bytes); give it memory that does";
    case GemmStatus::kBadSize:
      return "K, N or H is not a positive multiple of 8, or the number of rows is negative; pad the matrix with zeros";
    case GemmStatus::kTooLarge:
      return "a side of a matrix is over 2^30, int8 K over 131071, or there are over 2^31 tiles; split the product";
    case GemmStatus::kBadSequence:
      return "with lengths, the number of rows must be a multiple of a positive sequence length";
    case GemmStatus::kBadScale:
      return "a scale is not positive and finite, or epsilon is negative or not finite";
    case GemmStatus::kBadChoice:
      return "unknown element type, activation or tile, or a device without multiprocessors";
    case GemmStatus::kNoBfloat16:
      return "bf16 needs sm_80 or newer; use fp16";
    case GemmStatus::kLaunchFailed:
      return "the launch failed; cudaGetLastError says why";
  }
  return "unknown status";
}

TileChoice choose_gemm_tile(int num_rows, int num_cols, int num_multiprocessors) {
  if (count_tiles<LargeTile>(num_rows, num_cols) >= num_multiprocessors) return TileChoice::kLarge;
  if (count_tiles<MediumTile>(num_rows, num_cols) >= num_multiprocessors) return TileChoice::kMedium;
  return TileChoice::kSmall;
}

namespace {

GemmStatus check(const GemmParams& params) {
  const GemmStatus status =
      first_failure({check_epilogue(params.epilogue), check_width(params.depth), check_type(params.type, params.device),
                     check_device(params.device), check_tile(params.tile)});
  if (status != GemmStatus::kOk || params.epilogue.rows.num_rows == 0) return status;
  return first_failure({check_pointer(params.a), check_pointer(params.b), check_pointer(params.epilogue.c)});
}

template <typename T>
int launch(const GemmParams& params, Stream stream) {
  return launch_with_tile(params.tile, params.epilogue, params.device, [&](auto tile, dim3 grid) {
    using Tile = decltype(tile);
    return TRTFORGE_LAUNCH((gemm_kernel<T, Tile>), grid, dim3(Tile::kThreads), sizeof(GemmShared<Tile>), stream,
                           params);
  });
}

}  // namespace

int launch_gemm(const GemmParams& params, Stream stream) {
  const GemmStatus status = check(params);
  if (status != GemmStatus::kOk || params.epilogue.rows.num_rows == 0) return static_cast<int>(status);
  return params.type == ElementType::kHalf ? launch<half>(params, stream) : launch<bf16>(params, stream);
}

}  // namespace trtforge
