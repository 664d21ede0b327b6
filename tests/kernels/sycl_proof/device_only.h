// Replaces kernels/csrc/sycl/launch.h where functors alone are compiled, to be launched by name.

#pragma once

#include "sycl/item.h"

namespace optimus {

template <class Kernel>
int launch(Stream, int64_t, const Kernel&) {
  return 0;
}

}  // namespace optimus
