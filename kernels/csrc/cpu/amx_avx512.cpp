// Products of bf16 matrices on AMX tiles, for the sizes that an expert has.
//
// oneDNN compiles a kernel for every number of rows, and has half the speed of this kernel for a
// few hundred rows. Blocks of A and panels of 32 columns of B are first copied to tiles (16 rows of
// 64 bytes). Sums over k are computed in fp32 in a fixed order, so a row of the result depends
// neither on the number of threads nor on the number of other rows.

#include "amx.h"

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && \
    (defined(__clang__) ? __clang_major__ >= 14 : __GNUC__ >= 11)
#define OPTIMUS_HAS_AMX 1
#endif

#ifdef OPTIMUS_HAS_AMX

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "amx_lines.h"

namespace {

constexpr int64_t kTile = kTileRows * kTileDepth;
constexpr int64_t kPanel = 32;             // columns of C at a time: two tiles
// The tiles of A and of B must fit in the L2 cache (2 MiB) together with the rows of C.
constexpr int64_t kBytesOfA = 1 << 20;
constexpr int64_t kBytesOfB = 1 << 19;
constexpr int64_t kStreamed = 1 << 20;     // bytes of C from which stores bypass the caches
constexpr int64_t kGrain = 1 << 20;        // multiply-adds below which one thread is faster

int64_t tiles(int64_t count, int64_t size) { return (count + size - 1) / size; }

// Memory of a thread for tiles. It grows if needed.
class Scratch {
 public:
  ~Scratch() { std::free(memory_); }
  Bits* of(int64_t elements) {
    if (elements > size_) {
      std::free(memory_);
      size_ = elements;
      memory_ = static_cast<Bits*>(std::aligned_alloc(64, tiles(elements, 32) * 64));
      if (!memory_) std::abort();
    }
    return memory_;
  }

 private:
  Bits* memory_ = nullptr;
  int64_t size_ = 0;
};

struct alignas(64) Config {
  uint8_t palette = 0, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Configures the eight tile registers. The destructor restores the previous configuration, because
// other libraries expect that their configuration persists between calls.
class Tiles {
 public:
  OPTIMUS_AMX Tiles() {
    _tile_storeconfig(&before_);
    Config ours;
    ours.palette = 1;
    for (int i = 0; i < 8; ++i) ours.rows[i] = 16, ours.row_bytes[i] = 64;
    _tile_loadconfig(&ours);
  }
  OPTIMUS_AMX ~Tiles() {
    if (before_.palette)
      _tile_loadconfig(&before_);
    else
      _tile_release();
  }

 private:
  Config before_;
};

// Copies a tile of A (16 rows, 32 values of k). Transposes it if A is stored as [k, m].
OPTIMUS_AMX void tile_of_a(const optimus_cpu::Gemm& g, int64_t row, int64_t depth, Bits* to) {
  __m512i r[16];
  if (g.a_transposed) {
    load_pairs(g.a + depth * g.m + row, g.m, g.k - depth, g.m - row, r);
    transpose(r);
  } else {
    load_lines(g.a + row * g.k + depth, g.k, g.m - row, g.k - depth, r);
  }
  put(r, to);
}

// Copies the two tiles of a panel of B (32 values of k, 32 columns). Line i of a tile contains, for
// each column, the pair of values for k = 2i and k = 2i+1. The first tile has the even columns and
// the second the odd columns, because separating them needs no shuffle.
OPTIMUS_AMX void tiles_of_b(const optimus_cpu::Gemm& g, int64_t depth, int64_t column, Bits* to) {
  __m512i even[16], odd[16];
  const int64_t deep = g.k - depth, wide = g.n - column;
  if (g.b_transposed) {
    const Bits* from = g.b + column * g.k + depth;
    load_lines(from, 2 * g.k, (wide + 1) / 2, deep, even);
    transpose(even);
    put(even, to);
    load_lines(from + g.k, 2 * g.k, wide / 2, deep, odd);
    transpose(odd);
    put(odd, to + kTile);
    return;
  }
  const Bits* from = g.b + depth * g.n + column;
  const __mmask32 mask = wide >= 32 ? ~0u : (1u << wide) - 1;
  for (int i = 0; i < 16; ++i) {
    __m512i low = _mm512_setzero_si512(), high = low;
    if (2 * i < deep) low = _mm512_maskz_loadu_epi16(mask, from + 2 * i * g.n);
    if (2 * i + 1 < deep) high = _mm512_maskz_loadu_epi16(mask, from + (2 * i + 1) * g.n);
    even[i] = _mm512_mask_blend_epi16(0xaaaaaaaa, low, _mm512_slli_epi32(high, 16));
    odd[i] = _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(low, 16), high);
  }
  put(even, to);
  put(odd, to + kTile);
}

// Writes 16 rows of a complete panel as bf16, with stores that bypass the caches if `stream`.
OPTIMUS_AMX void write_whole(const optimus_cpu::Gemm& g, const float* sums, int64_t row,
                             int64_t column, bool stream) {
  const int64_t rows = std::min(kTileRows, g.m - row);
  Bits* to = g.c + row * g.n + column;
  for (int64_t i = 0; i < rows; ++i, to += g.n) {
    const __m256i even = (__m256i)_mm512_cvtneps_pbh(_mm512_load_ps(sums + i * 16));
    const __m256i odd = (__m256i)_mm512_cvtneps_pbh(_mm512_load_ps(sums + 256 + i * 16));
    const __m512i line = _mm512_or_si512(_mm512_cvtepu16_epi32(even),
                                         _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
    if (stream)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to), line);
    else
      _mm512_storeu_si512(to, line);
  }
}

