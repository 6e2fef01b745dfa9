// Runs whole blocks through launch_block on the emulator.
//
//   block_runner FOLDER < CASES     a case a line: id=0 type=half batch=2 sequence=7 ...
//
// Operands are FOLDER/<id>.<name>, named as the inputs of trtforge::AttentionFFN_*; y is written beside them. For each
// case one line is printed: id, status, bytes of workspace, the strategy that is chosen (0 where the block is refused),
// text. Every buffer has exactly its size.
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <string>

#include "../gemm/case_files.h"
#include "emulation/machine.h"
#include "launch/block.h"

using namespace trtforge;

namespace {

// The operands of one product, which live as long as this.
struct Linear {
  Linear(const Case& c, const std::string& role)
      : weight(c.read("w_" + role)), bias(c.read("b_" + role)), scales(c.read("w_" + role + "_scale")) {
    operands.weight = c.hand_over("w_" + role, weight.as());
    operands.bias = c.hand_over("b_" + role, bias.as());
    operands.scales = scales.as<float>();
    operands.input_scale = c.has(role + "_input_scale") ? c.real(role + "_input_scale") : 0.0f;
  }

  Buffer weight, bias, scales;
  BlockLinear operands{};
};

struct Norm {
  Norm(const Case& c, const std::string& name) : gamma(c.read(name + "_gamma")), beta(c.read(name + "_beta")) {
    operands.gamma = c.hand_over(name + "_gamma", gamma.as());
    operands.beta = c.hand_over(name + "_beta", beta.as());
  }

  Buffer gamma, beta;
  BlockNorm operands{};
};

BlockParams sizes_of(const Case& c) {
  BlockParams params{};
  params.batch = c.number("batch");
  params.sequence = c.number("sequence");
  params.width = c.number("width");
  params.inner_width = c.number("inner");
  params.num_heads = c.number("num_heads");
  params.softmax_scale = c.real("softmax_scale");
  params.epsilon = c.real("epsilon");
  params.activation = static_cast<Activation>(c.number("activation"));
  params.order = c.text("order") == "pre" ? NormOrder::kPre : NormOrder::kPost;
  params.type = c.text("type") == "bf16" ? ElementType::kBfloat16 : ElementType::kHalf;
  params.is_causal = c.has("causal");
  params.is_int8 = c.has("int8");
  params.strategy = static_cast<BlockStrategy>(c.number("strategy"));
  params.device = {c.has("sm") ? c.number("sm") : 86, c.has("multiprocessors") ? c.number("multiprocessors") : 4};
  for (int i = 0; i < 4; ++i) params.attention_bias_dims[i] = c.number("bias" + std::to_string(i));
  return params;
}

void run_case(const Case& c) {
  emulation::options().seed = c.has("seed") ? static_cast<unsigned>(c.number("seed")) : 0;
  emulation::options().resident_blocks = c.has("resident") ? c.number("resident") : 2;
  BlockParams params = sizes_of(c);
  const Buffer x = c.read("x"), bias = c.read("attention_bias"), lengths = c.read("lengths");
  const Linear qkv(c, "qkv"), out(c, "out"), up(c, "up"), down(c, "down");
  const Norm norm1(c, "ln1"), norm2(c, "ln2");
  const Buffer y(x.size());
  const size_t needed = block_workspace_bytes(params);
  const size_t missing = c.has("missing_workspace") ? static_cast<size_t>(c.number("missing_workspace")) : 0;
  const Buffer workspace(needed - missing);
  params.x = c.hand_over("x", x.as());
  params.attention_bias = c.hand_over("attention_bias", bias.as());
  params.lengths = lengths.as<int32_t>();
  params.y = c.has("aliased") ? x.as() : c.hand_over("y", y.as());
  params.workspace = c.hand_over("workspace", workspace.as());
  params.workspace_bytes = workspace.size();
  params.qkv = qkv.operands;
  params.out = out.operands;
  params.up = up.operands;
  params.down = down.operands;
  params.norm1 = norm1.operands;
  params.norm2 = norm2.operands;
  const int status = launch_block(params, nullptr);
  c.write("y", y);
  std::printf("%s %d %zu %d %s\n", c.text("id").c_str(), status, needed,
              check_block(params) == 0 ? static_cast<int>(choose_block_strategy(params)) : 0,
              block_status_text(status));
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) fail("usage: block_runner FOLDER < CASES");
  for (std::string line; std::getline(std::cin, line);) run_case(Case(argv[1], line));
  return 0;
}
