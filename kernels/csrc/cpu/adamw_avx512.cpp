#define OPTIMUS_ADAMW avx512_adamw
#include "adamw.inc"
