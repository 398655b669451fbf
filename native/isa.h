// Which instruction sets this build has and this machine can run.
#pragma once

#include <string>
#include <vector>

#include "common.h"

namespace outrider {

// Best first; the last one is always "portable".
std::vector<const Kernels*> available_kernels();

// Null when the name is unknown or cannot run here.
const Kernels* find_kernels(const std::string& name);

}  // namespace outrider
