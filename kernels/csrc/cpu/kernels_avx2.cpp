#define OPTIMUS_ISA avx2_kernels
#include "kernels.inc"
