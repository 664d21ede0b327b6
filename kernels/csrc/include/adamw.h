// AdamW on one element: the same roundings on every backend, in every position of a vector.
//
// Every element is rounded as torch's fused AdamW rounds elements of full vectors on AVX2 and
// AVX-512 machines. torch rounds the second moment differently for the last elements of a tensor,
// which do not fill a vector. Here results do not depend on how a tensor is sliced.
//
// Only `fused` may contract a product and a sum, because any other contraction changes the
// rounding. CPU files are therefore compiled with -ffp-contract=off, and CUDA code uses intrinsics.

#pragma once

#include "bodies.h"
#include "interface.h"

namespace optimus {

#if defined(__CUDA_ARCH__)
OPTIMUS_FN float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
OPTIMUS_FN float product(float a, float b) { return __fmul_rn(a, b); }
OPTIMUS_FN float quotient(float a, float b) { return __fdiv_rn(a, b); }
OPTIMUS_FN float root(float a) { return __fsqrt_rn(a); }
#else
#if defined(SYCL_LANGUAGE_VERSION)
OPTIMUS_FN float fused(float a, float b, float c) { return sycl::fma(a, b, c); }
OPTIMUS_FN float root(float a) { return sycl::sqrt(a); }
#else
OPTIMUS_FN float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
OPTIMUS_FN float root(float a) { return __builtin_sqrtf(a); }
#endif
OPTIMUS_FN float product(float a, float b) {
#if defined(__clang__)
#pragma clang fp contract(off)
#endif
  return a * b;
}
OPTIMUS_FN float quotient(float a, float b) { return a / b; }
#endif

// Updates master, m and v of one element. g is the gradient, which this function multiplies by
// grad_scale. NaN and infinity propagate.
OPTIMUS_FN void adamw_element(const OptimusAdamw& with, float g, float& master, float& m, float& v) {
  // As torch's lerp, start from the nearer of m and g.
  const bool from_m = with.lerp < 0.5f;
  const float weight = from_m ? with.lerp : with.lerp - 1.0f;
  g = product(g, with.grad_scale);
  m = fused(weight, g - m, from_m ? m : g);
  v = fused(product(with.one_minus_beta2, g), g, product(v, with.beta2));
  const float size = quotient(root(v), with.root_bias2) + with.eps;
  master = product(master, with.decay) + quotient(product(with.minus_step, m), size);
}

// Updates elements begin to end - 1 with all lanes; end - begin is a multiple of Width. With
// `Write`, `param` receives master, rounded to type P; otherwise `param` may be null.
template <int Width, bool Write, class Lanes, class G, class P>
OPTIMUS_FN void adamw_span(Lanes lanes, const OptimusAdamw& numbers, int64_t begin, int64_t end,
                           const G* grad, float* master, float* exp_avg, float* exp_avg_sq,
                           P* param) {
  const OptimusAdamw with = numbers;  // a copy, which no store can alias
  OPTIMUS_SIMD
  for (int64_t i = begin + lanes.lane() * Width; i < end; i += lanes.lanes() * Width) {
    float g[Width], p[Width], m[Width], v[Width];
    load<G, Width>(grad + i, g);
    load<float, Width>(master + i, p);
    load<float, Width>(exp_avg + i, m);
    load<float, Width>(exp_avg_sq + i, v);
    for (int j = 0; j < Width; ++j) adamw_element(with, g[j], p[j], m[j], v[j]);
    store<float, Width>(p, master + i);
    store<float, Width>(m, exp_avg + i);
    store<float, Width>(v, exp_avg_sq + i);
    if (Write) store<P, Width>(p, param + i);
  }
}

}  // namespace optimus
