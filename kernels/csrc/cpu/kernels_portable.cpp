#define OPTIMUS_ADAMW portable_adamw
#define OPTIMUS_ISA portable_kernels
#include "kernels.inc"
