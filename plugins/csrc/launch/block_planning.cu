#include <cstdint>

#include "block_planning.h"
#include "block_workspace.h"

namespace trtforge {
namespace {

// Adds the phases of one block in order. A tensor that feeds a product is T, or int8 codes where the block is int8.
class BlockPlanner {
 public:
  explicit BlockPlanner(const BlockParams& params) : params_(params) {
    const BlockWorkspace layout(params);
    char* workspace = static_cast<char*>(params.workspace);
    wide_ = workspace;
    narrow_ = workspace + layout.narrow_offset;
    codes_ = reinterpret_cast<int8_t*>(workspace + layout.codes_offset);
    rows_ = {params.batch * params.sequence, params.sequence, params.lengths};
    plan_.is_int8 = params.is_int8;
    plan_.barrier = reinterpret_cast<GridBarrier*>(workspace + layout.barrier_offset);
  }

  BlockPlan plan() {
    if (params_.order == NormOrder::kPre) {
      plan_pre_norm();
    } else {
      plan_post_norm();
    }
    return plan_;
  }

 private:
  void plan_pre_norm() {
    add_norm_for(params_.qkv, params_.x, params_.norm1, nullptr);
    add_projection(params_.qkv, product_input(), 3 * params_.width, nullptr, wide_);
    add_attention();
    add_projection(params_.out, product_input(), params_.width, params_.x, params_.y);
    add_norm_for(params_.up, params_.y, params_.norm2, nullptr);
    add_expansion();
    add_contraction(params_.y);
  }

  void plan_post_norm() {
    if (params_.is_int8) add_quantize(params_.x, params_.qkv.input_scale);
    add_projection(params_.qkv, params_.is_int8 ? codes_ : params_.x, 3 * params_.width, nullptr, wide_);
    add_attention();
    add_projection(params_.out, product_input(), params_.width, params_.x, params_.y);
    add_norm_for(params_.up, params_.y, params_.norm1, narrow_);
    add_expansion();
    add_contraction(narrow_);
    add_norm(params_.y, params_.norm2, params_.y, nullptr, 0.0f);
  }

  // What the next product reads, other than x.
  const void* product_input() const { return params_.is_int8 ? static_cast<const void*>(codes_) : narrow_; }

  void add(PhaseKind kind, int index) { plan_.phases[plan_.num_phases++] = {kind, index}; }

  // norm(x) as the input of `next`, and as T in `kept` where something else reads it too.
  void add_norm_for(const BlockLinear& next, const void* x, const BlockNorm& norm, void* kept) {
    if (params_.is_int8) return add_norm(x, norm, kept, codes_, next.input_scale);
    add_norm(x, norm, narrow_, nullptr, 0.0f);
  }

  void add_norm(const void* x, const BlockNorm& norm, void* y, int8_t* y_int8, float y_scale) {
    LayerNormParams& phase = plan_.norms[num_norms_];
    phase.x = x;
    phase.gamma = norm.gamma;
    phase.beta = norm.beta;
    phase.y = y;
    phase.y_int8 = y_int8;
    phase.y_scale = y_scale;
    phase.epsilon = params_.epsilon;
    phase.rows = rows_;
    phase.width = params_.width;
    phase.type = params_.type;
    phase.device = params_.device;
    add(PhaseKind::kNorm, num_norms_++);
  }

  // x: [B, S, H] T -> codes
  void add_quantize(const void* x, float scale) {
    plan_.quantize = {x, codes_, scale, rows_, params_.width, params_.type, params_.device};
    add(PhaseKind::kQuantize, 0);
  }

