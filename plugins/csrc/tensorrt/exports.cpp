// The two functions by which TensorRT's plugin registry knows a plugin library, and the creators: one an op type.
#include <NvInferRuntime.h>

#include <deque>
#include <new>
#include <string>
#include <vector>

#include "../fields.h"
#include "attributes.h"
#include "block_plugin.h"
#include "log.h"

namespace trtforge {
namespace {

class BlockCreator final : public nvinfer1::IPluginCreatorV3One {
 public:
  explicit BlockCreator(const BlockVariant& variant)
      : variant_(variant), name_(op_type_from_variant(variant)), fields_(describe_attributes(variant)) {
    field_collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
  }

  // The same fields in both phases: what a node says is what an engine stores.
  nvinfer1::IPluginV3* createPlugin(const char* node_name, const nvinfer1::PluginFieldCollection* fields,
                                    nvinfer1::TensorRTPhase) noexcept override {
    BlockAttributes attributes;
    const std::string problem =
        fields == nullptr ? "no attributes are given" : attributes_from_fields(variant_, *fields, attributes);
    if (!problem.empty()) {
      log_error(name_ + " '" + (node_name == nullptr ? "" : node_name) + "': " + problem);
      return nullptr;
    }
    return new (std::nothrow) BlockPlugin(variant_, attributes);
  }

  const nvinfer1::PluginFieldCollection* getFieldNames() noexcept override { return &field_collection_; }
  const char* getPluginName() const noexcept override { return name_.c_str(); }
  const char* getPluginVersion() const noexcept override { return kOpVersion; }
  const char* getPluginNamespace() const noexcept override { return kOpDomain; }

 private:
  BlockVariant variant_;
  std::string name_;
  std::vector<nvinfer1::PluginField> fields_;
  nvinfer1::PluginFieldCollection field_collection_{};
};

// They live as long as the library: TensorRT holds them from the load on. A deque never moves what it holds.
std::deque<BlockCreator>& all_creators() {
  static std::deque<BlockCreator> creators = [] {
    std::deque<BlockCreator> made;
    for (const BlockVariant& variant : all_block_variants()) made.emplace_back(variant);
    return made;
  }();
  return creators;
}

}  // namespace
}  // namespace trtforge

#define TRTFORGE_EXPORT extern "C" __attribute__((visibility("default")))

TRTFORGE_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder* finder) { trtforge::set_logger_finder(finder); }

TRTFORGE_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& num_creators) {
  static const std::vector<nvinfer1::IPluginCreatorInterface*> pointers = [] {
    std::vector<nvinfer1::IPluginCreatorInterface*> made;
    for (trtforge::BlockCreator& creator : trtforge::all_creators()) made.push_back(&creator);
    return made;
  }();
  num_creators = static_cast<int32_t>(pointers.size());
  return pointers.data();
}
