#include "attributes.h"

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>

namespace trtforge {
namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

PluginFieldType type_of(const AttributeField& field) {
  return field.integer != nullptr ? PluginFieldType::kINT32 : PluginFieldType::kFLOAT32;
}

const PluginField* find_field(const nvinfer1::PluginFieldCollection& fields, const char* name) {
  for (int i = 0; i < fields.nbFields; ++i) {
    const char* given = fields.fields[i].name;
    if (given != nullptr && std::strcmp(given, name) == 0) return &fields.fields[i];
  }
  return nullptr;
}

template <typename Value>
double read_as(const PluginField& field) {
  Value value;
  std::memcpy(&value, field.data, sizeof(value));
  return static_cast<double>(value);
}

// A number of whichever width a parser gives it; false where the field is none.
bool read_number(const PluginField& field, bool is_integer, double& number) {
  if (field.data == nullptr || field.length != 1) return false;
  switch (field.type) {
    case PluginFieldType::kINT32:
      number = read_as<int32_t>(field);
      return is_integer;
    case PluginFieldType::kINT64:
      number = read_as<int64_t>(field);
      return is_integer;
    case PluginFieldType::kFLOAT32:
      number = read_as<float>(field);
      return !is_integer;
    case PluginFieldType::kFLOAT64:
      number = read_as<double>(field);
      return !is_integer;
    default:
      return false;
  }
}

}  // namespace

std::vector<PluginField> describe_attributes(const BlockVariant& variant) {
  std::vector<PluginField> fields;
  for (const AttributeField& field : attributes_of(variant)) {
    fields.emplace_back(field.name, nullptr, type_of(field), 1);
  }
  return fields;
}

std::vector<PluginField> fields_from_attributes(const BlockVariant& variant, const BlockAttributes& attributes) {
  std::vector<PluginField> fields = describe_attributes(variant);
  const std::vector<AttributeField> table = attributes_of(variant);
  for (size_t i = 0; i < table.size(); ++i) {
    fields[i].data = table[i].integer != nullptr ? static_cast<const void*>(&(attributes.*table[i].integer))
                                                 : &(attributes.*table[i].real);
  }
  return fields;
}

std::string attributes_from_fields(const BlockVariant& variant, const nvinfer1::PluginFieldCollection& fields,
                                   BlockAttributes& attributes) {
  attributes = {};
  for (const AttributeField& field : attributes_of(variant)) {
    const std::string name = field.name;
    const bool is_integer = field.integer != nullptr;
    const PluginField* given = find_field(fields, field.name);
    if (given == nullptr) return "attribute " + name + " is missing";
    double number = 0;
    if (!read_number(*given, is_integer, number)) {
      return "attribute " + name + " is not one " + (is_integer ? "integer" : "float");
    }
    const double largest = is_integer ? double{INT32_MAX} : double{FLT_MAX};
    if (!field.is_allowed(number) || std::fabs(number) > largest) {
      char limits[96];
      std::snprintf(limits, sizeof(limits), " is %g; it has to be %s, and at most %g", number, field.allowed, largest);
      return "attribute " + name + limits;
    }
    if (is_integer) {
      attributes.*field.integer = static_cast<int32_t>(number);
    } else {
      attributes.*field.real = static_cast<float>(number);
    }
  }
  return "";
}

}  // namespace trtforge
