#include "attention.h"
#include "block.h"
#include "block_checks.h"
#include "block_launches.h"
#include "block_persistent.h"
#include "block_planning.h"
#include "block_status.h"
#include "block_workspace.h"
#include "gemm.h"

namespace trtforge {

const char* block_status_text(int status) {
  constexpr int kFromGemm = static_cast<int>(BlockStatus::kFromGemm);
  constexpr int kFromAttention = static_cast<int>(BlockStatus::kFromAttention);
  if (status > kFromAttention) return attention_status_text(status - kFromAttention);
  if (status > kFromGemm) return gemm_status_text(status - kFromGemm);
  switch (static_cast<BlockStatus>(status)) {
    case BlockStatus::kOk:
      return "ok";
    case BlockStatus::kNullPointer:
      return "an operand of the block is null; a model without a bias gives zeros";
    case BlockStatus::kAliased:
      return "y is x, which is still read when y is written; give y memory of its own";
    case BlockStatus::kBadSize:
      return "batch or sequence is negative, or H or F is not a positive multiple of 8";
    case BlockStatus::kTooLarge:
      return "batch * sequence, 3 H or F is over 2^30, or batch * num_heads or a product's tiles over 2^31 - 1; split "
             "the batch";
    case BlockStatus::kBadHeads:
      return "num_heads is not a positive divisor of H";
    case BlockStatus::kBadInt8Width:
      return "H or F of an int8 block is not a multiple of 16; run this block in fp16";
    case BlockStatus::kBadBias:
      return "a dim of attention_bias is neither 1 nor that of [B, N, S, S]";
    case BlockStatus::kBadChoice:
      return "unknown activation, order of norms or strategy";
    case BlockStatus::kMisalignedWorkspace:
      return "the workspace does not start on 16 bytes";
    case BlockStatus::kSmallWorkspace:
      return "the workspace is null or smaller than block_workspace_bytes";
    case BlockStatus::kNotResident:
      return "no block of the persistent kernel fits on a multiprocessor of this device; use BlockStrategy::kLaunches";
    case BlockStatus::kLaunchFailed:
      return "the launch failed; cudaGetLastError says why";
    case BlockStatus::kFromGemm:
    case BlockStatus::kFromAttention:
      break;
  }
  return "unknown status";
}

BlockStrategy choose_block_strategy(const BlockParams& params) {
  if (params.strategy != BlockStrategy::kAuto) return params.strategy;
  const TileChoice tile =
      choose_gemm_tile(params.batch * params.sequence, widest_product(params), params.device.num_multiprocessors);
  return tile == TileChoice::kLarge ? BlockStrategy::kLaunches : BlockStrategy::kPersistent;
}

size_t block_workspace_bytes(const BlockParams& params) {
  if (check_block_sizes(params) != BlockStatus::kOk) return 0;
  return BlockWorkspace(params).num_bytes;
}

int check_block(const BlockParams& params) {
  BlockStatus status = check_block_sizes(params);
  if (status == BlockStatus::kOk) status = check_block_choices(params);
  if (status == BlockStatus::kOk) status = check_block_bias(params);
  if (status != BlockStatus::kOk) return static_cast<int>(status);
  // Attention knows which head sizes and scales it takes. Without rows it launches nothing.
  AttentionParams no_rows{};
  no_rows.num_heads = params.num_heads;
  no_rows.head_size = params.width / params.num_heads;
  no_rows.softmax_scale = params.softmax_scale;
  const int attention_status = status_from_attention(launch_attention(no_rows, nullptr));
  return attention_status != 0 ? attention_status : check_block_numbers(params);
}

int launch_block(const BlockParams& params, Stream stream) {
  int status = check_block(params);
  if (status != 0 || params.batch == 0 || params.sequence == 0) return status;
  status = check_block_memory(params);
  if (status == 0) status = check_block_device(params);
  if (status != 0) return status;
  const BlockPlan plan = plan_block(params);
  return choose_block_strategy(params) == BlockStrategy::kPersistent ? launch_block_persistent(plan, stream)
                                                                     : launch_block_phases(plan, stream);
}

}  // namespace trtforge
