#define OPTIMUS_ISA avx512_kernels
#include "kernels.inc"
