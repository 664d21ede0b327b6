// Implementation of interface.h on CPUs: checks sizes and calls the kernels of the best instruction
// set that the processor supports.
//
// This file is compiled for the base architecture; *_avx2.cpp and *_avx512.cpp are compiled for
// x86-64 levels 3 and 4. For tests, OPTIMUS_CPU_ISA=portable|avx2|avx512 selects an instruction
// set. OPTIMUS_PORTABLE_ALONE is defined if only the portable kernels are compiled: for processors
// other than x86-64, and by compilers that do not support these levels.

#include <cstdlib>
#include <cstring>

#include "amx.h"
#include "interface.h"
#include "kernels.h"

namespace {

using optimus_cpu::Kernels;

// Number of slots in a piece of `route`: small enough to get pieces for all threads, and large
// enough that the time to clear E counts per piece does not matter.
constexpr int64_t kPieceSlots = 4096;

const Kernels& choose() {
  const char* asked = std::getenv("OPTIMUS_CPU_ISA");
  const auto allowed = [asked](const char* name) { return !asked || !std::strcmp(asked, name); };
#if !defined(OPTIMUS_PORTABLE_ALONE)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi2");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd");
  if (avx512 && allowed("avx512")) return optimus_cpu::avx512_kernels;
  if (avx2 && (allowed("avx2") || allowed("avx512"))) return optimus_cpu::avx2_kernels;
#endif
  return optimus_cpu::portable_kernels;
}

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

int64_t pieces_of(int64_t slots) { return slots <= kPieceSlots ? 1 : (slots - 1) / kPieceSlots + 1; }

bool negative(int64_t a, int64_t b = 0, int64_t c = 0) { return a < 0 || b < 0 || c < 0; }

}  // namespace

