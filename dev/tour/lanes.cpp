// lanes.cpp: which elements of A, B and C a lane holds in mma.sync.m16n8k16, found by running the instructions of
// lib/cuda/common.cuh in emulation; and which banks of shared memory ldmatrix reads, with the swizzle of tiles.cuh and
// without. For page 8 of the tour. And for page 6 a sum over lanes, step by step.
//   make build/tour_lanes && build/tour_lanes
#include <cstdio>

#include "../../lib/cuda/tiles.cuh"

constexpr int D = 64;

// out [32][8]: what each lane gets of A by load_a, B by load_b_transposed and C by a product, two numbers a register.
__global__ void lanes_kernel(float* a_out, float* b_out, float* c_out) {
    DynamicShared shared;
    bf16* const tile = shared.take<bf16>(16 * D);
    const int lane = threadIdx.x % 32;
    // Element (row, column) is 16 row + column, which bf16 holds exactly up to 256.
    for (int i = lane; i < 16 * D; i += 32) {
        const int row = i / D, column = i % D;
        tile[chunk_at<D>(row, column / 8) + column % 8] =
            __float2bfloat16_rn(column < 16 ? float(16 * row + column) : 0);
    }
    __syncthreads();
    unsigned a[4], b[4];
    load_a<D>(a, tile, 0, 0);
    load_b_transposed<D>(b, tile, 0, 0);
    for (int i = 0; i < 4; i++)
        for (int half = 0; half < 2; half++) {
            a_out[lane * 8 + 2 * i + half] = __uint_as_float(half ? a[i] & 0xffff0000u : a[i] << 16);
            b_out[lane * 8 + 2 * i + half] = __uint_as_float(half ? b[i] & 0xffff0000u : b[i] << 16);
        }
    // C = A I, with the identity's first eight columns as B: c [row][column] = 16 row + column.
    unsigned identity[2];
    for (int i = 0; i < 2; i++) {
        const int row = lane % 4 * 2 + 8 * i, column = lane / 4;
        identity[i] = pack_bf16(row == column, row + 1 == column);
    }
    float c[4] = {};
    mma_m16n8k16(c, a, identity, c);
    for (int i = 0; i < 4; i++) c_out[lane * 4 + i] = c[i];
}

// steps [4][8]: what eight lanes hold before and after each step of lane_sum<8>. Lane l begins with l^2.
__global__ void sum_kernel(int* steps) {
    const int lane = threadIdx.x % 32;
    int x = lane * lane;
    if (lane < 8) steps[lane] = x;
    for (int flip = 4, step = 1; flip > 0; flip /= 2, step++) {
        x += __shfl_xor_sync(~0u, x, flip);
        if (lane < 8) steps[step * 8 + lane] = x;
    }
}

// device [32][stored], of which the first `count` of each lane belong to the fragment.
static void print_fragment(const char* name, const float* device, int stored, int count, bool transposed) {
    float values[32 * 8];
    CUDA_CHECK(cudaMemcpy(values, device, size_t(32 * stored) * sizeof(float), cudaMemcpyDeviceToHost));
    std::printf("%s: lane, then row,column of its elements\n", name);
    for (int lane = 0; lane < 32; lane++) {
        std::printf("%2d ", lane);
        for (int i = 0; i < count; i++) {
            const int value = int(values[lane * stored + i]);
            std::printf(" %d,%d", transposed ? value % 16 : value / 16, transposed ? value / 16 : value % 16);
        }
        std::printf("\n");
    }
}

int main() {
    float *a, *b, *c;
    cudaMalloc(&a, 32 * 8 * sizeof(float));
    cudaMalloc(&b, 32 * 8 * sizeof(float));
    cudaMalloc(&c, 32 * 4 * sizeof(float));
    launch<lanes_kernel>(1, 32, 16 * D * sizeof(bf16), nullptr, a, b, c);
    print_fragment("A", a, 8, 8, false);
    print_fragment("B", b, 8, 4, true);
    print_fragment("C", c, 4, 4, false);
    // A row of 64 bf16 is 128 bytes, all 32 banks; a chunk of 16 bytes is four banks.
    std::printf("banks: row, then the banks of its chunk 0 without and with the swizzle\n");
    for (int row = 0; row < 8; row++) {
        const int plain = row * D * 2 / 4 % 32, swizzled = chunk_at<D>(row, 0) * 2 / 4 % 32;
        std::printf("%d  %d-%d  %d-%d\n", row, plain, plain + 3, swizzled, swizzled + 3);
    }
    int *device_steps, steps[4][8];
    cudaMalloc(&device_steps, sizeof steps);
    launch<sum_kernel>(1, 32, 0, nullptr, device_steps);
    CUDA_CHECK(cudaMemcpy(steps, device_steps, sizeof steps, cudaMemcpyDeviceToHost));
    const char* const names[] = {"at first", "+ lane xor 4", "+ lane xor 2", "+ lane xor 1"};
    std::printf("sums: what lanes 0 to 7 hold\n");
    for (int step = 0; step < 4; step++) {
        std::printf("%-13s:", names[step]);
        for (const int value : steps[step]) std::printf(" %3d", value);
        std::printf("\n");
    }
    cudaFree(device_steps);
    cudaFree(a);
    cudaFree(b);
    cudaFree(c);
}
