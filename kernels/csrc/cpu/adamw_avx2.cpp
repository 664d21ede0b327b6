#define OPTIMUS_ADAMW avx2_adamw
#include "adamw.inc"
