// The bodies of the kernels: the computation for one row, one token or, for `route`, one piece (a
// range of consecutive slots). Each backend has a loop over rows, tokens or pieces that calls these
// functions. The functions do not allocate memory, synchronize or use atomics.
//
// T tokens, K experts per token, N = T*K slots (slot t*K + k), E local experts, R <= N rows (one
// for each slot of a local expert, ordered by expert and then by slot), D hidden, F intermediate.
//
// `Lanes` are the lanes (threads of a warp or sub-group) that share a row. lane() is the index of
// this lane and lanes() the number of lanes. sum(x) returns the sum of x over the lanes to each
// lane, added in an order that depends only on lanes(). CPUs use `OneLane`; GPUs use a warp or a
// sub-group of any size. `Width` elements are loaded or stored at once; if `Width` is above 1,
// sizes must be multiples of `Width` and addresses multiples of the size of `Width` elements.

#pragma once

#include "numbers.h"

namespace optimus {

struct OneLane {
  OPTIMUS_FN static constexpr int64_t lane() { return 0; }
  OPTIMUS_FN static constexpr int64_t lanes() { return 1; }
  OPTIMUS_FN static float sum(float value) { return value; }
};

template <class T, int Width>
OPTIMUS_FN void load(const T* from, float (&to)[Width]) {
  const auto pack = *reinterpret_cast<const Pack<T, Width>*>(from);
  for (int i = 0; i < Width; ++i) to[i] = to_float(pack.values[i]);
}

template <class T, int Width>
OPTIMUS_FN void store(const float (&from)[Width], T* to) {
  Pack<T, Width> pack;
  for (int i = 0; i < Width; ++i) pack.values[i] = from_float<T>(from[i]);
  *reinterpret_cast<Pack<T, Width>*>(to) = pack;
}

// ---- route: a stable counting sort of the slots by expert, in pieces of consecutive slots --------

// Returns the index of an expert among the local experts, or -1 if it is not local or out of range.
OPTIMUS_FN int64_t local_expert(int64_t expert, int64_t first_expert, int64_t num_experts) {
  const uint64_t local = static_cast<uint64_t>(expert) - static_cast<uint64_t>(first_expert);
  return local < static_cast<uint64_t>(num_experts) ? static_cast<int64_t>(local) : -1;
}

// Sets counts[e] to the number of slots of expert e among slots begin to end - 1.
OPTIMUS_FN void route_count(const int64_t* chosen, int64_t begin, int64_t end, int64_t first_expert,
                            int64_t num_experts, int32_t* counts) {
  for (int64_t e = 0; e < num_experts; ++e) counts[e] = 0;
  for (int64_t slot = begin; slot < end; ++slot) {
    const int64_t e = local_expert(chosen[slot], first_expert, num_experts);
    if (e >= 0) ++counts[e];
  }
}

// Replaces counts[piece, e] by the row of the first slot of expert e in the piece, and sets
// offsets [E+1]; counts [pieces, E].
OPTIMUS_FN void route_scan(int32_t* counts, int64_t pieces, int64_t num_experts, int32_t* offsets) {
  int32_t row = 0;
  for (int64_t e = 0; e < num_experts; ++e) {
    offsets[e] = row;
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const int32_t count = counts[piece * num_experts + e];
      counts[piece * num_experts + e] = row;
      row += count;
    }
  }
  offsets[num_experts] = row;
}

// Assigns rows to slots begin to end - 1. next [E] contains the next row of each expert, initially
// this piece's result of route_scan.
OPTIMUS_FN void route_scatter(const int64_t* chosen, int64_t begin, int64_t end, int64_t top_k,
                              int64_t first_expert, int64_t num_experts, int32_t* next,
                              int32_t* row_token, int32_t* row_slot, int32_t* slot_row) {
  for (int64_t slot = begin; slot < end; ++slot) {
    const int64_t e = local_expert(chosen[slot], first_expert, num_experts);
    const int32_t row = e >= 0 ? next[e]++ : -1;
    slot_row[slot] = row;
    if (row >= 0) {
      row_token[row] = static_cast<int32_t>(slot / top_k);
      row_slot[row] = static_cast<int32_t>(slot);
    }
  }
}

// ---- gather --------------------------------------------------------------------------------------

// Sets out[D] to x[token], or to zeros for token -1; x [T, D].
template <int Width, class Lanes, class T>
OPTIMUS_FN void gather_row(Lanes lanes, const T* x, int32_t token, int64_t hidden, T* out) {
  using Bits = Pack<T, Width>;
  const T* from = x + static_cast<int64_t>(token < 0 ? 0 : token) * hidden;
  if (token < 0) {
    for (int64_t i = lanes.lane() * Width; i < hidden; i += lanes.lanes() * Width)
      *reinterpret_cast<Bits*>(out + i) = Bits{};
  } else {
    for (int64_t i = lanes.lane() * Width; i < hidden; i += lanes.lanes() * Width)
      *reinterpret_cast<Bits*>(out + i) = *reinterpret_cast<const Bits*>(from + i);
  }
}

// ---- SwiGLU --------------------------------------------------------------------------------------

