#define OPTIMUS_ISA portable_kernels
#include "kernels.inc"
