// cuda_runtime.h: the emulator in place of the toolkit's, found by -I.
#include "cuda_on_cpu.h"
