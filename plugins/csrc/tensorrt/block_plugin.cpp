#include "block_plugin.h"

#include <cuda_runtime_api.h>

#include <new>

#include "../launch/block.h"
#include "attributes.h"
#include "log.h"
#include "operands.h"

namespace trtforge {
namespace {

using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginCapabilityType;
using nvinfer1::PluginTensorDesc;

constexpr int32_t kFailed = -1;

// The tensors at the largest sizes of the profile, for which memory is set aside.
std::vector<PluginTensorDesc> at_largest_sizes(const DynamicPluginTensorDesc* tensors, int32_t num_tensors) {
  std::vector<PluginTensorDesc> descs;
  for (int32_t i = 0; i < num_tensors; ++i) {
    descs.push_back(tensors[i].desc);
    descs.back().dims = tensors[i].max;
  }
  return descs;
}

// False, and a message, where there is no device.
bool read_device(DeviceTraits& traits) {
  int device = 0, major = 0, minor = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&traits.num_multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) {
    log_error(std::string("the CUDA device cannot be read: ") + cudaGetErrorString(error));
    return false;
  }
  traits.compute_capability = 10 * major + minor;
  return true;
}

}  // namespace

BlockPlugin::BlockPlugin(const BlockVariant& variant, const BlockAttributes& attributes)
    : variant_(variant), attributes_(attributes), name_(op_type_from_variant(variant)) {
  // TensorRT adds name, shapes and types. Of the attributes only the head size changes what a tactic takes.
  timing_cache_id_ = name_ + "/" + kOpVersion + "/heads=" + std::to_string(attributes.num_heads) +
                     "/source=" TRTFORGE_SOURCE_FINGERPRINT;
  fields_ = fields_from_attributes(variant_, attributes_);
  field_collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
}

nvinfer1::IPluginCapability* BlockPlugin::getCapabilityInterface(PluginCapabilityType type) noexcept {
  switch (type) {
    case PluginCapabilityType::kCORE:
      return static_cast<nvinfer1::IPluginV3OneCore*>(this);
    case PluginCapabilityType::kBUILD:
      return static_cast<nvinfer1::IPluginV3OneBuild*>(this);
    case PluginCapabilityType::kRUNTIME:
      return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
  }
  return nullptr;
}

nvinfer1::IPluginV3* BlockPlugin::clone() noexcept {
  BlockPlugin* copy = new (std::nothrow) BlockPlugin(variant_, attributes_);
  if (copy != nullptr) {
    copy->strategy_ = strategy_;
    copy->device_ = device_;
  }
  return copy;
}

const char* BlockPlugin::getPluginName() const noexcept { return name_.c_str(); }
const char* BlockPlugin::getPluginVersion() const noexcept { return kOpVersion; }
const char* BlockPlugin::getPluginNamespace() const noexcept { return kOpDomain; }

bool BlockPlugin::describe(const std::vector<PluginTensorDesc>& inputs, BlockParams& params) const {
  std::string problem = describe_block(variant_, attributes_, inputs, params);
  params.strategy = strategy_;
  params.device = device_;
  if (problem.empty()) {
    const int status = check_block(params);
    if (status == static_cast<int>(BlockStatus::kOk)) return true;
    problem = block_status_text(status);
  }
  log_error(name_ + ": " + problem);
  return false;
}

int32_t BlockPlugin::configurePlugin(const DynamicPluginTensorDesc* in, int32_t num_inputs,
                                     const DynamicPluginTensorDesc*, int32_t num_outputs) noexcept {
  BlockParams params;
  return num_outputs == 1 && describe(at_largest_sizes(in, num_inputs), params) ? 0 : kFailed;
}

int32_t BlockPlugin::getOutputDataTypes(nvinfer1::DataType* output_types, int32_t num_outputs,
                                        const nvinfer1::DataType* input_types, int32_t num_inputs) const noexcept {
  if (num_outputs != 1 || num_inputs < 1) return kFailed;
  output_types[0] = input_types[0];
  return 0;
}

