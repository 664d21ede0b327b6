// The CPU kernels, compiled once for each instruction set with OPTIMUS_ISA naming the table that
// dispatch.cpp will find (portable_kernels, avx2_kernels, avx512_kernels); it says with which flags.
//
// Threads are torch's: the library is linked to the OpenMP runtime that torch has loaded, so that
// torch.set_num_threads holds here and no second pool is made. Threads share out whole rows, hence
// their number changes no result.

#include "kernels.h"

#include "bodies.h"
#include "interface.h"

namespace {

using namespace optimus;

// Below this many elements a second thread costs more than it helps; torch's own grain size.
constexpr int64_t kGrain = 32768;

// Elements of a token that stay in registers while its K rows are added: 4 vectors of 16 floats.
constexpr int kReduceWidth = 64;

// f(i) for i in 0 to count - 1, each with about `work` elements.
template <class F>
void for_each(int64_t count, int64_t work, const F& f) {
#pragma omp parallel for schedule(static) if (count > 1 && count * work > kGrain)
  for (int64_t i = 0; i < count; ++i) f(i);
}

// f(an element) with the type that `dtype` means.
template <class F>
int with_dtype(int dtype, const F& f) {
  switch (dtype) {
    case 0: f(float{}); return 0;
    case 1: f(BFloat16{}); return 0;
    case 2: f(Half{}); return 0;
    default: return OPTIMUS_BAD_DTYPE;
  }
}

void route(const int64_t* chosen, int64_t tokens, int64_t top_k, int64_t first_expert,
           int64_t num_experts, int64_t pieces, int32_t* offsets, int32_t* row_token,
           int32_t* row_slot, int32_t* slot_row, int32_t* scratch) {
  const int64_t slots = tokens * top_k;
  const auto begin = [=](int64_t piece) { return slots * piece / pieces; };
  for_each(pieces, slots / pieces, [&](int64_t piece) {
    route_count(chosen, begin(piece), begin(piece + 1), first_expert, num_experts,
                scratch + piece * num_experts);
  });
  route_scan(scratch, pieces, num_experts, offsets);
  for_each(pieces, slots / pieces, [&](int64_t piece) {
    route_scatter(chosen, begin(piece), begin(piece + 1), top_k, first_expert, num_experts,
                  scratch + piece * num_experts, row_token, row_slot, slot_row);
  });
  for (int64_t row = offsets[num_experts]; row < slots; ++row) row_token[row] = row_slot[row] = -1;
}

int gather(int dtype, const void* x, const int32_t* row_token, int64_t rows, int64_t hidden,
           void* out) {
  const int64_t bytes = hidden * (dtype == 0 ? 4 : 2);
  if (dtype < 0 || dtype > 2) return OPTIMUS_BAD_DTYPE;
  for_each(rows, hidden, [&](int64_t row) {
    char* to = static_cast<char*>(out) + row * bytes;
    const int64_t token = row_token[row];
    if (token < 0)
      memset(to, 0, bytes);
    else
      memcpy(to, static_cast<const char*>(x) + token * bytes, bytes);
  });
  return 0;
}

int swiglu(int dtype, const void* h, int64_t rows, int64_t inner, void* a) {
  return with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    for_each(rows, inner, [&](int64_t row) {
      swiglu_row<1>(OneLane{}, static_cast<const T*>(h) + row * 2 * inner, inner,
                    static_cast<T*>(a) + row * inner);
    });
  });
}

int swiglu_backward(int dtype, const void* h, const void* da, const void* weights,
                    const int32_t* row_slot, int64_t rows, int64_t inner, void* dh, void* a_scaled,
                    float* dweights) {
  return with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    for_each(rows, inner, [&](int64_t row) {
      T* dh_row = static_cast<T*>(dh) + row * 2 * inner;
      T* a_row = static_cast<T*>(a_scaled) + row * inner;
      const int32_t slot = row_slot[row];
      if (slot < 0) {
        memset(static_cast<void*>(dh_row), 0, 2 * inner * sizeof(T));
        memset(static_cast<void*>(a_row), 0, inner * sizeof(T));
        return;
      }
      dweights[slot] = swiglu_backward_row<1>(
          OneLane{}, static_cast<const T*>(h) + row * 2 * inner,
          static_cast<const T*>(da) + row * inner, to_float(static_cast<const T*>(weights)[slot]),
          inner, dh_row, a_row);
    });
  });
}

int reduce(int dtype, const void* y, const void* weights, const int32_t* slot_row, int64_t tokens,
           int64_t top_k, int64_t hidden, void* out) {
  return with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    for_each(tokens, hidden * top_k, [&](int64_t token) {
      const T* w = weights ? static_cast<const T*>(weights) + token * top_k : nullptr;
      reduce_token_by_parts<kReduceWidth>(static_cast<const T*>(y), w, slot_row + token * top_k,
                                          top_k, hidden, static_cast<T*>(out) + token * hidden);
    });
  });
}

int reduce_backward(int dtype, const void* dout, const void* y, const void* weights,
                    const int32_t* row_slot, int64_t rows, int64_t top_k, int64_t hidden, void* dy,
                    float* dweights) {
  return with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    for_each(rows, hidden, [&](int64_t row) {
      T* to = static_cast<T*>(dy) + row * hidden;
      const int32_t slot = row_slot[row];
      if (slot < 0) {
        memset(static_cast<void*>(to), 0, hidden * sizeof(T));
        return;
      }
      dweights[slot] = reduce_backward_row<1>(
          OneLane{}, static_cast<const T*>(dout) + slot / top_k * hidden,
          static_cast<const T*>(y) + row * hidden, to_float(static_cast<const T*>(weights)[slot]),
          hidden, to);
    });
  });
}

}  // namespace

namespace optimus_cpu {
extern const Kernels OPTIMUS_ISA;
const Kernels OPTIMUS_ISA = {route, gather, swiglu, swiglu_backward, reduce, reduce_backward};
}  // namespace optimus_cpu
