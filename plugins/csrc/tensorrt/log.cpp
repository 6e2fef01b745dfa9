#include "log.h"

#include <atomic>
#include <cstdio>

namespace trtforge {
namespace {

std::atomic<nvinfer1::ILoggerFinder*> logger_finder{nullptr};

}  // namespace

void set_logger_finder(nvinfer1::ILoggerFinder* finder) { logger_finder = finder; }

void log_error(const std::string& message) noexcept {
  const std::string text = "trtforge plugin: " + message;
  nvinfer1::ILoggerFinder* finder = logger_finder;
  nvinfer1::ILogger* logger = finder == nullptr ? nullptr : finder->findLogger();
  if (logger != nullptr) {
    logger->log(nvinfer1::ILogger::Severity::kERROR, text.c_str());
  } else {
    std::fprintf(stderr, "%s\n", text.c_str());
  }
}

}  // namespace trtforge