// Writes up to 16 elements: replaces elements of C, adds to elements of C (g.add), or adds to
// elements of g.sums.
OPTIMUS_AMX inline void write_part(const optimus_cpu::Gemm& g, __m512 value, int64_t at,
                                   int64_t count) {
  const __mmask16 mask = count >= 16 ? 0xffff : (1u << count) - 1;
  if (g.sums) {
    const __m512i rounded = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(value));
    const __m512 old = _mm512_maskz_loadu_ps(mask, g.sums + at);
    value = _mm512_add_ps(old, _mm512_castsi512_ps(_mm512_slli_epi32(rounded, 16)));
    _mm512_mask_storeu_ps(g.sums + at, mask, value);
    return;
  }
  Bits* to = g.c + at;
  if (g.add) {
    const __m512i old = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, to));
    value = _mm512_add_ps(value, _mm512_castsi512_ps(_mm512_slli_epi32(old, 16)));
  }
  _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(value));
}

// Writes 16 rows and up to 32 columns of C. `sums` has two tiles: even columns, then odd columns.
OPTIMUS_AMX void write(const optimus_cpu::Gemm& g, const float* sums, int64_t row, int64_t column,
                       bool stream) {
  if (!g.add && !g.sums && column + kPanel <= g.n)
    return write_whole(g, sums, row, column, stream);
  const __m512i first = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  const int64_t rows = std::min(kTileRows, g.m - row), left = g.n - column;
  for (int64_t i = 0; i < rows; ++i) {
    const __m512 even = _mm512_load_ps(sums + i * 16), odd = _mm512_load_ps(sums + 256 + i * 16);
    const int64_t at = (row + i) * g.n + column;
    write_part(g, _mm512_permutex2var_ps(even, first, odd), at, left);
    if (left > 16) write_part(g, _mm512_permutex2var_ps(even, second, odd), at + 16, left - 16);
  }
}

