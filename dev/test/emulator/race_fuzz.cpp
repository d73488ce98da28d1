// race_fuzz.cpp: the CHECK build's race detector against an exact oracle, on random programs. A program is a few blocks
// of 96 threads that make STEPS steps over a few words of shared or device memory: each thread reads, writes or
// atomically updates one or does nothing, and between two steps stands nothing, a __syncwarp() or a __syncthreads().
// The detector must accuse exactly the programs that have a race.
//   g++ -std=c++17 -O1 -g -Wall -Wextra -fstack-clash-protection -fsanitize=thread,undefined
//   -fno-sanitize-recover=undefined
//       -c dev/test/emulator/race_fuzz.cpp -o build/race_fuzz_check.o
//   g++ build/race_fuzz_check.o -fsanitize=undefined -o build/race_fuzz_check
// ./race_fuzz_check [number of programs, standard 1000] [first program, standard 0]
#include "../../../lib/cuda/common.cuh"

#include <sys/wait.h>

#ifndef EMU_CHECK
#error "race_fuzz tests the CHECK build: compile with -fsanitize=thread and link without"
#endif

constexpr int THREADS = 96, STEPS = 6, WORDS = 4, MAX_BLOCKS = 3;
enum Action : unsigned char { NOTHING, READ, WRITE, UPDATE };
enum Sync : unsigned char { NO_SYNC, WARP_SYNC, BLOCK_SYNC };
struct Program {
    int blocks;
    bool shared;  // the words: shared memory, each block its own, or device memory
    Action action[STEPS][MAX_BLOCKS][THREADS];
    unsigned char word[STEPS][MAX_BLOCKS][THREADS];
    Sync sync[STEPS];  // after the step
};

__global__ void run_program(const Program* p, float* device_words, float* sums) {
    SHARED(float, shared_words, [WORDS]);
    if (threadIdx.x < WORDS) shared_words[threadIdx.x] = 0;
    __syncthreads();
    float* words = p->shared ? shared_words : device_words;
    float sum = 0;
    for (int s = 0; s < STEPS; s++) {
        float& w = words[p->word[s][blockIdx.x][threadIdx.x]];
        const Action action = p->action[s][blockIdx.x][threadIdx.x];
        if (action == READ) sum += w;
        if (action == WRITE) w = float(s);
        if (action == UPDATE) atomicAdd(&w, 1.0f);
        if (p->sync[s] == WARP_SYNC) __syncwarp();
        if (p->sync[s] == BLOCK_SYNC) __syncthreads();
    }
    sums[blockIdx.x * THREADS + threadIdx.x] = sum;
}

// Whether any two accesses of different threads to one word conflict (not two
// reads, not two updates) and nothing orders them. Nothing orders different blocks.
static bool has_race(const Program& p) {
    struct Step {
        int step, block, thread;
    };
    std::vector<Step> all;
    for (int s = 0; s < STEPS; s++)
        for (int b = 0; b < p.blocks; b++)
            for (int t = 0; t < THREADS; t++)
                if (p.action[s][b][t] != NOTHING) all.push_back({s, b, t});
    for (size_t i = 0; i < all.size(); i++)
        for (size_t j = i + 1; j < all.size(); j++) {
            const Step &x = all[i], &y = all[j];
            const Action ax = p.action[x.step][x.block][x.thread], ay = p.action[y.step][y.block][y.thread];
            if ((x.block == y.block && x.thread == y.thread) ||
                p.word[x.step][x.block][x.thread] != p.word[y.step][y.block][y.thread])
                continue;
            if ((ax == ay && ax != WRITE) || (p.shared && x.block != y.block)) continue;
            bool ordered = false;
            for (int s = x.step; s < y.step; s++)
                if (x.block == y.block &&
                    (p.sync[s] == BLOCK_SYNC || (p.sync[s] == WARP_SYNC && x.thread / 32 == y.thread / 32)))
                    ordered = true;
            if (!ordered) return true;
        }
    return false;
}

// Steps are mostly of one kind, often sparse, and in some programs blocks or warps keep apart, so that many programs
// have no race.
static Program draw_program(uint64_t number) {
    uint64_t draws = 0;
    auto below = [&](uint64_t n) { return random_below(n, number, random_stream(RANDOM_TEST), draws++); };
    enum { ANY_WORD, WORD_OF_BLOCK, WORD_OF_WARP };
    Program p = {};
    p.shared = below(2), p.blocks = p.shared ? 1 : 1 + int(below(MAX_BLOCKS));
    const uint64_t density = 1 + below(40), writes = below(3), words = below(3);
    if (words == WORD_OF_WARP) p.blocks = 1;
    for (int s = 0; s < STEPS; s++) {
        if (words == WORD_OF_WARP) p.sync[s] = below(6) ? WARP_SYNC : NO_SYNC;
        else p.sync[s] = below(3) ? BLOCK_SYNC : Sync(below(3));
        const uint64_t kind = below(4), owner = words == WORD_OF_WARP ? below(32) : below(THREADS);
        for (int b = 0; b < p.blocks; b++)
            for (int t = 0; t < THREADS; t++) {
                if (below(40) >= density) continue;
                const int word = words == WORD_OF_BLOCK ? b : words == WORD_OF_WARP ? t / 32 : int(below(WORDS));
                const bool owns = uint64_t(words == WORD_OF_WARP ? t % 32 : t) == owner;
                Action action = below(10) < writes ? WRITE : READ;
                if (kind == 0) action = READ;
                if (kind == 1) action = UPDATE;
                if (kind == 2) action = owns ? WRITE : NOTHING;
                p.word[s][b][t] = (unsigned char)word, p.action[s][b][t] = action;
            }
    }
    return p;
}

static bool detector_accuses(const Program& p, uint64_t seed) {
    std::fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        if (!std::freopen("/dev/null", "w", stderr)) _exit(0);
        emu::report_source_lines = false;
        emu::seed(seed);
        Program* device_program;
        float *words, *sums;
        CUDA_CHECK(cudaMalloc(&device_program, sizeof p));
        CUDA_CHECK(cudaMalloc(&words, WORDS * sizeof(float)));
        CUDA_CHECK(cudaMalloc(&sums, MAX_BLOCKS * THREADS * sizeof(float)));
        CUDA_CHECK(cudaMemset(words, 0, WORDS * sizeof(float)));
        CUDA_CHECK(cudaMemcpy(device_program, &p, sizeof p, cudaMemcpyHostToDevice));
        launch<run_program>(p.blocks, THREADS, 0, nullptr, device_program, words, sums);
        _exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    return status != 0;
}

int main(int argc, char** argv) {
    const uint64_t count = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1000,
                   first = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0;
    int races = 0, passed = 0, failed = 0;
    for (uint64_t number = first; number < first + count; number++) {
        const Program p = draw_program(number);
        const bool expected = has_race(p), found = detector_accuses(p, number % 5);
        races += expected;
        (expected == found ? passed : failed)++;
        if (expected != found)
            std::printf("FAIL program %llu: %s\n", (unsigned long long)number,
                        expected ? "the race was missed" : "a false alarm");
    }
    std::printf("%d of %llu programs have a race\n", races, (unsigned long long)count);
    std::printf("%d passed, %d failed\n", passed, failed);
    return failed ? 1 : 0;
}
