// What the runner reads and writes: a line of key=value for a case, and a raw array per operand in a folder.
#pragma once

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#include <string>
#include <vector>

[[noreturn]] inline void fail(const std::string& message) {
  std::fprintf(stderr, "runner: %s\n", message.c_str());
  std::exit(2);
}

// Memory of exactly num_bytes, so that AddressSanitizer sees the first byte past it. malloc aligns to 16 bytes.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::size_t num_bytes)
      : bytes_(static_cast<unsigned char*>(std::malloc(num_bytes))), size_(num_bytes) {
    std::memset(bytes_, 0xff, num_bytes);  // NaN: an element that no kernel writes shows
  }
  Buffer(Buffer&& other) noexcept : bytes_(other.bytes_), size_(other.size_) { other.bytes_ = nullptr; }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(bytes_); }

  // Null where the case has no such operand.
  template <typename T = void>
  T* as() const {
    return reinterpret_cast<T*>(bytes_);
  }
  std::size_t size() const { return size_; }

 private:
  unsigned char* bytes_ = nullptr;
  std::size_t size_ = 0;
};

class Case {
 public:
  Case(std::string folder, const std::string& line) : folder_(std::move(folder)) {
    std::istringstream words(line);
    for (std::string word; words >> word;) {
      const std::size_t equals = word.find('=');
      if (equals == std::string::npos) fail("not key=value: " + word);
      values_[word.substr(0, equals)] = word.substr(equals + 1);
    }
  }

  bool has(const std::string& key) const { return values_.count(key) != 0; }
  const std::string& text(const std::string& key) const {
    const auto found = values_.find(key);
    if (found == values_.end()) fail("no " + key + " in the case");
    return found->second;
  }
  int number(const std::string& key) const { return std::atoi(text(key).c_str()); }
  float real(const std::string& key) const { return std::strtof(text(key).c_str(), nullptr); }

  // The operand of that name; empty where its file is absent.
  Buffer read(const std::string& operand) const {
    std::ifstream file(path(operand), std::ios::binary);
    if (!file) return Buffer();
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    Buffer buffer(bytes.size());
    if (!bytes.empty()) std::memcpy(buffer.as(), bytes.data(), bytes.size());
    return buffer;
  }

  void write(const std::string& operand, const Buffer& buffer) const {
    std::ofstream file(path(operand), std::ios::binary);
    file.write(buffer.as<char>(), static_cast<std::streamsize>(buffer.size()));
    if (!file) fail("cannot write " + path(operand));
  }

  // The pointer as the case wants it handed over: its own, null, or moved off its alignment.
  template <typename T>
  T* hand_over(const std::string& operand, T* pointer) const {
    if (has("null") && text("null") == operand) return nullptr;
    if (has("misaligned") && text("misaligned") == operand) {
      return reinterpret_cast<T*>(reinterpret_cast<std::size_t>(pointer) + 2);
    }
    return pointer;
  }

 private:
  std::string path(const std::string& operand) const { return folder_ + "/" + text("id") + "." + operand; }

  std::string folder_;
  std::map<std::string, std::string> values_;
};
