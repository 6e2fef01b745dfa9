// trtforge::AttentionFFN_*, version 1, as tables: op types, inputs and attributes. They drive the parsing and
// serialising of the TensorRT adapter. trtforge/ops/attention_ffn.py has the same tables; a test compares them.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/block_params.h"

namespace trtforge {

constexpr char kOpDomain[] = "trtforge";
constexpr char kOpVersion[] = "1";

// What is part of the op type.
struct BlockVariant {
  NormOrder order;
  Activation activation;
  bool is_causal;
  bool is_int8;
  bool has_lengths;
};

inline std::string op_type_from_variant(const BlockVariant& variant) {
  const char* activations[] = {"", "_gelu", "_gelu_tanh", "_relu", "_silu"};  // by Activation
  std::string name = "AttentionFFN";
  name += variant.order == NormOrder::kPre ? "_pre" : "_post";
  name += activations[static_cast<int>(variant.activation)];
  if (variant.is_causal) name += "_causal";
  if (variant.is_int8) name += "_int8";
  if (variant.has_lengths) name += "_lengths";
  return name;
}

inline std::vector<BlockVariant> all_block_variants() {
  constexpr Activation kActivations[] = {Activation::kGelu, Activation::kGeluTanh, Activation::kRelu,
                                         Activation::kSilu};
  std::vector<BlockVariant> variants;
  for (const NormOrder order : {NormOrder::kPre, NormOrder::kPost}) {
    for (const Activation activation : kActivations) {
      for (int flags = 0; flags < 8; ++flags) {
        variants.push_back({order, activation, (flags & 4) != 0, (flags & 2) != 0, (flags & 1) != 0});
      }
    }
  }
  return variants;
}

// Of which variants an input or attribute is a part.
enum class Condition { kAlways, kInt8, kLengths };

inline bool meets(const BlockVariant& variant, Condition condition) {
  if (condition == Condition::kInt8) return variant.is_int8;
  return condition == Condition::kAlways || variant.has_lengths;
}

// The type of an input: T (half or bf16), T or int8, float, int32.
enum class InputKind { kValue, kWeight, kScale, kLengths };

// The inputs by name: their place in a node depends on the variant.
enum class BlockInput {
  kX,
  kAttentionBias,
  kQkvWeight,
  kQkvBias,
  kOutWeight,
  kOutBias,
  kNorm1Gamma,
  kNorm1Beta,
  kUpWeight,
  kUpBias,
  kDownWeight,
  kDownBias,
  kNorm2Gamma,
  kNorm2Beta,
  kQkvScale,
  kOutScale,
  kUpScale,
  kDownScale,
  kLengths,
};

struct InputField {
  BlockInput input;
  const char* name;
  InputKind kind;
  int rank;
  Condition condition;
};

constexpr InputField kInputFields[] = {
    {BlockInput::kX, "x", InputKind::kValue, 3, Condition::kAlways},
    {BlockInput::kAttentionBias, "attention_bias", InputKind::kValue, 4, Condition::kAlways},
    {BlockInput::kQkvWeight, "w_qkv", InputKind::kWeight, 2, Condition::kAlways},
    {BlockInput::kQkvBias, "b_qkv", InputKind::kValue, 1, Condition::kAlways},
    {BlockInput::kOutWeight, "w_out", InputKind::kWeight, 2, Condition::kAlways},
    {BlockInput::kOutBias, "b_out", InputKind::kValue, 1, Condition::kAlways},
    {BlockInput::kNorm1Gamma, "ln1_gamma", InputKind::kValue, 1, Condition::kAlways},
    {BlockInput::kNorm1Beta, "ln1_beta", InputKind::kValue, 1, Condition::kAlways},
    {BlockInput::kUpWeight, "w_up", InputKind::kWeight, 2, Condition::kAlways},
    {BlockInput::kUpBias, "b_up", InputKind::kValue, 1, Condition::kAlways},
    {BlockInput::kDownWeight, "w_down", InputKind::kWeight, 2, Condition::kAlways},
    {BlockInput::kDownBias, "b_down", InputKind::kValue, 1, Condition::kAlways},
    {BlockInput::kNorm2Gamma, "ln2_gamma", InputKind::kValue, 1, Condition::kAlways},
    {BlockInput::kNorm2Beta, "ln2_beta", InputKind::kValue, 1, Condition::kAlways},
    {BlockInput::kQkvScale, "w_qkv_scale", InputKind::kScale, 1, Condition::kInt8},
    {BlockInput::kOutScale, "w_out_scale", InputKind::kScale, 1, Condition::kInt8},
    {BlockInput::kUpScale, "w_up_scale", InputKind::kScale, 1, Condition::kInt8},
    {BlockInput::kDownScale, "w_down_scale", InputKind::kScale, 1, Condition::kInt8},
    {BlockInput::kLengths, "lengths", InputKind::kLengths, 1, Condition::kLengths},
};

inline std::vector<InputField> inputs_of(const BlockVariant& variant) {
  std::vector<InputField> fields;
  for (const InputField& field : kInputFields) {
    if (meets(variant, field.condition)) fields.push_back(field);
  }
  return fields;
}

// The attributes of a node. All that its variant has are required.
struct BlockAttributes {
  int32_t num_heads;
  float softmax_scale;
  float epsilon;
  float qkv_input_scale;
  float out_input_scale;
  float up_input_scale;
  float down_input_scale;
};

// One attribute: where it is kept (one of the two members is set), and what is said of a value that is refused.
struct AttributeField {
  const char* name;
  int32_t BlockAttributes::* integer;
  float BlockAttributes::* real;
  Condition condition;
  bool (*is_allowed)(double value);
  const char* allowed;
};

inline bool is_positive(double value) { return std::isfinite(value) && value > 0; }
inline bool is_not_negative(double value) { return std::isfinite(value) && value >= 0; }
inline bool is_finite(double value) { return std::isfinite(value); }

constexpr AttributeField kAttributeFields[] = {
    {"num_heads", &BlockAttributes::num_heads, nullptr, Condition::kAlways, is_positive, "positive"},
    {"softmax_scale", nullptr, &BlockAttributes::softmax_scale, Condition::kAlways, is_finite, "finite"},
    {"epsilon", nullptr, &BlockAttributes::epsilon, Condition::kAlways, is_not_negative, "finite and not negative"},
    {"qkv_input_scale", nullptr, &BlockAttributes::qkv_input_scale, Condition::kInt8, is_positive, "positive"},
    {"out_input_scale", nullptr, &BlockAttributes::out_input_scale, Condition::kInt8, is_positive, "positive"},
    {"up_input_scale", nullptr, &BlockAttributes::up_input_scale, Condition::kInt8, is_positive, "positive"},
    {"down_input_scale", nullptr, &BlockAttributes::down_input_scale, Condition::kInt8, is_positive, "positive"},
};

inline std::vector<AttributeField> attributes_of(const BlockVariant& variant) {
  std::vector<AttributeField> fields;
  for (const AttributeField& field : kAttributeFields) {
    if (meets(variant, field.condition)) fields.push_back(field);
  }
  return fields;
}

}  // namespace trtforge
