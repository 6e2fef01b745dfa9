// BlockAttributes to and from TensorRT's plugin fields, by the table of fields.h.
#pragma once

#include <NvInferRuntime.h>

#include <string>
#include <vector>

#include "../fields.h"

namespace trtforge {

// The fields that a node of the variant has, without values.
std::vector<nvinfer1::PluginField> describe_attributes(const BlockVariant& variant);

// The same with the values of `attributes`, which has to outlive them.
std::vector<nvinfer1::PluginField> fields_from_attributes(const BlockVariant& variant,
                                                          const BlockAttributes& attributes);

// Reads every attribute of the variant; fields of other names are ignored, as TensorRT adds its own. Returns what is
// wrong with them, or an empty text.
std::string attributes_from_fields(const BlockVariant& variant, const nvinfer1::PluginFieldCollection& fields,
                                   BlockAttributes& attributes);

}  // namespace trtforge
