// bf16 products on Intel's AMX, where compiler, system and processor have it.

#pragma once

#include <cstdint>

namespace optimus_cpu {

// C [m, n] = A [m, k] B [k, n], or that much more; dense, row-major, bf16 as bits. With `sums` C is
// not written: its values, rounded to bf16, are added there.
struct Gemm {
  const uint16_t* a;
  bool a_transposed;  // stored as [k, m]
  const uint16_t* b;
  bool b_transposed;  // stored as [n, k]
  uint16_t* c;
  bool add;
  float* sums;
  int64_t m, n, k;
};

// Whether this process may use it; asks the system for permission at the first call.
bool has_amx();
void amx_gemm(const Gemm& gemm);

}  // namespace optimus_cpu
