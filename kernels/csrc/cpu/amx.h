// bf16 products on Intel's AMX, if compiler, system and processor support it.

#pragma once

#include <cstdint>

namespace optimus_cpu {

// Operands of a product: C = A B, or C += A B if `add`, with A [m, k], B [k, n] and C [m, n].
// Matrices are contiguous, row-major and in bf16, stored as bits. If `sums`, fp32 [m, n], is not
// null, the product is rounded to bf16 and added to `sums`, and C is not written.
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

// Returns whether this process may use AMX; the first call asks the system for permission.
bool has_amx();
void amx_gemm(const Gemm& gemm);

}  // namespace optimus_cpu
