// The functions of ../interface.h for GPUs. Before a backend includes this file, it must define
//
//   using Stream;                                        type of `void* stream`
//   constexpr int64_t kLanes;                            smallest number of lanes of a sub-group
//   constexpr int64_t kGroup;                            number of work-items in a work-group
//   int launch(Stream, int64_t groups, const Kernel&);   returns 0 or an error
//
// Launches on a stream must run in order.

#pragma once

#include <initializer_list>

#include "../interface.h"
#include "adamw.h"
#include "kernels.h"
#include "route.h"

namespace optimus {

constexpr int64_t kMaxGroups = int64_t{1} << 20;

inline int64_t at_least_one_group(int64_t groups) {
  return groups < 1 ? 1 : groups > kMaxGroups ? kMaxGroups : groups;
}

// Returns the number of work-groups for `items` work-items or for `teams` sub-groups.
inline int64_t groups_of_items(int64_t items) {
  return at_least_one_group((items + kGroup - 1) / kGroup);
}
inline int64_t groups_of_teams(int64_t teams) { return groups_of_items(teams * kLanes); }

// Returns the number of sub-groups that share a row of `size` elements: as many as possible if each
// lane must process at least two packs of `width` elements, and at least 1.
inline int64_t parts_of(int64_t size, int64_t width) {
  const int64_t parts = size / (2 * width * kLanes);
  return parts < 1 ? 1 : parts;
}

// Calls body(T{}) with the element type that `dtype` encodes.
template <class Body>
int with_type(int dtype, const Body& body) {
  switch (dtype) {
    case 0: return body(float{});
    case 1: return body(BFloat16{});
    case 2: return body(Half{});
    default: return OPTIMUS_BAD_DTYPE;
  }
}

template <class T>
constexpr int kWide = 16 / sizeof(T);

template <int Width>
struct WidthTag {
  static constexpr int value = Width;
};

// Calls body(WidthTag). The width is the number of elements in 16 bytes if the size of a row of
// `size` elements and all addresses are multiples of 16 bytes, otherwise 1.
template <class T, class Body>
int with_width(int64_t size, std::initializer_list<const void*> pointers, const Body& body) {
  bool wide = size % kWide<T> == 0;
  for (const void* pointer : pointers)
    wide = wide && reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
  return wide ? body(WidthTag<kWide<T>>{}) : body(WidthTag<1>{});
}

// Calls body(WidthTag) with width 4 if every address is a multiple of 16 bytes, else with width 1.
template <class Body>
int with_four(std::initializer_list<const void*> pointers, const Body& body) {
  return with_width<float>(0, pointers, body);
}

inline Stream stream_of(void* stream) { return static_cast<Stream>(stream); }

}  // namespace optimus

