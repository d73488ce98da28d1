// onednn_gemm.h: matrix products by oneDNN, for Gemm (lib/cpu/gemm.h). C is cut into blocks, and a thread of ours
// computes each; so the sums do not depend on the number of threads, which oneDNN's own division of the work would.
#pragma once
#include <array>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <omp.h>
#include <oneapi/dnnl/dnnl.hpp>

#include "../model/bf16.h"
#include "../base/memory.h"
#include "../base/util.h"

class OneDnnGemm {
  public:
    // As Gemm's operator; bf16 rounds A and B first.
    void operator()(bool bf16, bool transpose_a, bool transpose_b, int M, int N, int K, const float* A, size_t lda,
                    const float* B, size_t ldb, bool accumulate, float* C, size_t ldc) {
        const void *a = A, *b = B;
        size_t element_bytes = sizeof(float);
        if (bf16) {
            a = round(a_rounded, A, lda, transpose_a ? K : M, transpose_a ? M : K), lda = transpose_a ? M : K;
            b = round(b_rounded, B, ldb, transpose_b ? N : K, transpose_b ? K : N), ldb = transpose_b ? K : N;
            element_bytes = sizeof(Bf16);
        }
        int most = 512;  // smaller if there would be fewer than 4 blocks
        while (most > 64 && ((M + most - 1) / most) * ((N + most - 1) / most) < 4) most /= 2;
        const int rows = block_size(M, most), columns = block_size(N, most), across = (N + columns - 1) / columns,
                  blocks = (M + rows - 1) / rows * across;
        if (int(threads.size()) < omp_get_max_threads()) threads.resize(size_t(omp_get_max_threads()));
        // oneDNN allocates as it goes, on every thread, and version 2.6 writes through the null pointers that it gets
        require_memory_left((24 + 8 * threads.size()) << 20, "a matrix product of oneDNN");
        std::string error;
#pragma omp parallel for schedule(dynamic, 1)
        for (int i = 0; i < blocks; i++) {
            const size_t m0 = size_t(i / across) * rows, n0 = size_t(i % across) * columns;
            try {
                multiply_block(threads[size_t(omp_get_thread_num())], bf16,
                               {transpose_a, transpose_b, std::min<size_t>(rows, M - m0),
                                std::min<size_t>(columns, N - n0), size_t(K), lda, ldb, ldc, accumulate},
                               (const char*)a + (transpose_a ? m0 : m0 * lda) * element_bytes,
                               (const char*)b + (transpose_b ? n0 * ldb : n0) * element_bytes, C + m0 * ldc + n0);
            } catch (const std::exception& e) {
#pragma omp critical
                error = e.what();
            }
        }
        if (!error.empty()) fail("oneDNN's product of %d x %d x %d failed: %s", M, N, K, error.c_str());
    }

  private:
    // transpose_a, transpose_b, rows, columns, K, lda, ldb, ldc, accumulate
    using Shape = std::array<size_t, 9>;
    // oneDNN's product of one shape. One thread makes and runs it, inside a parallel region, so that oneDNN starts no
    // threads of its own.
    struct Product {
        dnnl::memory::desc a, b, c;
        dnnl::matmul product;
    };
    struct Thread {
        std::map<Shape, Product> products[2];  // fp32, bf16
        std::unique_ptr<dnnl::stream> stream;
    };
    dnnl::engine engine{dnnl::engine::kind::cpu, 0};
    std::vector<Thread> threads;
    Workspace<Bf16> a_rounded, b_rounded;

    // n in blocks of at most `most`, all about equal, a multiple of 16 each.
    static int block_size(int n, int most) {
        const int blocks = (n + most - 1) / most;
        return ((n + blocks - 1) / blocks + 15) / 16 * 16;
    }
    void multiply_block(Thread& thread, bool bf16, const Shape& shape, const char* a, const char* b, float* c) {
        std::map<Shape, Product>& products = thread.products[bf16];
        auto found = products.find(shape);
        if (found == products.end()) {
            using Desc = dnnl::memory::desc;
            using Type = dnnl::memory::data_type;
            const int usual_threads = omp_get_max_threads();
            omp_set_num_threads(1);  // oneDNN plans for this number
            const auto [ta, tb, rows, columns, K, lda, ldb, ldc, accumulate] = shape;
            const Type type = bf16 ? Type::bf16 : Type::f32;
            const auto dims = [](size_t x, size_t y) { return dnnl::memory::dims{dnnl_dim_t(x), dnnl_dim_t(y)}; };
            Product p{Desc(dims(rows, K), type, ta ? dims(1, lda) : dims(lda, 1)),
                      Desc(dims(K, columns), type, tb ? dims(1, ldb) : dims(ldb, 1)),
                      Desc(dims(rows, columns), Type::f32, dims(ldc, 1)),
                      {}};
            dnnl::primitive_attr attributes;
            dnnl::post_ops sum;
            sum.append_sum(1.0f);
            if (accumulate) attributes.set_post_ops(sum);
#if DNNL_VERSION_MAJOR >= 3
            p.product = dnnl::matmul(dnnl::matmul::primitive_desc(engine, p.a, p.b, p.c, attributes));
#else
            p.product =
                dnnl::matmul(dnnl::matmul::primitive_desc(dnnl::matmul::desc(p.a, p.b, p.c), attributes, engine));
#endif
            omp_set_num_threads(usual_threads);
            if (!thread.stream) thread.stream = std::make_unique<dnnl::stream>(engine);
            if (products.size() >= 256) products.clear();  // decoding makes a shape per length
            found = products.emplace(shape, std::move(p)).first;
        }
        Product& p = found->second;
        p.product.execute(*thread.stream, {{DNNL_ARG_SRC, dnnl::memory(p.a, engine, const_cast<char*>(a))},
                                           {DNNL_ARG_WEIGHTS, dnnl::memory(p.b, engine, const_cast<char*>(b))},
                                           {DNNL_ARG_DST, dnnl::memory(p.c, engine, c)}});
        thread.stream->wait();
    }
    // x [rows, columns], rounded to bf16, without gaps between the rows.
    static const Bf16* round(Workspace<Bf16>& memory, const float* x, size_t ldx, int rows, int columns) {
        Bf16* const out = memory.get(size_t(rows) * columns);
#pragma omp parallel for schedule(static)
        for (int r = 0; r < rows; r++)
#pragma omp simd
            for (int i = 0; i < columns; i++) out[size_t(r) * columns + i] = to_bf16(x[r * ldx + i]);
        return out;
    }
};
