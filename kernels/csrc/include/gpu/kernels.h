// The GPU kernels: functors that both CUDA and SYCL launch, with the bodies of ../bodies.h.
//
// `Item` is the position of the work-item that runs a functor.
// - In its sub-group (a warp on CUDA, 16 or 32 lanes on Intel GPUs; any size up to the size of the
//   work-group): lane(), lanes(), sum(x), and scan(x), the sum of x over lanes 0 to lane().
// - In the grid: team() and teams(), the index of this sub-group and the number of sub-groups;
//   item() and items(), the index of this work-item and the number of work-items.
// - In its work-group: team_in_group(), teams_in_group(), and barrier(), which also orders memory.
//
// Loops step by the size of the grid. Results are bitwise independent of the grid; of the launch
// parameters, they depend only on lanes(). No functor needs local memory or atomics.

#pragma once

#include "../bodies.h"

#if defined(__CUDACC__)
#define OPTIMUS_KERNEL __device__ __forceinline__
#else
#define OPTIMUS_KERNEL OPTIMUS_FN
#endif

namespace optimus {

// The lanes of `parts` sub-groups that share a row. Only for bodies without sums over lanes.
struct SpreadLanes {
  int64_t first, all;
  template <class Item>
  OPTIMUS_KERNEL static SpreadLanes of(const Item& item, int64_t part, int64_t parts) {
    return {part * item.lanes() + item.lane(), parts * item.lanes()};
  }
  OPTIMUS_FN int64_t lane() const { return first; }
  OPTIMUS_FN int64_t lanes() const { return all; }
};

template <class T, int Width>
struct Gather {
  const T* x;
  const int32_t* row_token;
  int64_t rows, hidden, parts;
  T* out;

  template <class Item>
  OPTIMUS_KERNEL void operator()(const Item& item) const {
    for (int64_t unit = item.team(); unit < rows * parts; unit += item.teams()) {
      const int64_t row = unit / parts;
      gather_row<Width>(SpreadLanes::of(item, unit % parts, parts), x, row_token[row], hidden,
                        out + row * hidden);
    }
  }
};

template <class T, int Width>
struct Swiglu {
  const T* h;
  int64_t rows, inner, parts;
  T* a;

  template <class Item>
  OPTIMUS_KERNEL void operator()(const Item& item) const {
    for (int64_t unit = item.team(); unit < rows * parts; unit += item.teams()) {
      const int64_t row = unit / parts;
      swiglu_row<Width>(SpreadLanes::of(item, unit % parts, parts), h + row * 2 * inner, inner,
                        a + row * inner);
    }
  }
};

template <class T, int Width>
struct Reduce {
  const T* y;
  const T* weights;
  const int32_t* slot_row;
  int64_t tokens, top_k, hidden, parts;
  T* out;

  template <class Item>
  OPTIMUS_KERNEL void operator()(const Item& item) const {
    for (int64_t unit = item.team(); unit < tokens * parts; unit += item.teams()) {
      const int64_t token = unit / parts, slot = token * top_k;
      reduce_token<Width>(SpreadLanes::of(item, unit % parts, parts), y,
                          weights ? weights + slot : nullptr, slot_row + slot, top_k, hidden,
                          out + token * hidden);
    }
  }
};

// For rows from R on, which have no slot, sets the outputs to zero.
template <class T, int Width>
struct SwigluBackward {
  const T* h;
  const T* da;
  const T* weights;
  const int32_t* row_slot;
  int64_t rows, inner;
  T* dh;
  T* a_scaled;
  float* dweights;

  template <class Item>
  OPTIMUS_KERNEL void operator()(const Item& item) const {
    for (int64_t row = item.team(); row < rows; row += item.teams()) {
      const int32_t slot = row_slot[row];
      T* dh_row = dh + row * 2 * inner;
      T* a_row = a_scaled + row * inner;
      if (slot < 0) {
        zero_row<Width>(item, 2 * inner, dh_row);
        zero_row<Width>(item, inner, a_row);
        continue;
      }
      const float dw = swiglu_backward_row<Width>(item, h + row * 2 * inner, da + row * inner,
                                                  to_float(weights[slot]), inner, dh_row, a_row);
      if (item.lane() == 0) dweights[slot] = dw;
    }
  }

  template <int W, class Item>
  OPTIMUS_KERNEL static void zero_row(const Item& item, int64_t size, T* row) {
    gather_row<W>(item, row, -1, size, row);
  }
};

template <class T, int Width>
struct ReduceBackward {
  const T* dout;
  const T* y;
  const T* weights;
  const int32_t* row_slot;
  int64_t rows, top_k, hidden;
  T* dy;
  float* dweights;

  template <class Item>
  OPTIMUS_KERNEL void operator()(const Item& item) const {
    for (int64_t row = item.team(); row < rows; row += item.teams()) {
      const int32_t slot = row_slot[row];
      T* dy_row = dy + row * hidden;
      if (slot < 0) {
        gather_row<Width>(item, dout, -1, hidden, dy_row);
        continue;
      }
      const float dw = reduce_backward_row<Width>(item, dout + slot / top_k * hidden,
                                                  y + row * hidden, to_float(weights[slot]),
                                                  hidden, dy_row);
      if (item.lane() == 0) dweights[slot] = dw;
    }
  }
};

}  // namespace optimus
