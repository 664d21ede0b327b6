// AdamW on a GPU, in one pass over a chunk. Each lane updates one element or one pack of elements
// at a time.

#pragma once

#include "../adamw.h"
#include "kernels.h"

namespace optimus {

// The lanes of the whole grid.
struct GridLanes {
  int64_t first, all;
  OPTIMUS_FN int64_t lane() const { return first; }
  OPTIMUS_FN int64_t lanes() const { return all; }
};

template <class G, class P, int Width>
struct Adamw {
  OptimusAdamw with;
  int64_t size;
  const G* grad;
  float* master;
  float* exp_avg;
  float* exp_avg_sq;
  P* param;  // or null

  template <class Item>
  OPTIMUS_KERNEL void operator()(const Item& item) const {
    const int64_t whole = size - size % Width;
    span<Width>(item, 0, whole);
    if (Width > 1) span<1>(item, whole, size);
  }

  template <int W, class Item>
  OPTIMUS_KERNEL void span(const Item& item, int64_t begin, int64_t end) const {
    const GridLanes lanes{item.item(), item.items()};
    if (param)
      adamw_span<W, true>(lanes, with, begin, end, grad, master, exp_avg, exp_avg_sq, param);
    else
      adamw_span<W, false>(lanes, with, begin, end, grad, master, exp_avg, exp_avg_sq, param);
  }
};

}  // namespace optimus
