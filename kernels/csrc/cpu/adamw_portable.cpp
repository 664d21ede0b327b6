#define OPTIMUS_ADAMW portable_adamw
#include "adamw.inc"
