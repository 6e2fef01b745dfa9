// Shared memory of a block, and the copies that arrive late in it.
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "state.h"

namespace trtforge::emulation {

namespace {

constexpr std::size_t kRowBytes = 16;
constexpr std::size_t kRowWords = kRowBytes / sizeof(std::uint64_t);
constexpr std::size_t kAlignBytes = 128;
constexpr unsigned char kUnwritten = 0xff;  // NaN as fp16, bf16 and fp32; -1 as int8
constexpr std::uint64_t kUnwrittenWord = ~std::uint64_t{0};
// Behind shared memory, where AddressSanitizer does not guard it.
constexpr std::size_t kGuardBytes = kHasAddressSanitizer ? 0 : 64;
constexpr unsigned char kGuard = 0xa5;

// The accesses of a row word by word, volatile: g++ makes a memset or memcpy of 16 bytes one instruction that
// ThreadSanitizer does not see.

void write_row(void* shared, std::uint64_t word) {
  auto* words = static_cast<volatile std::uint64_t*>(shared);
  for (std::size_t i = 0; i < kRowWords; ++i) words[i] = word;
}

void copy_row(void* shared, const void* global) {
  auto* to = static_cast<volatile std::uint64_t*>(shared);
  const auto* from = static_cast<const volatile std::uint64_t*>(global);
  for (std::size_t i = 0; i < kRowWords; ++i) to[i] = from[i];
}

}  // namespace

void allocate_shared(Block& block) {
  const std::size_t num_bytes = machine.shared_bytes + kGuardBytes;
  void* memory = nullptr;
  if (posix_memalign(&memory, kAlignBytes, num_bytes == 0 ? 1 : num_bytes) != 0) std::abort();
  block.shared = static_cast<unsigned char*>(memory);
  std::memset(block.shared, kUnwritten, machine.shared_bytes);
  std::memset(block.shared + machine.shared_bytes, kGuard, kGuardBytes);
}

void free_shared(Block& block) {
  for (std::size_t i = 0; i < kGuardBytes; ++i) {
    if (block.shared[machine.shared_bytes + i] == kGuard) continue;
    fail(machine.where, "block %u,%u,%u wrote behind its %zu bytes of shared memory", block.index.x, block.index.y,
         block.index.z, machine.shared_bytes);
  }
  std::free(block.shared);
}

void* shared_memory(std::size_t num_bytes, Location where) {
  const Unseen unseen;
  if (num_bytes > machine.shared_bytes) {
    fail(where, "the kernel takes %zu bytes of shared memory; the launch gave %zu", num_bytes, machine.shared_bytes);
  }
  return machine.current->warp->block->shared;
}

void check_shared_row(const char* name, const void* address, Location where) {
  const Unseen unseen;
  const auto row = reinterpret_cast<std::uintptr_t>(address);
  const auto begin = reinterpret_cast<std::uintptr_t>(machine.current->warp->block->shared);
  if (row % kRowBytes != 0) fail(where, "%s: shared address %p is not a multiple of 16", name, address);
  if (row < begin || row + kRowBytes > begin + machine.shared_bytes) {
    fail(where, "%s: address is outside the block's shared memory, at byte %lld of %zu", name,
         static_cast<long long>(row - begin), machine.shared_bytes);
  }
}

void issue_copy(void* shared, const void* global, bool is_valid, Location where) {
  check_shared_row("cp_async16", shared, where);
  if (is_valid) {
    if (reinterpret_cast<std::uintptr_t>(global) % kRowBytes != 0) {
      fail(where, "cp_async16: global address %p is not a multiple of 16", global);
    }
    // Read once now: where that is out of bounds, the sanitizer's report names the copy and not the wait.
    const auto* words = static_cast<const volatile std::uint64_t*>(global);
    for (std::size_t i = 0; i < kRowWords; ++i) static_cast<void>(words[i]);
  }
  write_row(shared, kUnwrittenWord);
  const Unseen unseen;
  machine.current->open_group.push_back({shared, is_valid ? global : nullptr, where});
}

void commit_copies() {
  const Unseen unseen;
  Lane& lane = *machine.current;
  lane.groups.push_back(std::move(lane.open_group));
  lane.open_group.clear();
}

void wait_for_copies(int num_newest) {
  auto& groups = machine.current->groups;
  for (;;) {
    std::vector<Copy> group;
    {
      const Unseen unseen;
      if (groups.size() <= static_cast<std::size_t>(num_newest)) return;
      group = std::move(groups.front());
      groups.erase(groups.begin());
    }
    for (const Copy& copy : group) {
      if (copy.global != nullptr) {
        copy_row(copy.shared, copy.global);
      } else {
        write_row(copy.shared, 0);
      }
    }
  }
}

}  // namespace trtforge::emulation
