#define OPTIMUS_ADAMW avx2_adamw
#define OPTIMUS_ISA avx2_kernels
#include "kernels.inc"