extern "C" {

int optimus_kernels_abi(void) { return OPTIMUS_ABI; }

int64_t optimus_route_scratch(int64_t tokens, int64_t top_k, int64_t num_experts) {
  return optimus::route_pieces(tokens * top_k) * num_experts;
}

int optimus_route(const int64_t* chosen, int64_t tokens, int64_t top_k, int64_t first_expert,
                  int64_t num_experts, int32_t* offsets, int32_t* row_token, int32_t* row_slot,
                  int32_t* slot_row, int32_t* scratch, int64_t scratch_len, void* stream) {
  using namespace optimus;
  if (tokens < 0 || top_k < 0 || num_experts < 0) return OPTIMUS_BAD_SIZE;
  if (top_k > 0 && tokens > INT32_MAX / top_k) return OPTIMUS_BAD_SIZE;
  if (scratch_len < optimus_route_scratch(tokens, top_k, num_experts)) return OPTIMUS_BAD_SIZE;
  const int64_t slots = tokens * top_k, counted = route_pieces(slots) * num_experts;
  const Stream to = stream_of(stream);
  if (const int error = launch(to, groups_of_items(counted),
                               RouteCount{chosen, slots, first_expert, num_experts, scratch}))
    return error;
  if (const int error = launch(to, 1, RouteScan{slots, num_experts, scratch, offsets}))
    return error;
  return launch(to, groups_of_items(counted > slots ? counted : slots),
                RouteScatter{chosen, slots, top_k, first_expert, num_experts, scratch, offsets,
                             row_token, row_slot, slot_row});
}

int optimus_gather(int dtype, const void* x, const int32_t* row_token, int64_t rows,
                   int64_t hidden, void* out, void* stream) {
  using namespace optimus;
  if (rows < 0 || hidden < 0) return OPTIMUS_BAD_SIZE;
  return with_type(dtype, [&](auto element) {
    using T = decltype(element);
    return with_width<T>(hidden, {x, out}, [&](auto width) {
      const int64_t parts = parts_of(hidden, width.value);
      if (rows == 0) return 0;
      return launch(stream_of(stream), groups_of_teams(rows * parts),
                    Gather<T, width.value>{static_cast<const T*>(x), row_token, rows, hidden,
                                           parts, static_cast<T*>(out)});
    });
  });
}

int optimus_swiglu(int dtype, const void* h, int64_t rows, int64_t inner, void* a, void* stream) {
  using namespace optimus;
  if (rows < 0 || inner < 0) return OPTIMUS_BAD_SIZE;
  return with_type(dtype, [&](auto element) {
    using T = decltype(element);
    return with_width<T>(inner, {h, a}, [&](auto width) {
      const int64_t parts = parts_of(inner, width.value);
      if (rows == 0) return 0;
      return launch(stream_of(stream), groups_of_teams(rows * parts),
                    Swiglu<T, width.value>{static_cast<const T*>(h), rows, inner, parts,
                                           static_cast<T*>(a)});
    });
  });
}

int optimus_swiglu_backward(int dtype, const void* h, const void* da, const void* weights,
                            const int32_t* row_slot, int64_t rows, int64_t inner, void* dh,
                            void* a_scaled, float* dweights, void* stream) {
  using namespace optimus;
  if (rows < 0 || inner < 0) return OPTIMUS_BAD_SIZE;
  return with_type(dtype, [&](auto element) {
    using T = decltype(element);
    return with_width<T>(inner, {h, da, dh, a_scaled}, [&](auto width) {
      if (rows == 0) return 0;
      return launch(stream_of(stream), groups_of_teams(rows),
                    SwigluBackward<T, width.value>{
                        static_cast<const T*>(h), static_cast<const T*>(da),
                        static_cast<const T*>(weights), row_slot, rows, inner,
                        static_cast<T*>(dh), static_cast<T*>(a_scaled), dweights});
    });
  });
}

int optimus_reduce(int dtype, const void* y, const void* weights, const int32_t* slot_row,
                   int64_t tokens, int64_t top_k, int64_t hidden, void* out, void* stream) {
  using namespace optimus;
  if (tokens < 0 || top_k < 0 || hidden < 0) return OPTIMUS_BAD_SIZE;
  return with_type(dtype, [&](auto element) {
    using T = decltype(element);
    return with_width<T>(hidden, {y, out}, [&](auto width) {
      const int64_t parts = parts_of(hidden, width.value);
      if (tokens == 0) return 0;
      return launch(stream_of(stream), groups_of_teams(tokens * parts),
                           Reduce<T, width.value>{static_cast<const T*>(y),
                                                  static_cast<const T*>(weights), slot_row,
                                                  tokens, top_k, hidden, parts,
                                                  static_cast<T*>(out)});
    });
  });
}

int optimus_reduce_backward(int dtype, const void* dout, const void* y, const void* weights,
                            const int32_t* row_slot, int64_t rows, int64_t top_k, int64_t hidden,
                            void* dy, float* dweights, void* stream) {
  using namespace optimus;
  if (rows < 0 || top_k < 0 || hidden < 0) return OPTIMUS_BAD_SIZE;
  if (rows > 0 && top_k == 0) return OPTIMUS_BAD_SIZE;
  return with_type(dtype, [&](auto element) {
    using T = decltype(element);
    return with_width<T>(hidden, {dout, y, dy}, [&](auto width) {
      if (rows == 0) return 0;
      return launch(stream_of(stream), groups_of_teams(rows),
                    ReduceBackward<T, width.value>{
                        static_cast<const T*>(dout), static_cast<const T*>(y),
                        static_cast<const T*>(weights), row_slot, rows, top_k, hidden,
                        static_cast<T*>(dy), dweights});
    });
  });
}

int optimus_adamw(int grad_dtype, int param_dtype, const OptimusAdamw* with, int64_t size,
                  const void* grad, float* master, float* exp_avg, float* exp_avg_sq, void* param,
                  void* stream) {
  using namespace optimus;
  if (size < 0) return OPTIMUS_BAD_SIZE;
  if (param && param_dtype != 1 && param_dtype != 2) return OPTIMUS_BAD_DTYPE;
  const auto run = [&](auto element, auto copy) {
    using G = decltype(element);
    using P = decltype(copy);
    return with_four({grad, master, exp_avg, exp_avg_sq, param}, [&](auto width) {
      if (size == 0) return 0;
      return launch(stream_of(stream), groups_of_items((size - 1) / width.value + 1),
                    Adamw<G, P, width.value>{*with, size, static_cast<const G*>(grad), master,
                                             exp_avg, exp_avg_sq, static_cast<P*>(param)});
    });
  };
  return with_type(grad_dtype, [&](auto element) {
    return param_dtype == 2 ? run(element, Half{}) : run(element, BFloat16{});
  });
}
}
