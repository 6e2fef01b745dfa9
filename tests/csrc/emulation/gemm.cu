// What nvcc compiles of the GEMM: a kernel that the emulator runs has to compile for a device too.
#include "gemm.cuh"

template int trtforge::launch_gemm(const trtforge::GemmParams<trtforge::half>&, trtforge::Stream);
template int trtforge::launch_gemm(const trtforge::GemmParams<trtforge::bf16>&, trtforge::Stream);
