// Runs an FFN as phases of one cooperative kernel: see phases.cpp.
#pragma once

#include "case_files.h"

// y = LayerNorm(x + gelu(x w_up + b_up) w_down + b_down). Returns the status of the launch.
int run_phases(const Case& c);
