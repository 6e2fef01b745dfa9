# What every target is compiled and linked with. Without FindCUDAToolkit, which asks for libraries that nothing here uses
# and that the toolkit's wheels do not bring.

# The CUDA runtime is linked in, so that a library loads on a machine without a driver and beside any other runtime.
# Only what is marked is exported: two libraries in one process may hold the same kernels.
function(trtforge_compile_options target)
  set_target_properties(${target} PROPERTIES
    CXX_STANDARD 17 CXX_STANDARD_REQUIRED ON CXX_EXTENSIONS OFF
    CUDA_STANDARD 17 CUDA_STANDARD_REQUIRED ON CUDA_EXTENSIONS OFF
    CXX_VISIBILITY_PRESET hidden CUDA_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON
    POSITION_INDEPENDENT_CODE ON
    CUDA_RUNTIME_LIBRARY Static)
  # ptxas -v names the registers and spills of each kernel; `trtforge plugin build` keeps them.
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra>
    $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra -Xptxas=-v>)
  target_include_directories(${target} SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  set_target_properties(${target} PROPERTIES LINKER_LANGUAGE CUDA)
endfunction()
