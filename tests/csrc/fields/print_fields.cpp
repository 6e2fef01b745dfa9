// Prints the tables of fields.h as JSON, for the comparison with the operator in Python.
#include <cstdio>

#include "../../../plugins/csrc/fields.h"

using namespace trtforge;

namespace {

const char* name_of(InputKind kind) {
  switch (kind) {
    case InputKind::kValue:
      return "value";
    case InputKind::kWeight:
      return "weight";
    case InputKind::kScale:
      return "scale";
    case InputKind::kLengths:
      break;
  }
  return "lengths";
}

void print_variant(const BlockVariant& variant) {
  std::printf("{\"op_type\": \"%s\", \"inputs\": [", op_type_from_variant(variant).c_str());
  const char* separator = "";
  for (const InputField& field : inputs_of(variant)) {
    std::printf("%s{\"name\": \"%s\", \"kind\": \"%s\", \"rank\": %d}", separator, field.name, name_of(field.kind),
                field.rank);
    separator = ", ";
  }
  std::printf("], \"attributes\": [");
  separator = "";
  for (const AttributeField& field : attributes_of(variant)) {
    std::printf("%s{\"name\": \"%s\", \"kind\": \"%s\"}", separator, field.name,
                field.integer != nullptr ? "int" : "float");
    separator = ", ";
  }
  std::printf("]}");
}

}  // namespace

int main() {
  std::printf("{\"domain\": \"%s\", \"version\": \"%s\", \"int8_k_multiple\": %d, \"variants\": [", kOpDomain,
              kOpVersion, kInt8RowAlignment);
  const char* separator = "";
  for (const BlockVariant& variant : all_block_variants()) {
    std::printf("%s", separator);
    print_variant(variant);
    separator = ",\n";
  }
  std::printf("]}\n");
  return 0;
}
