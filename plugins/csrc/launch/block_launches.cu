#include "attention.h"
#include "block_launches.h"
#include "block_status.h"
#include "gemm.h"

namespace trtforge {
namespace {

int launch_phase(const BlockPlan& plan, const BlockPhase& phase, Stream stream) {
  switch (phase.kind) {
    case PhaseKind::kNorm:
      return status_from_gemm(launch_layernorm(plan.norms[phase.index], stream));
    case PhaseKind::kQuantize:
      return status_from_gemm(launch_quantize(plan.quantize, stream));
    case PhaseKind::kAttention:
      return status_from_attention(launch_attention(plan.attention, stream));
    case PhaseKind::kProduct:
      break;
  }
  return status_from_gemm(plan.is_int8 ? launch_gemm_s8(plan.products_s8[phase.index], stream)
                                       : launch_gemm(plan.products[phase.index], stream));
}

}  // namespace

int launch_block_phases(const BlockPlan& plan, Stream stream) {
  int status = 0;
  for (int i = 0; status == 0 && i < plan.num_phases; ++i) status = launch_phase(plan, plan.phases[i], stream);
  return status;
}

}  // namespace trtforge
