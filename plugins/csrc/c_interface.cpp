// The block launcher behind a C interface, for callers that load the library at run time, Python's ctypes among them.
// Nothing here but the export.
#include "launch/block.h"

#define TRTFORGE_EXPORT extern "C" __attribute__((visibility("default")))

// Changes with the layout of BlockParams, so that a caller that was written for another can tell.
TRTFORGE_EXPORT size_t trtforge_block_params_bytes() { return sizeof(trtforge::BlockParams); }

TRTFORGE_EXPORT size_t trtforge_block_workspace_bytes(const trtforge::BlockParams* params) {
  return trtforge::block_workspace_bytes(*params);
}

TRTFORGE_EXPORT int trtforge_launch_block(const trtforge::BlockParams* params, trtforge::Stream stream) {
  return trtforge::launch_block(*params, stream);
}

TRTFORGE_EXPORT const char* trtforge_block_status_text(int status) { return trtforge::block_status_text(status); }
