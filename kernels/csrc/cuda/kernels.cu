// The CUDA backend: runs the functors of ../include/gpu on warps. nvcc compiles only this file,
// without headers of torch. `stream` is a cudaStream_t of the current device.

#include <cuda_runtime.h>

#include "../include/gpu/kernels.h"

namespace optimus {

using Stream = cudaStream_t;
constexpr int64_t kLanes = 32;
constexpr int64_t kGroup = 256;

struct Item {
  static constexpr unsigned kAll = 0xffffffffu;

  __device__ static int64_t lanes() { return kLanes; }
  __device__ static int64_t lane() { return threadIdx.x % kLanes; }
  __device__ static int64_t team_in_group() { return threadIdx.x / kLanes; }
  __device__ static int64_t teams_in_group() { return kGroup / kLanes; }
  __device__ static int64_t team() { return blockIdx.x * teams_in_group() + team_in_group(); }
  __device__ static int64_t teams() { return gridDim.x * teams_in_group(); }
  __device__ static int64_t item() { return blockIdx.x * kGroup + threadIdx.x; }
  __device__ static int64_t items() { return gridDim.x * kGroup; }
  __device__ static void barrier() { __syncthreads(); }

  template <class V>
  __device__ static V sum(V value) {
    for (int step = kLanes / 2; step > 0; step /= 2) value += __shfl_xor_sync(kAll, value, step);
    return value;
  }

  template <class V>
  __device__ static V scan(V value) {
    for (int step = 1; step < kLanes; step *= 2) {
      const V below = __shfl_up_sync(kAll, value, step);
      if (lane() >= step) value += below;
    }
    return value;
  }
};

template <class Kernel>
__global__ void __launch_bounds__(kGroup) run(const Kernel kernel) {
  kernel(Item{});
}

template <class Kernel>
int launch(Stream stream, int64_t groups, const Kernel& kernel) {
  Kernel copy = kernel;
  void* arguments[] = {&copy};
  return static_cast<int>(cudaLaunchKernel(run<Kernel>, dim3(static_cast<unsigned>(groups)),
                                           dim3(static_cast<unsigned>(kGroup)), arguments, 0,
                                           stream));
}

}  // namespace optimus

#include "../include/gpu/launchers.h"