int32_t BlockPlugin::getOutputShapes(const nvinfer1::DimsExprs* inputs, int32_t num_inputs, const nvinfer1::DimsExprs*,
                                     int32_t, nvinfer1::DimsExprs* outputs, int32_t num_outputs,
                                     nvinfer1::IExprBuilder&) noexcept {
  if (num_outputs != 1 || num_inputs < 1) return kFailed;
  outputs[0] = inputs[0];
  return 0;
}

bool BlockPlugin::supportsFormatCombination(int32_t position, const DynamicPluginTensorDesc* in_out, int32_t num_inputs,
                                            int32_t num_outputs) noexcept {
  if (num_inputs != static_cast<int32_t>(inputs_of(variant_).size()) || num_outputs != 1) return false;
  std::vector<PluginTensorDesc> tensors;
  for (int32_t i = 0; i <= position; ++i) tensors.push_back(in_out[i].desc);
  return is_supported_format(variant_, tensors, position);
}

int32_t BlockPlugin::getNbOutputs() const noexcept { return 1; }

size_t BlockPlugin::getWorkspaceSize(const DynamicPluginTensorDesc* inputs, int32_t num_inputs,
                                     const DynamicPluginTensorDesc*, int32_t) const noexcept {
  BlockParams params;
  return describe(at_largest_sizes(inputs, num_inputs), params) ? block_workspace_bytes(params) : 0;
}

int32_t BlockPlugin::getNbTactics() noexcept {
  return static_cast<int32_t>(sizeof(kBlockStrategies) / sizeof(kBlockStrategies[0]));
}

int32_t BlockPlugin::getValidTactics(int32_t* tactics, int32_t num_tactics) noexcept {
  if (num_tactics != getNbTactics()) return kFailed;
  for (int32_t i = 0; i < num_tactics; ++i) tactics[i] = static_cast<int32_t>(kBlockStrategies[i]);
  return 0;
}

const char* BlockPlugin::getTimingCacheID() noexcept { return timing_cache_id_.c_str(); }

int32_t BlockPlugin::setTactic(int32_t tactic) noexcept {
  bool is_known = tactic == static_cast<int32_t>(BlockStrategy::kAuto);  // where TensorRT timed none
  for (const BlockStrategy strategy : kBlockStrategies) is_known = is_known || tactic == static_cast<int32_t>(strategy);
  if (!is_known) {
    log_error(name_ + ": tactic " + std::to_string(tactic) + " is not one of this library; build the engine again");
    return kFailed;
  }
  strategy_ = static_cast<BlockStrategy>(tactic);
  return 0;
}

int32_t BlockPlugin::onShapeChange(const PluginTensorDesc* in, int32_t num_inputs, const PluginTensorDesc*,
                                   int32_t num_outputs) noexcept {
  BlockParams params;
  return num_outputs == 1 && describe({in, in + num_inputs}, params) ? 0 : kFailed;
}

int32_t BlockPlugin::enqueue(const PluginTensorDesc* input_desc, const PluginTensorDesc*, const void* const* inputs,
                             void* const* outputs, void* workspace, cudaStream_t stream) noexcept {
  BlockParams params;
  if (!describe({input_desc, input_desc + inputs_of(variant_).size()}, params)) return kFailed;
  set_pointers(variant_, inputs, params);
  params.y = outputs[0];
  params.workspace = workspace;
  params.workspace_bytes = block_workspace_bytes(params);  // TensorRT gives what getWorkspaceSize said, or more
  const int status = launch_block(params, stream);
  if (status == static_cast<int>(BlockStatus::kOk)) return 0;
  const std::string device = "sm_" + std::to_string(params.device.compute_capability);
  log_error(name_ + " on " + device + ": " + block_status_text(status) + " (" +
            cudaGetErrorString(cudaPeekAtLastError()) + ")");
  return kFailed;
}

nvinfer1::IPluginV3* BlockPlugin::attachToContext(nvinfer1::IPluginResourceContext*) noexcept {
  DeviceTraits device{};
  if (!read_device(device)) return nullptr;
  BlockPlugin* attached = static_cast<BlockPlugin*>(clone());
  if (attached != nullptr) attached->device_ = device;
  return attached;
}

const nvinfer1::PluginFieldCollection* BlockPlugin::getFieldsToSerialize() noexcept { return &field_collection_; }

}  // namespace trtforge
