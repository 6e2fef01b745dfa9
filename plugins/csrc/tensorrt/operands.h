// What TensorRT says of a node's inputs, as the block launcher wants it.
#pragma once

#include <NvInferRuntime.h>

#include <string>
#include <vector>

#include "../fields.h"

namespace trtforge {

// The place of an input in a node of the variant; -1 where the variant has none.
int find_input(const BlockVariant& variant, BlockInput input);

// True where tensor `position` (inputs in order, then y) can have the type and layout that it has, given those before.
bool is_supported_format(const BlockVariant& variant, const std::vector<nvinfer1::PluginTensorDesc>& tensors,
                         int position);

// Sizes, type and choices of a block from its inputs and attributes; pointers and device are left null. Returns what is
// wrong with the inputs, or an empty text.
std::string describe_block(const BlockVariant& variant, const BlockAttributes& attributes,
                           const std::vector<nvinfer1::PluginTensorDesc>& inputs, BlockParams& params);

// Sets the pointers of a block.
void set_pointers(const BlockVariant& variant, void const* const* inputs, BlockParams& params);

}  // namespace trtforge
