// ladder.cu: the ladder of attention kernels as a program of its own; see ladder.h. From the top folder:
//   nvcc -std=c++17 -O3 -arch=native -diag-suppress 1675 dev/ladder/ladder.cu -lcublasLt -o build/ladder
//   (on Hopper -gencode=arch=compute_90a,code=sm_90a in place of -arch=native: rung 5 needs it)
//   build/ladder [SEQUENCES TOKENS]
// The shape is that of the 125m preset: 12 heads of 64 in 2 groups; each query selects 16 blocks of 64 tokens.
#include "ladder.h"

int main(int argc, char** argv) {
    NsaShape s;
    s.B = argc > 1 ? std::atoi(argv[1]) : 4, s.T = s.queries = argc > 2 ? std::atoi(argv[2]) : 4096;
    s.H = 12, s.G = 2, s.D = 64, s.l = 32, s.d = 16, s.slc_block = 64, s.slc_count = 16, s.window = 512, s.F = 128;
    try {
        if (s.B < 1 || s.T < 1) fail_usage("usage: ladder [SEQUENCES TOKENS]");
        Cuda dev(0);
        dev.check_shape(s);
        return run_ladder(dev, s);
    } catch (const Error& e) {
        std::fprintf(stderr, "ladder: error: %s\n", e.what());
        return e.status;
    }
}
