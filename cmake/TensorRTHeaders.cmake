# Sets TRTFORGE_TENSORRT_HEADERS to the folder that holds NvInferRuntime.h, or to nothing.
#
# A folder that was named is the only one that is looked at: another TensorRT's headers make a library that its own
# does not load.
set(TRTFORGE_TENSORRT_INCLUDE_DIR "" CACHE PATH "Folder that holds NvInferRuntime.h")
set(TRTFORGE_TENSORRT_TAG "v11.1" CACHE STRING "Release of github.com/NVIDIA/TensorRT whose headers are fetched")

unset(TRTFORGE_TENSORRT_HEADERS)
if(TRTFORGE_PLUGIN STREQUAL "OFF")
  message(STATUS "TensorRT headers: not asked for")
  return()
endif()

if(TRTFORGE_TENSORRT_INCLUDE_DIR)
  if(NOT EXISTS ${TRTFORGE_TENSORRT_INCLUDE_DIR}/NvInferRuntime.h)
    message(FATAL_ERROR "TRTFORGE_TENSORRT_INCLUDE_DIR=${TRTFORGE_TENSORRT_INCLUDE_DIR} holds no NvInferRuntime.h")
  endif()
  set(TRTFORGE_TENSORRT_HEADERS ${TRTFORGE_TENSORRT_INCLUDE_DIR})
elseif(DEFINED TensorRT_ROOT OR DEFINED ENV{TensorRT_ROOT})
  set(root ${TensorRT_ROOT})
  if(NOT root)
    set(root $ENV{TensorRT_ROOT})
  endif()
  find_path(TRTFORGE_TENSORRT_ROOT_INCLUDE NvInferRuntime.h PATHS ${root}/include ${root} NO_DEFAULT_PATH NO_CACHE)
  if(NOT TRTFORGE_TENSORRT_ROOT_INCLUDE)
    message(FATAL_ERROR "TensorRT_ROOT=${root} holds no include/NvInferRuntime.h")
  endif()
  set(TRTFORGE_TENSORRT_HEADERS ${TRTFORGE_TENSORRT_ROOT_INCLUDE})
else()
  find_path(TRTFORGE_TENSORRT_SYSTEM_INCLUDE NvInferRuntime.h NO_CACHE
    PATH_SUFFIXES ${CMAKE_LIBRARY_ARCHITECTURE} tensorrt)
  if(TRTFORGE_TENSORRT_SYSTEM_INCLUDE)
    set(TRTFORGE_TENSORRT_HEADERS ${TRTFORGE_TENSORRT_SYSTEM_INCLUDE})
  elseif(TRTFORGE_FETCH_TENSORRT_HEADERS)
    include(FetchContent)
    # An empty SOURCE_SUBDIR: the sources are fetched and nothing of them is configured.
    FetchContent_Declare(tensorrt
      GIT_REPOSITORY https://github.com/NVIDIA/TensorRT.git
      GIT_TAG ${TRTFORGE_TENSORRT_TAG}
      GIT_SHALLOW TRUE
      GIT_SUBMODULES ""
      SOURCE_SUBDIR include)
    FetchContent_MakeAvailable(tensorrt)
    set(TRTFORGE_TENSORRT_HEADERS ${tensorrt_SOURCE_DIR}/include)
  endif()
endif()

if(TRTFORGE_TENSORRT_HEADERS)
  message(STATUS "TensorRT headers: ${TRTFORGE_TENSORRT_HEADERS}")
elseif(TRTFORGE_PLUGIN STREQUAL "ON")
  message(FATAL_ERROR "TensorRT's headers were not found: give TensorRT_ROOT or TRTFORGE_TENSORRT_INCLUDE_DIR")
else()
  message(STATUS "TensorRT headers: none; the kernels are built without the plugin")
endif()
