// Table of the CPU kernels of one instruction set; dispatch.cpp chooses a table.

#pragma once

#include <cstdint>

struct OptimusAdamw;

namespace optimus_cpu {

// Flat states of AdamW.
template <class T>
struct States {
  T *master, *exp_avg, *exp_avg_sq;
  States operator+(int64_t offset) const {
    return {master + offset, exp_avg + offset, exp_avg_sq + offset};
  }
};

// Reads the states `from` and writes the states `to`: the same memory, or memory that does not
// overlap.
using Adamw = int(int grad_dtype, int param_dtype, const OptimusAdamw* with, int64_t size,
                  const void* grad, const States<const float>& from, const States<float>& to,
                  void* param);

struct Kernels {
  void (*route)(const int64_t* chosen, int64_t tokens, int64_t top_k, int64_t first_expert,
                int64_t num_experts, int64_t pieces, int32_t* offsets, int32_t* row_token,
                int32_t* row_slot, int32_t* slot_row, int32_t* scratch);
  int (*gather)(int dtype, const void* x, const int32_t* row_token, int64_t rows, int64_t hidden,
                void* out);
  int (*swiglu)(int dtype, const void* h, int64_t rows, int64_t inner, void* a);
  int (*swiglu_backward)(int dtype, const void* h, const void* da, const void* weights,
                         const int32_t* row_slot, int64_t rows, int64_t inner, void* dh,
                         void* a_scaled, float* dweights);
  int (*reduce)(int dtype, const void* y, const void* weights, const int32_t* slot_row,
                int64_t tokens, int64_t top_k, int64_t hidden, void* out);
  int (*reduce_backward)(int dtype, const void* dout, const void* y, const void* weights,
                         const int32_t* row_slot, int64_t rows, int64_t top_k, int64_t hidden,
                         void* dy, float* dweights);
  Adamw* adamw;
  void (*square_bins)(const float* x, int64_t blocks, int64_t* bins);
};

// Defined in the files adamw_*.cpp, which are compiled without contraction of products and sums.
Adamw portable_adamw, avx2_adamw, avx512_adamw;

extern const Kernels portable_kernels;
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;

}  // namespace optimus_cpu
