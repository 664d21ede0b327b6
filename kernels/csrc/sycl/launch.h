// Launches a functor on a SYCL queue. `stream` is a sycl::queue* whose commands run in order, such
// as torch.xpu.current_stream().sycl_queue.

#pragma once

#include "item.h"
#if defined(OPTIMUS_SYCL_ESIMD)
#include "reduce_esimd.h"
#endif

namespace optimus {

constexpr int kSyclFailed = 1;

template <class Kernel>
int launch(Stream stream, int64_t groups, const Kernel& kernel) {
  try {
#if defined(OPTIMUS_SYCL_ESIMD)
    if (launch_esimd(stream, groups, kernel)) return 0;
#endif
    stream->parallel_for(sycl::nd_range<1>(groups * kGroup, kGroup), Functor<Kernel>{kernel});
    return 0;
  } catch (const sycl::exception&) {
    return kSyclFailed;
  }
}

}  // namespace optimus