extern "C" {

int optimus_kernels_abi(void) { return OPTIMUS_ABI; }

// Only in the CPU library: returns the name of the instruction set in use.
OPTIMUS_API const char* optimus_cpu_isa(void) {
#if !defined(OPTIMUS_PORTABLE_ALONE)
  if (&kernels() == &optimus_cpu::avx512_kernels) return "avx512";
  if (&kernels() == &optimus_cpu::avx2_kernels) return "avx2";
#endif
  return "portable";
}

// Returns whether optimus_cpu_gemm works on this machine.
OPTIMUS_API int optimus_cpu_has_gemm(void) {
#if !defined(OPTIMUS_PORTABLE_ALONE)
  return &kernels() == &optimus_cpu::avx512_kernels && optimus_cpu::has_amx();
#else
  return 0;
#endif
}

// Only in the CPU library: computes c [m, n] = a [m, k] b [k, n] in bf16. If `add` is 1, the
// product is added to c. If `add` is 2, c is fp32 and the product is rounded to bf16 and added.
// Transposed operands are stored as [k, m] and [n, k]. Returns 0, or a negative code if a size is
// negative or this machine does not support AMX; c is then unchanged.
OPTIMUS_API int optimus_cpu_gemm(const void* a, int a_transposed, const void* b, int b_transposed,
                                 void* c, int add, int64_t m, int64_t n, int64_t k) {
  if (negative(m, n, k)) return OPTIMUS_BAD_SIZE;
  if (!optimus_cpu_has_gemm()) return OPTIMUS_BAD_DTYPE;
#if !defined(OPTIMUS_PORTABLE_ALONE)
  optimus_cpu::amx_gemm({static_cast<const uint16_t*>(a), a_transposed != 0,
                         static_cast<const uint16_t*>(b), b_transposed != 0,
                         add == 2 ? nullptr : static_cast<uint16_t*>(c), add == 1,
                         add == 2 ? static_cast<float*>(c) : nullptr, m, n, k});
#endif
  return 0;
}

// Only in the CPU library: adds the squares of x [size] to bins [2 * 640 + 1]. size is a multiple
// of 32. squares.py describes the bins.
OPTIMUS_API int optimus_cpu_square_bins(const float* x, int64_t size, int64_t* bins) {
  if (negative(size)) return OPTIMUS_BAD_SIZE;
  kernels().square_bins(x, size / 32, bins);
  return 0;
}

// Only in the CPU library: as optimus_adamw, but writes the states after the update to other
// memory, with stores that do not first read this memory into a cache.
OPTIMUS_API int optimus_cpu_adamw_into(int grad_dtype, int param_dtype, const OptimusAdamw* with,
                                       int64_t size, const void* grad, const float* master,
                                       const float* exp_avg, const float* exp_avg_sq, void* param,
                                       float* new_master, float* new_exp_avg,
                                       float* new_exp_avg_sq) {
  if (negative(size)) return OPTIMUS_BAD_SIZE;
  return kernels().adamw(grad_dtype, param_dtype, with, size, grad, {master, exp_avg, exp_avg_sq},
                         {new_master, new_exp_avg, new_exp_avg_sq}, param);
}

int64_t optimus_route_scratch(int64_t tokens, int64_t top_k, int64_t num_experts) {
  return pieces_of(tokens * top_k) * num_experts;
}

int optimus_route(const int64_t* chosen, int64_t tokens, int64_t top_k, int64_t first_expert,
                  int64_t num_experts, int32_t* offsets, int32_t* row_token, int32_t* row_slot,
                  int32_t* slot_row, int32_t* scratch, int64_t scratch_len, void*) {
  if (negative(tokens, top_k, num_experts) || (top_k && tokens > INT32_MAX / top_k) ||
      scratch_len < optimus_route_scratch(tokens, top_k, num_experts))
    return OPTIMUS_BAD_SIZE;
  kernels().route(chosen, tokens, top_k, first_expert, num_experts, pieces_of(tokens * top_k),
                  offsets, row_token, row_slot, slot_row, scratch);
  return 0;
}

int optimus_gather(int dtype, const void* x, const int32_t* row_token, int64_t rows, int64_t hidden,
                   void* out, void*) {
  if (negative(rows, hidden)) return OPTIMUS_BAD_SIZE;
  return kernels().gather(dtype, x, row_token, rows, hidden, out);
}

int optimus_swiglu(int dtype, const void* h, int64_t rows, int64_t inner, void* a, void*) {
  if (negative(rows, inner)) return OPTIMUS_BAD_SIZE;
  return kernels().swiglu(dtype, h, rows, inner, a);
}

int optimus_swiglu_backward(int dtype, const void* h, const void* da, const void* weights,
                            const int32_t* row_slot, int64_t rows, int64_t inner, void* dh,
                            void* a_scaled, float* dweights, void*) {
  if (negative(rows, inner)) return OPTIMUS_BAD_SIZE;
  return kernels().swiglu_backward(dtype, h, da, weights, row_slot, rows, inner, dh, a_scaled,
                                   dweights);
}

int optimus_reduce(int dtype, const void* y, const void* weights, const int32_t* slot_row,
                   int64_t tokens, int64_t top_k, int64_t hidden, void* out, void*) {
  if (negative(tokens, top_k, hidden)) return OPTIMUS_BAD_SIZE;
  return kernels().reduce(dtype, y, weights, slot_row, tokens, top_k, hidden, out);
}

int optimus_reduce_backward(int dtype, const void* dout, const void* y, const void* weights,
                            const int32_t* row_slot, int64_t rows, int64_t top_k, int64_t hidden,
                            void* dy, float* dweights, void*) {
  if (negative(rows, top_k, hidden)) return OPTIMUS_BAD_SIZE;
  return kernels().reduce_backward(dtype, dout, y, weights, row_slot, rows, top_k, hidden, dy,
                                   dweights);
}

int optimus_adamw(int grad_dtype, int param_dtype, const OptimusAdamw* with, int64_t size,
                  const void* grad, float* master, float* exp_avg, float* exp_avg_sq, void* param,
                  void*) {
  if (negative(size)) return OPTIMUS_BAD_SIZE;
  return kernels().adamw(grad_dtype, param_dtype, with, size, grad, {master, exp_avg, exp_avg_sq},
                         {master, exp_avg, exp_avg_sq}, param);
}
}