  // qkv in `wide` -> the input of the output projection
  void add_attention() {
    const int64_t width = params_.width;
    const int64_t element_bytes = 2;
    const char* qkv = static_cast<const char*>(wide_);
    AttentionParams& phase = plan_.attention;
    phase.q = qkv;
    phase.k = qkv + width * element_bytes;
    phase.v = qkv + 2 * width * element_bytes;
    phase.bias = params_.attention_bias;
    phase.lengths = params_.lengths;
    phase.output = params_.is_int8 ? nullptr : narrow_;
    phase.output_int8 = params_.is_int8 ? codes_ : nullptr;
    phase.output_scale = params_.out.input_scale;
    phase.batch = params_.batch;
    phase.sequence = params_.sequence;
    phase.num_heads = params_.num_heads;
    phase.head_size = params_.width / params_.num_heads;
    phase.row_stride = 3 * width;
    phase.batch_stride = 3 * width * params_.sequence;
    phase.head_stride = phase.head_size;
    set_bias_strides(phase);
    phase.softmax_scale = params_.softmax_scale;
    phase.type = params_.type;
    phase.is_causal = params_.is_causal;
    phase.device = params_.device;
    add(PhaseKind::kAttention, 0);
  }

  // 0 along the dims that are broadcast.
  void set_bias_strides(AttentionParams& phase) const {
    const int* dims = params_.attention_bias_dims;
    const int64_t keys = dims[3];
    const int64_t scores = dims[2] * keys;
    phase.bias_batch_stride = dims[0] == 1 ? 0 : dims[1] * scores;
    phase.bias_head_stride = dims[1] == 1 ? 0 : scores;
    phase.bias_row_stride = dims[2] == 1 ? 0 : keys;
    phase.bias_key_stride = dims[3] == 1 ? 0 : 1;
  }

  // c: [B, S, num_cols] T = input x weight + bias + residual; input: [B, S, H], int8 where the block is
  void add_projection(const BlockLinear& linear, const void* input, int num_cols, const void* residual, void* c) {
    add_product(linear, input, params_.width, {c, linear.bias, residual, rows_, num_cols, Activation::kNone}, nullptr);
  }

  // the input of the FFN -> the activated inner in `wide`
  void add_expansion() {
    const EpilogueParams epilogue{wide_, params_.up.bias, nullptr, rows_, params_.inner_width, params_.activation};
    add_product(params_.up, product_input(), params_.width, epilogue, static_cast<int8_t*>(wide_));
  }

  // `wide` [B, S, F] -> y, with a residual [B, S, H] T that may be y
  void add_contraction(const void* residual) {
    const EpilogueParams epilogue{params_.y, params_.down.bias, residual, rows_, params_.width, Activation::kNone};
    add_product(params_.down, wide_, params_.inner_width, epilogue, nullptr);
  }

  // c_int8: where an int8 block writes the result, as the input of the FFN's second product; null: T in epilogue.c.
  void add_product(const BlockLinear& linear, const void* a, int depth, const EpilogueParams& epilogue,
                   int8_t* c_int8) {
    plan_.products[num_products_] = {
        a, linear.weight, depth, epilogue, params_.type, TileChoice::kAuto, params_.device};
    GemmS8Params& in_int8 = plan_.products_s8[num_products_];
    in_int8.a = static_cast<const int8_t*>(a);
    in_int8.b = static_cast<const int8_t*>(linear.weight);
    in_int8.b_scales = linear.scales;
    in_int8.a_scale = linear.input_scale;
    in_int8.depth = depth;
    in_int8.epilogue = epilogue;
    in_int8.c_int8 = c_int8;
    in_int8.c_scale = params_.down.input_scale;
    in_int8.type = params_.type;
    in_int8.tile = TileChoice::kAuto;
    in_int8.device = params_.device;
    add(PhaseKind::kProduct, num_products_++);
  }

  const BlockParams& params_;
  BlockPlan plan_{};
  int num_norms_ = 0;
  int num_products_ = 0;
  RowSet rows_;
  void* wide_;
  void* narrow_;
  int8_t* codes_;
};

}  // namespace

BlockPlan plan_block(const BlockParams& params) { return BlockPlanner(params).plan(); }

}  // namespace trtforge
