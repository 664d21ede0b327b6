// `Item` of ../include/gpu/kernels.h, the position of a SYCL functor in a one-dimensional range.

#pragma once

#include <sycl/sycl.hpp>

#include "../include/gpu/kernels.h"

namespace optimus {

using Stream = sycl::queue*;
constexpr int64_t kLanes = 16;
constexpr int64_t kGroup = 256;

// Sub-groups may have any size that divides kGroup. Sums add lane and lane^step, so their order
// depends only on the size of the sub-group.
class Item {
 public:
  explicit Item(const sycl::nd_item<1>& at) : at_(at), lanes_(at.get_sub_group()) {}

  int64_t lanes() const { return lanes_.get_max_local_range()[0]; }
  int64_t lane() const { return lanes_.get_local_linear_id(); }
  int64_t team_in_group() const { return lanes_.get_group_linear_id(); }
  int64_t teams_in_group() const { return lanes_.get_group_linear_range(); }
  int64_t team() const { return group() * teams_in_group() + team_in_group(); }
  int64_t teams() const { return groups() * teams_in_group(); }
  int64_t item() const { return group() * kGroup + at_.get_local_linear_id(); }
  int64_t items() const { return groups() * kGroup; }
  void barrier() const { sycl::group_barrier(at_.get_group()); }

  template <class V>
  V sum(V value) const {
    for (int64_t step = lanes() / 2; step > 0; step /= 2)
      value += sycl::permute_group_by_xor(lanes_, value, step);
    return value;
  }

  template <class V>
  V scan(V value) const {
    return sycl::inclusive_scan_over_group(lanes_, value, sycl::plus<V>());
  }

 private:
  int64_t group() const { return at_.get_group_linear_id(); }
  int64_t groups() const { return at_.get_group_range(0); }

  sycl::nd_item<1> at_;
  sycl::sub_group lanes_;
};

// The function object that a queue runs. It contains a functor, which has only raw pointers.
template <class Kernel>
struct Functor {
  Kernel kernel;
  void operator()(sycl::nd_item<1> at) const { kernel(Item(at)); }
};

}  // namespace optimus