// Computes two by two tiles of C: rows row to row + 31 and the columns of panel b. `a` contains the
// tiles of these rows of A.
OPTIMUS_AMX void strip(const optimus_cpu::Gemm& g, const Bits* a, const Bits* b, int64_t depths,
                       int64_t row, int64_t column, bool stream) {
  alignas(64) float sums[4][256];
  const bool second = row + kTileRows < g.m;
  const Bits* below = a + (second ? depths * kTile : 0);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t d = 0; d < depths; ++d) {
    _tile_loadd(6, b + 2 * d * kTile, 64);
    _tile_loadd(4, a + d * kTile, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + (2 * d + 1) * kTile, 64);
    _tile_dpbf16ps(1, 4, 7);
    if (!second) continue;
    _tile_loadd(5, below + d * kTile, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  write(g, sums[0], row, column, stream);
  if (!second) return;
  _tile_stored(2, sums[2], 64);
  _tile_stored(3, sums[3], 64);
  write(g, sums[2], row + kTileRows, column, stream);
}

// Prefetches the next 32 lines of B while the current tiles are copied. The hardware does not
// prefetch these lines, because they are in different pages.
OPTIMUS_AMX inline void prefetch_b(const optimus_cpu::Gemm& g, int64_t depth, int64_t column) {
  const int64_t ahead = depth + (g.b_transposed ? 2 : 1) * kTileDepth;
  if (ahead + kTileDepth > g.k || column + kPanel > g.n) return;
  const Bits* from = g.b + (g.b_transposed ? column * g.k + ahead : ahead * g.n + column);
  for (int i = 0; i < 32; ++i)
    _mm_prefetch(reinterpret_cast<const char*>(from + i * (g.b_transposed ? g.k : g.n)),
                 _MM_HINT_T0);
}

// Copies share i of the tiles of A in rows begin to end - 1. A share is a row of tiles or, if A is
// transposed, a column of tiles, so that A is read in memory order.
OPTIMUS_AMX void lay_out_a(const optimus_cpu::Gemm& g, int64_t begin, int64_t end, int64_t i,
                           int64_t depths, Bits* a) {
  const int64_t rows = tiles(end - begin, kTileRows);
  for (int64_t j = 0; j < (g.a_transposed ? rows : depths); ++j) {
    const int64_t row = g.a_transposed ? j : i, depth = g.a_transposed ? i : j;
    tile_of_a(g, begin + row * kTileRows, depth * kTileDepth, a + (row * depths + depth) * kTile);
  }
}

// Copies share i of the panels of B in columns begin to end - 1. As in lay_out_a, a share is chosen
// so that B is read in memory order.
OPTIMUS_AMX void lay_out_b(const optimus_cpu::Gemm& g, int64_t begin, int64_t end, int64_t i,
                           int64_t depths, Bits* b) {
  const int64_t panels = tiles(end - begin, kPanel);
  for (int64_t j = 0; j < (g.b_transposed ? depths : panels); ++j) {
    const int64_t panel = g.b_transposed ? i : j, depth = g.b_transposed ? j : i;
    prefetch_b(g, depth * kTileDepth, begin + panel * kPanel);
    tiles_of_b(g, depth * kTileDepth, begin + panel * kPanel,
               b + (panel * depths + depth) * 2 * kTile);
  }
}

// Computes rows row to row + 31 and columns begin to end - 1 of C.
OPTIMUS_AMX void strips(const optimus_cpu::Gemm& g, const Bits* a, const Bits* b, int64_t depths,
                        int64_t row, int64_t begin, int64_t end, bool stream) {
  Tiles configured;
  for (int64_t column = begin; column < end; column += kPanel)
    strip(g, a, b + (column - begin) / kPanel * depths * 2 * kTile, depths, row, column, stream);
}

bool find_amx() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool tile_bf16 = (d >> 22 & 1) && (d >> 24 & 1);
  if (!tile_bf16 || !__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a >> 5 & 1)) return false;
  constexpr int kAskPermission = 0x1023, kTileData = 18;  // arch_prctl's ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kAskPermission, kTileData) == 0;
}

}  // namespace

namespace optimus_cpu {

bool has_amx() {
  static const bool found = find_amx();
  return found;
}

void amx_gemm(const Gemm& g) {
  thread_local Scratch scratch_a, scratch_b;
  const int64_t depths = tiles(g.k, kTileDepth), deep = std::max<int64_t>(1, depths) * kTileDepth;
  const auto most = [&](int64_t bytes, int64_t count) {  // rows or columns copied at a time
    return std::min(std::max<int64_t>(1, bytes / (2 * deep * 32)), tiles(count, 32)) * 32;
  };
  const int64_t high = most(kBytesOfA, g.m), wide = most(kBytesOfB, g.n);
  Bits *a = scratch_a.of(high * deep), *b = scratch_b.of(wide * deep);
  const bool many = g.m * g.n * g.k > kGrain;
  const bool stream = g.m * g.n * 2 > kStreamed && g.n % 32 == 0 &&
                      reinterpret_cast<uintptr_t>(g.c) % 64 == 0;
#pragma omp parallel if (many)
  for (int64_t top = 0; top < g.m; top += high) {
    const int64_t bottom = std::min(top + high, g.m);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < (g.a_transposed ? depths : tiles(bottom - top, kTileRows)); ++i)
      lay_out_a(g, top, bottom, i, depths, a);
    for (int64_t left = 0; left < g.n; left += wide) {
      const int64_t right = std::min(left + wide, g.n);
#pragma omp for schedule(static)
      for (int64_t i = 0; i < (g.b_transposed ? tiles(right - left, kPanel) : depths); ++i)
        lay_out_b(g, left, right, i, depths, b);
#pragma omp for schedule(static)
      for (int64_t row = top; row < bottom; row += 32)
        strips(g, a + (row - top) * deep, b, depths, row, left, right, stream);
    }
  }
  if (stream) _mm_sfence();
}

}  // namespace optimus_cpu

#else

namespace optimus_cpu {
bool has_amx() { return false; }
void amx_gemm(const Gemm&) {}
}  // namespace optimus_cpu

#endif