// Sets a[F] to silu(g) * u with [g, u] = h[2F].
template <int Width, class Lanes, class T>
OPTIMUS_FN void swiglu_row(Lanes lanes, const T* h, int64_t inner, T* a) {
  OPTIMUS_SIMD
  for (int64_t i = lanes.lane() * Width; i < inner; i += lanes.lanes() * Width) {
    float g[Width], u[Width], out[Width];
    load<T, Width>(h + i, g);
    load<T, Width>(h + inner + i, u);
    for (int j = 0; j < Width; ++j) out[j] = g[j] * sigmoid(g[j]) * u[j];
    store<T, Width>(out, a + i);
  }
}

// Backward of w * a for one row, where a = silu(g) * u, [g, u] = h[2F] and w is the routing
// weight. da[F] is the gradient of w * a. Sets dh[2F] to the gradient of h and a_scaled[F] to
// w * a, and returns dw = <da, a>, the gradient of w.
template <int Width, class Lanes, class T>
OPTIMUS_FN float swiglu_backward_row(Lanes lanes, const T* h, const T* da, float w, int64_t inner,
                                     T* dh, T* a_scaled) {
  float dw = 0.0f;
  OPTIMUS_SIMD_SUM(dw)
  for (int64_t i = lanes.lane() * Width; i < inner; i += lanes.lanes() * Width) {
    float g[Width], u[Width], d[Width], dg[Width], du[Width], scaled[Width];
    load<T, Width>(h + i, g);
    load<T, Width>(h + inner + i, u);
    load<T, Width>(da + i, d);
    for (int j = 0; j < Width; ++j) {
      const float s = sigmoid(g[j]);
      const float silu = g[j] * s;
      const float a = silu * u[j];
      const float wd = w * d[j];
      dw += d[j] * a;
      dg[j] = wd * u[j] * (s + silu * (1.0f - s));
      du[j] = wd * silu;
      scaled[j] = w * a;
    }
    store<T, Width>(dg, dh + i);
    store<T, Width>(du, dh + inner + i);
    store<T, Width>(scaled, a_scaled + i);
  }
  return lanes.sum(dw);
}

// ---- reduction -----------------------------------------------------------------------------------

// Computes elements begin to begin + count - 1 of out = sum of w[k] * y[rows[k]] over k, added in
// the order of k. count is at most Width, and equal to Width if `Whole`. If weights is null, all
// weights are 1.
template <int Width, bool Whole, class T>
OPTIMUS_FN void reduce_part(const T* y, const T* weights, const int32_t* rows, int64_t top_k,
                            int64_t hidden, int64_t begin, int64_t count, T* out) {
  float sum[Width];
  const int64_t end = Whole ? Width : count;
  for (int64_t i = 0; i < end; ++i) sum[i] = 0.0f;
  for (int64_t k = 0; k < top_k; ++k) {
    if (rows[k] < 0) continue;
    const float w = weights ? to_float(weights[k]) : 1.0f;
    const T* from = y + static_cast<int64_t>(rows[k]) * hidden + begin;
    OPTIMUS_SIMD
    for (int64_t i = 0; i < end; ++i) sum[i] += w * to_float(from[i]);
  }
  OPTIMUS_SIMD
  for (int64_t i = 0; i < end; ++i) out[begin + i] = from_float<T>(sum[i]);
}

// Reduces one token on a CPU. The sums of Width elements stay in registers while all k are added.
template <int Width, class T>
OPTIMUS_FN void reduce_token_by_parts(const T* y, const T* weights, const int32_t* rows,
                                      int64_t top_k, int64_t hidden, T* out) {
  int64_t begin = 0;
  for (; begin + Width <= hidden; begin += Width)
    reduce_part<Width, true>(y, weights, rows, top_k, hidden, begin, Width, out);
  if (begin < hidden)
    reduce_part<Width, false>(y, weights, rows, top_k, hidden, begin, hidden - begin, out);
}

// Reduces one token with several lanes; y [R, D], weights [K] or null, rows [K] (-1 adds nothing).
template <int Width, class Lanes, class T>
OPTIMUS_FN void reduce_token(Lanes lanes, const T* y, const T* weights, const int32_t* rows,
                             int64_t top_k, int64_t hidden, T* out) {
  for (int64_t i = lanes.lane() * Width; i < hidden; i += lanes.lanes() * Width) {
    float sum[Width], part[Width];
    for (int j = 0; j < Width; ++j) sum[j] = 0.0f;
    for (int64_t k = 0; k < top_k; ++k) {
      if (rows[k] < 0) continue;
      const float w = weights ? to_float(weights[k]) : 1.0f;
      load<T, Width>(y + static_cast<int64_t>(rows[k]) * hidden + i, part);
      for (int j = 0; j < Width; ++j) sum[j] += w * part[j];
    }
    store<T, Width>(sum, out + i);
  }
}

// Sets dy[D] of a row to w * dout[D] of its token, and returns dw = <dout, y> of its slot.
template <int Width, class Lanes, class T>
OPTIMUS_FN float reduce_backward_row(Lanes lanes, const T* dout, const T* y, float w,
                                     int64_t hidden, T* dy) {
  float dw = 0.0f;
  OPTIMUS_SIMD_SUM(dw)
  for (int64_t i = lanes.lane() * Width; i < hidden; i += lanes.lanes() * Width) {
    float d[Width], value[Width], out[Width];
    load<T, Width>(dout + i, d);
    load<T, Width>(y + i, value);
    for (int j = 0; j < Width; ++j) {
      dw += d[j] * value[j];
      out[j] = w * d[j];
    }
    store<T, Width>(out, dy + i);
  }
  return lanes.sum(dw);
}

}  // namespace optimus
