// trtforge::AttentionFFN_* as an IPluginV3: what TensorRT asks for, passed on to the launcher. One class for all
// variants; what a variant has is in fields.h.
#pragma once

#include <NvInferRuntime.h>

#include <string>
#include <vector>

#include "../fields.h"

namespace trtforge {

class BlockPlugin final : public nvinfer1::IPluginV3,
                          public nvinfer1::IPluginV3OneCore,
                          public nvinfer1::IPluginV3OneBuild,
                          public nvinfer1::IPluginV3OneRuntime {
 public:
  BlockPlugin(const BlockVariant& variant, const BlockAttributes& attributes);

  // IPluginV3
  nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override;
  nvinfer1::IPluginV3* clone() noexcept override;

  // IPluginV3OneCore
  const char* getPluginName() const noexcept override;
  const char* getPluginVersion() const noexcept override;
  const char* getPluginNamespace() const noexcept override;

  // IPluginV3OneBuild
  int32_t configurePlugin(const nvinfer1::DynamicPluginTensorDesc* in, int32_t num_inputs,
                          const nvinfer1::DynamicPluginTensorDesc* out, int32_t num_outputs) noexcept override;
  int32_t getOutputDataTypes(nvinfer1::DataType* output_types, int32_t num_outputs,
                             const nvinfer1::DataType* input_types, int32_t num_inputs) const noexcept override;
  int32_t getOutputShapes(const nvinfer1::DimsExprs* inputs, int32_t num_inputs,
                          const nvinfer1::DimsExprs* shape_inputs, int32_t num_shape_inputs,
                          nvinfer1::DimsExprs* outputs, int32_t num_outputs,
                          nvinfer1::IExprBuilder& builder) noexcept override;
  bool supportsFormatCombination(int32_t position, const nvinfer1::DynamicPluginTensorDesc* in_out, int32_t num_inputs,
                                 int32_t num_outputs) noexcept override;
  int32_t getNbOutputs() const noexcept override;
  size_t getWorkspaceSize(const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t num_inputs,
                          const nvinfer1::DynamicPluginTensorDesc* outputs,
                          int32_t num_outputs) const noexcept override;
  int32_t getValidTactics(int32_t* tactics, int32_t num_tactics) noexcept override;
  int32_t getNbTactics() noexcept override;
  const char* getTimingCacheID() noexcept override;

  // IPluginV3OneRuntime
  int32_t setTactic(int32_t tactic) noexcept override;
  int32_t onShapeChange(const nvinfer1::PluginTensorDesc* in, int32_t num_inputs, const nvinfer1::PluginTensorDesc* out,
                        int32_t num_outputs) noexcept override;
  int32_t enqueue(const nvinfer1::PluginTensorDesc* input_desc, const nvinfer1::PluginTensorDesc* output_desc,
                  const void* const* inputs, void* const* outputs, void* workspace,
                  cudaStream_t stream) noexcept override;
  nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext* context) noexcept override;
  const nvinfer1::PluginFieldCollection* getFieldsToSerialize() noexcept override;

 private:
  // False, and a message, where the inputs are none of this block's.
  bool describe(const std::vector<nvinfer1::PluginTensorDesc>& inputs, BlockParams& params) const;

  BlockVariant variant_;
  BlockAttributes attributes_;
  BlockStrategy strategy_ = BlockStrategy::kAuto;
  DeviceTraits device_{};  // of the context that the plugin is attached to
  std::string name_;
  std::string timing_cache_id_;
  std::vector<nvinfer1::PluginField> fields_;
  nvinfer1::PluginFieldCollection field_collection_{};
};

}  // namespace trtforge
