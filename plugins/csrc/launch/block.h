// Launcher of a whole transformer block.
//
// It checks everything that it is given, launches, and returns a status as int: it never throws, exits or waits.
// Nothing is launched where the block's own checks fail, or where there are no rows (kOk).
#pragma once

#include "../kernels/block_params.h"

struct CUstream_st;

namespace trtforge {

using Stream = CUstream_st*;  // as in device.cuh, which a compiler of plain C++ cannot read

// A launcher below the block that refuses is passed on as its own status plus kFromGemm or kFromAttention.
enum class BlockStatus : int {
  kOk = 0,
  kNullPointer,
  kAliased,
  kBadSize,
  kTooLarge,
  kBadHeads,
  kBadInt8Width,
  kBadBias,
  kBadChoice,
  kMisalignedWorkspace,
  kSmallWorkspace,
  kNotResident,
  kLaunchFailed,
  kFromGemm = 100,
  kFromAttention = 200,
};

// What a status means and what to do about it; never null.
const char* block_status_text(int status);

// A BlockStatus as int: what can be told from sizes and choices alone. Reads no pointer and not the device.
int check_block(const BlockParams& params);

// The strategies that can compute some block on some device, for a caller that measures which is fastest.
constexpr BlockStrategy kBlockStrategies[] = {BlockStrategy::kLaunches, BlockStrategy::kPersistent};

// The strategy for a block of these sizes on this device: a strategy that is asked for, or what kAuto stands for.
//
// kAuto: kPersistent, unless the widest product (columns: 3 H or F, whichever is more; rows: B * S) has as many large
// tiles as the device has multiprocessors. Up to there every product would be launched with a tile that the persistent
// kernel has as well, and a phase is short: what is saved is the gap between launches, and the tail in which a launch
// waits for its last blocks. From there on the large tile, which only a launch of its own has the registers for, brings
// more. At H 768, F 3072 that is B * S up to 512 on 108 multiprocessors. The rule is derived, not measured: a caller
// that can measure asks for each strategy in turn, as TensorRT does.
BlockStrategy choose_block_strategy(const BlockParams& params);

// Bytes of workspace that launch_block needs, the same for every strategy; grows with batch and sequence. 0 for sizes
// that launch_block refuses. Reads no pointer and not the device.
size_t block_workspace_bytes(const BlockParams& params);

int launch_block(const BlockParams& params, Stream stream);

}  // namespace trtforge
