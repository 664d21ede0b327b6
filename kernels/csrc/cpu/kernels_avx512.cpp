#define OPTIMUS_ADAMW avx512_adamw
#define OPTIMUS_ISA avx512_kernels
#include "kernels.inc"
