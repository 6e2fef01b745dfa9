// The head sizes that attention has kernels for.
#pragma once

#include <type_traits>

namespace trtforge {

inline bool has_attention_kernel(int head_size) {
  return head_size == 32 || head_size == 64 || head_size == 80 || head_size == 96 || head_size == 128;
}

// Calls launch(std::integral_constant<int, head_size>{}), for a head size that has a kernel.
template <typename Launch>
int launch_with_head_size(int head_size, Launch launch) {
  switch (head_size) {
    case 32:
      return launch(std::integral_constant<int, 32>{});
    case 64:
      return launch(std::integral_constant<int, 64>{});
    case 80:
      return launch(std::integral_constant<int, 80>{});
    case 96:
      return launch(std::integral_constant<int, 96>{});
    default:  // has_attention_kernel is false for all others
      return launch(std::integral_constant<int, 128>{});
  }
}

}  // namespace trtforge
