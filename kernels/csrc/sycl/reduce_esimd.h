// The output reduction in ESIMD, for bf16: a work-item is a hardware thread that processes kBlock
// elements at once. launch.h includes this file only if OPTIMUS_SYCL_ESIMD is defined.
//
// DPC++ 2026.2 (the kernel_compiler extension) compiles this file. It has not been run, because
// ESIMD needs an Intel GPU.

#pragma once

#include <sycl/ext/intel/esimd.hpp>

#include "item.h"

namespace optimus {

namespace esimd = sycl::ext::intel::esimd;

constexpr int kBlock = 128;

struct ReduceEsimd {
  const uint16_t* y;
  const uint16_t* weights;  // null: all weights are 1
  const int32_t* slot_row;
  int64_t tokens, top_k, hidden;  // hidden: a multiple of kBlock
  uint16_t* out;

  using Floats = esimd::simd<float, kBlock>;
  using Words = esimd::simd<uint32_t, kBlock>;
  using Elements = esimd::simd<uint16_t, kBlock>;

  void operator()(sycl::nd_item<1> at) const SYCL_ESIMD_KERNEL {
    const int64_t parts = hidden / kBlock;
    const int64_t items = at.get_global_range(0);
    for (int64_t unit = at.get_global_linear_id(); unit < tokens * parts; unit += items)
      reduce_block(unit / parts, unit % parts * kBlock);
  }

  void reduce_block(int64_t token, int64_t begin) const {
    Floats sum = 0.0f;
    for (int64_t slot = token * top_k; slot < (token + 1) * top_k; ++slot) {
      const int32_t row = slot_row[slot];
      if (row < 0) continue;
      const float w = weights ? to_float(BFloat16{weights[slot]}) : 1.0f;
      Elements bits;
      bits.copy_from(y + row * hidden + begin);
      Words wide = bits;
      wide <<= 16;
      sum += w * Floats(wide.bit_cast_view<float>());
    }
    rounded(sum).copy_to(out + token * hidden + begin);
  }

  // Rounds as from_float<BFloat16>: to nearest, ties to even; NaN stays NaN.
  static Elements rounded(Floats sum) {
    Words bits = sum.bit_cast_view<uint32_t>().read();
    const Words size = bits & 0x7fffffffu;
    Words result = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    result.merge(Words(0x7fc0u), size > 0x7f800000u);
    return Elements(result);
  }
};

// Replaces launch(Stream, groups, Reduce<T, Width>) for bf16 if rows are multiples of kBlock
// elements; otherwise launches nothing and returns false.
template <int Width>
bool launch_esimd(Stream stream, int64_t groups, const Reduce<BFloat16, Width>& plain) {
  if (Width == 1 || plain.hidden % kBlock) return false;
  const auto bits = [](const BFloat16* pointer) {
    return reinterpret_cast<const uint16_t*>(pointer);
  };
  stream->parallel_for(sycl::nd_range<1>(groups * kLanes, kLanes),
                       ReduceEsimd{bits(plain.y), bits(plain.weights), plain.slot_row,
                                   plain.tokens, plain.top_k, plain.hidden,
                                   reinterpret_cast<uint16_t*>(plain.out)});
  return true;
}

template <class Kernel>
bool launch_esimd(Stream, int64_t, const Kernel&) {
  return false;
}

}  // namespace optimus
