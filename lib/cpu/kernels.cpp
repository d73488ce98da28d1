// kernels.cpp: matrix products and tiled attention of the CPU engine as an object of their own. They want -O3 and
// are a third of what there is to compile. The Makefile compiles each .cpp of lib/ once, beside the programs, which
// then have -DCOMPILED_APART. A program that is compiled in one piece has them from the headers.
#undef COMPILED_APART
#include "attention.h"

template class Gemm<float>;
template class Gemm<double>;
