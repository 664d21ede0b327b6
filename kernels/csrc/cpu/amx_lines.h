// Loads and stores of an AMX tile: 16 lines of 64 bytes, from rows or columns of a matrix.

#pragma once

#include <immintrin.h>

#include <cstdint>

#define OPTIMUS_AMX __attribute__((target("amx-tile,amx-bf16,avx512bf16,avx512bw,avx512vl")))

namespace {

using Bits = uint16_t;
constexpr int64_t kTileRows = 16, kTileDepth = 32;

// Transposes 16 rows of 16 words.
OPTIMUS_AMX inline void transpose(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// Loads 16 rows of 32 elements. Elements beyond `rows` and `columns` are zero.
OPTIMUS_AMX inline void load_lines(const Bits* from, int64_t stride, int64_t rows, int64_t columns,
                                   __m512i (&r)[16]) {
  const __mmask32 mask = columns >= 32 ? ~0u : (1u << columns) - 1;
  for (int i = 0; i < 16; ++i)
    r[i] = i < rows ? _mm512_maskz_loadu_epi16(mask, from + i * stride) : _mm512_setzero_si512();
}

// Loads 32 rows of up to 16 elements as 16 lines of pairs: word j of line i contains the elements
// of rows 2i and 2i+1 in column j.
OPTIMUS_AMX inline void load_pairs(const Bits* from, int64_t stride, int64_t rows, int64_t columns,
                                   __m512i (&r)[16]) {
  const __mmask16 mask = columns >= 16 ? 0xffff : (1u << columns) - 1;
  for (int i = 0; i < 16; ++i) {
    const int64_t even = 2 * i;
    __m256i low = _mm256_setzero_si256(), high = low;
    if (even < rows) low = _mm256_maskz_loadu_epi16(mask, from + even * stride);
    if (even + 1 < rows) high = _mm256_maskz_loadu_epi16(mask, from + (even + 1) * stride);
    r[i] = _mm512_or_si512(_mm512_cvtepu16_epi32(low),
                           _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
  }
}

OPTIMUS_AMX inline void put(const __m512i (&r)[16], Bits* to) {
  for (int i = 0; i < 16; ++i) _mm512_store_si512(to + i * kTileDepth, r[i]);
}

}  // namespace
