// Messages to TensorRT's logger.
#pragma once

#include <NvInferRuntime.h>

#include <string>

namespace trtforge {

// What TensorRT gives a library when it loads it. Without one, errors go to stderr.
void set_logger_finder(nvinfer1::ILoggerFinder* finder);

void log_error(const std::string& message) noexcept;

}  // namespace trtforge
