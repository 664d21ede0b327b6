// Element types fp32, bf16 and fp16, and their conversion to fp32, in which kernels compute.
//
// bf16 and fp16 are stored as bits, so that g++, nvcc and DPC++ compile the same source without
// headers of a library. The functions have no branches, so that compilers can vectorize them.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define OPTIMUS_FN __host__ __device__ __forceinline__
#else
#define OPTIMUS_FN inline __attribute__((always_inline))
#endif

// On a CPU, one lane computes a row, and the compiler vectorizes the loop over the row's elements.
// On GPUs, several lanes share a row, so no vectorization is needed.
#if defined(__CUDACC__) || defined(SYCL_LANGUAGE_VERSION) || defined(OPTIMUS_NO_SIMD)
#define OPTIMUS_SIMD
#define OPTIMUS_SIMD_SUM(name)
#else
#define OPTIMUS_SIMD _Pragma("omp simd")
#define OPTIMUS_SIMD_SUM(name) OPTIMUS_PRAGMA(omp simd reduction(+ : name))
#define OPTIMUS_PRAGMA(text) _Pragma(#text)
#endif

namespace optimus {

struct BFloat16 {
  uint16_t bits;
};

struct Half {
  uint16_t bits;
};

template <class To, class From>
OPTIMUS_FN To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

OPTIMUS_FN float to_float(float value) { return value; }

OPTIMUS_FN float to_float(BFloat16 value) {
  return bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

OPTIMUS_FN float to_float(Half value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t rest = static_cast<uint32_t>(value.bits & 0x7fffu) << 13;
  // The exponent biases of fp32 and fp16 differ by 112. Multiplication by 2^112 also converts
  // subnormal fp16 numbers to normal fp32 numbers.
  const uint32_t finite = bit_cast<uint32_t>(bit_cast<float>(rest) * 0x1p112f);
  return bit_cast<float>(sign | (rest >= 0x0f800000u ? rest | 0x7f800000u : finite));
}

template <class T>
OPTIMUS_FN T from_float(float value);

template <>
OPTIMUS_FN float from_float<float>(float value) {
  return value;
}

// Rounds to nearest, ties to even; NaN stays NaN.
template <>
OPTIMUS_FN BFloat16 from_float<BFloat16>(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return BFloat16{static_cast<uint16_t>(nan ? 0x7fc0u : rounded)};
}

template <>
OPTIMUS_FN Half from_float<Half>(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t rest = bits & 0x7fffffffu;
  // Normal results: subtract 112 from the exponent, round to nearest, ties to even, at bit 13.
  const uint32_t normal = (rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13;
  // Subnormal results: adding 0.5 puts the unit of 2^-24 at the last bit of the fraction.
  const uint32_t tiny = bit_cast<uint32_t>(bit_cast<float>(rest) + 0.5f) - 0x3f000000u;
  const uint32_t large = rest > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t finite = rest < 0x38800000u ? tiny : normal;
  return Half{static_cast<uint16_t>(sign | (rest >= 0x477ff000u ? large : finite))};
}

#if defined(__CUDA_ARCH__)
OPTIMUS_FN float exp_float(float x) { return expf(x); }
#else
// e^x with an error below 1 unit in the last place (tests/kernels measures it): x = n ln 2 + r with
// |r| <= ln 2 / 2, a polynomial for e^r, and 2^n in two factors so that results cover subnormal
// numbers and infinity. NaN gives NaN: both comparisons are false for it.
OPTIMUS_FN float exp_float(float x) {
  x = x > 89.0f ? 89.0f : x;
  x = x < -104.0f ? -104.0f : x;
  const float shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: rounds to an integer
  const float n = shifted - 12582912.0f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const int32_t power = static_cast<int32_t>(bit_cast<uint32_t>(shifted) & 0x7fffffu) - 0x400000;
  const int32_t half = power >> 1;
  const float first = bit_cast<float>(static_cast<uint32_t>(half + 127) << 23);
  const float second = bit_cast<float>(static_cast<uint32_t>(power - half + 127) << 23);
  return p * first * second;
}
#endif

OPTIMUS_FN float sigmoid(float x) { return 1.0f / (1.0f + exp_float(-x)); }

// `Width` consecutive elements. On a GPU, they are loaded or stored at once (up to 16 bytes). The
// address must therefore be a multiple of the size of a pack.
template <class T, int Width>
struct alignas(sizeof(T) * Width) Pack {
  T values[Width];
};

}  // namespace optimus
