// The functions that every backend (cpu, cuda, sycl) exports. They launch kernels;
// optimus_kernels/library.py calls them.
//
// dtype: 0 fp32, 1 bf16, 2 fp16; arithmetic and sums are fp32. Pointers refer to memory of the
// backend's device; tensors are contiguous in row-major order. `stream` is a cudaStream_t for
// cuda, a sycl::queue* for sycl, and nullptr for cpu. Functions of a GPU backend return before the
// work is done. The functions return 0 on success, otherwise a negative code defined below or a
// positive code of the backend. Sizes may be 0. Results do not depend on the number of threads.
//
// T tokens, K experts per token (top_k), N = T*K slots (one for each token and expert of the
// token), E local experts (num_experts), R rows (one for each slot of a local expert). The argument
// `rows` is R, or N if R is not known on the host. Elements of row_token and row_slot from R on are
// -1; outputs of such rows are zero (swiglu: undefined), and outputs of slots without a row are
// zero.

#pragma once

#include <stdint.h>

#if defined(_WIN32)
#define OPTIMUS_API __declspec(dllexport)
#else
#define OPTIMUS_API __attribute__((visibility("default")))
#endif

#define OPTIMUS_ABI 2            // incremented when a signature or its semantics change
#define OPTIMUS_BAD_DTYPE (-1)   // dtype is not 0, 1 or 2
#define OPTIMUS_BAD_SIZE (-2)    // a size is negative, T*K exceeds int32, or scratch is too small

// Coefficients of an AdamW update, each rounded once from fp64 to fp32.
struct OptimusAdamw {
  float grad_scale;        // factor of the gradient, applied first
  float decay;             // 1 - lr * weight_decay
  float lerp;              // 1 - beta1
  float beta2;
  float one_minus_beta2;
  float root_bias2;        // sqrt(1 - beta2^step)
  float eps;
  float minus_step;        // -lr / (1 - beta1^step)
};

extern "C" {

OPTIMUS_API int optimus_kernels_abi(void);

// Returns the number of int32 scratch elements that optimus_route needs.
OPTIMUS_API int64_t optimus_route_scratch(int64_t tokens, int64_t top_k, int64_t num_experts);

// Computes offsets [E+1], row_token [N], row_slot [N] and slot_row [T, K] from chosen [T, K].
// Experts first_expert to first_expert + E - 1 are local; slots of other experts get no row. Rows
// are ordered by expert, then by slot.
OPTIMUS_API int optimus_route(const int64_t* chosen, int64_t tokens, int64_t top_k,
                              int64_t first_expert, int64_t num_experts, int32_t* offsets,
                              int32_t* row_token, int32_t* row_slot, int32_t* slot_row,
                              int32_t* scratch, int64_t scratch_len, void* stream);

// out [rows, hidden] = x[row_token]; zeros where row_token is -1.
OPTIMUS_API int optimus_gather(int dtype, const void* x, const int32_t* row_token, int64_t rows,
                               int64_t hidden, void* out, void* stream);

// a [rows, inner] = silu(h[:, :inner]) * h[:, inner:]; h [rows, 2 inner].
OPTIMUS_API int optimus_swiglu(int dtype, const void* h, int64_t rows, int64_t inner, void* a,
                               void* stream);

// Backward of w * a with a = swiglu(h), where the routing weight w of a row is the element
// row_slot[row] of weights [T, K]. da [rows, inner] is the gradient of w * a. Computes
//   dh [rows, 2 inner]      the gradient of h;
//   a_scaled [rows, inner]  w * a; may be the same memory as da;
//   dweights fp32 [T, K]    element row_slot[r] is the dot product <da, a> of row r. The caller
//                           must zero dweights if a slot may have no row.
OPTIMUS_API int optimus_swiglu_backward(int dtype, const void* h, const void* da,
                                        const void* weights, const int32_t* row_slot, int64_t rows,
                                        int64_t inner, void* dh, void* a_scaled, float* dweights,
                                        void* stream);

// out [tokens, hidden]: out[t] = sum of weights[t, k] * y[slot_row[t, k]] over k, added in the
// order of k. If weights is null, all weights are 1.
OPTIMUS_API int optimus_reduce(int dtype, const void* y, const void* weights,
                               const int32_t* slot_row, int64_t tokens, int64_t top_k,
                               int64_t hidden, void* out, void* stream);

// Computes dy [rows, hidden] = weights[slot] * dout[token], and dweights fp32 [T, K], whose element
// row_slot[r] is <dout, y> of row r. The caller must zero dweights if a slot may have no row.
OPTIMUS_API int optimus_reduce_backward(int dtype, const void* dout, const void* y,
                                        const void* weights, const int32_t* row_slot, int64_t rows,
                                        int64_t top_k, int64_t hidden, void* dy, float* dweights,
                                        void* stream);

// Updates master, exp_avg and exp_avg_sq, fp32 [size], in place with one step of AdamW. grad [size]
// has grad_dtype. param [size] has param_dtype (bf16 or fp16) and receives the rounded master;
// param may be null with param_dtype 0. `with` is in host memory and is read before the function
// returns. adamw.h defines the rounding.
OPTIMUS_API int optimus_adamw(int grad_dtype, int param_dtype, const OptimusAdamw* with,
                              int64_t size, const void* grad, float* master, float* exp_avg,
                              float* exp_avg_sq, void* param, void* stream);
}
