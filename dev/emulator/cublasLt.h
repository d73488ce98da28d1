// cublasLt.h: stands in for the part of cuBLASLt that the trainer uses: d = alpha op(a) op(b) + beta c,
// column-major, fp32 or bf16 matrices, fp32 arithmetic, strided batches. What cuBLASLt refuses with a status, this
// refuses with the same status; a matrix that reaches outside its array ends the process with a message that names it.
// Not modelled: speed, TF32 rounding, other orders of summation.
#pragma once
#include <algorithm>

#include "cuda_on_cpu.h"

enum cublasStatus_t { CUBLAS_STATUS_SUCCESS = 0, CUBLAS_STATUS_INVALID_VALUE = 7, CUBLAS_STATUS_NOT_SUPPORTED = 15 };
enum cublasOperation_t { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1 };
enum cublasComputeType_t { CUBLAS_COMPUTE_32F = 68 };
enum cudaDataType_t { CUDA_R_32F = 0, CUDA_R_16BF = 14 };
enum cublasLtMatmulDescAttributes_t { CUBLASLT_MATMUL_DESC_TRANSA = 3, CUBLASLT_MATMUL_DESC_TRANSB = 4 };
enum cublasLtMatrixLayoutAttribute_t {
    CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT = 5,
    CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET = 6
};
enum cublasLtMatmulPreferenceAttributes_t {
    CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1,
    CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK = 3,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES = 6,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES = 7,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES = 8
};
enum { CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE = 2 };
enum cublasLtMatmulAlgoConfigAttributes_t {
    CUBLASLT_ALGO_CONFIG_ID = 0,
    CUBLASLT_ALGO_CONFIG_TILE_ID = 1,
    CUBLASLT_ALGO_CONFIG_SPLITK_NUM = 2,
    CUBLASLT_ALGO_CONFIG_STAGES_ID = 6
};

namespace emu {
struct BlasHandle {};
struct MatmulDescription {
    cublasOperation_t transpose_a = CUBLAS_OP_N, transpose_b = CUBLAS_OP_N;
};
struct MatrixLayout {
    cudaDataType_t type;
    uint64_t rows, columns;
    int64_t leading;  // elements from one column to the next
    int batches = 1;
    int64_t batch_stride = 0;
    size_t element() const { return type == CUDA_R_32F ? 4 : 2; }
    size_t bytes() const {
        return (uint64_t(batches - 1) * uint64_t(batch_stride) + (columns - 1) * uint64_t(leading) + rows) * element();
    }
};
struct MatmulPreference {
    uint64_t workspace_bytes = 0;
    uint32_t reduction = 0, alignments[4] = {256, 256, 256, 256};  // of A, B, C, D
};
template <class T>
inline cublasStatus_t set_attribute(T& attribute, const void* value, size_t bytes) {
    if (!value || bytes != sizeof attribute) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(&attribute, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}
}  // namespace emu
using cublasLtHandle_t = emu::BlasHandle*;
using cublasLtMatmulDesc_t = emu::MatmulDescription*;
using cublasLtMatrixLayout_t = emu::MatrixLayout*;
using cublasLtMatmulPreference_t = emu::MatmulPreference*;
struct cublasLtMatmulAlgo_t {
    size_t workspace_bytes;
    int id;
    uint32_t alignment;  // that it asks of every matrix
};
struct cublasLtMatmulHeuristicResult_t {
    cublasLtMatmulAlgo_t algo;
    size_t workspaceSize;
    cublasStatus_t state;
    float wavesCount;
};

inline const char* cublasLtGetStatusString(cublasStatus_t s) {
    return s == CUBLAS_STATUS_NOT_SUPPORTED ? "not supported" : "refused by cublasLt_on_cpu";
}
inline cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
    return *handle = new emu::BlasHandle, CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) { return delete handle, CUBLAS_STATUS_SUCCESS; }
inline cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* d, cublasComputeType_t,
                                               cudaDataType_t scale_type) {
    if (scale_type != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
    return *d = new emu::MatmulDescription, CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d) { return delete d, CUBLAS_STATUS_SUCCESS; }
inline cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t which,
                                                     const void* value, size_t bytes) {
    switch (which) {
        case CUBLASLT_MATMUL_DESC_TRANSA: return emu::set_attribute(d->transpose_a, value, bytes);
        case CUBLASLT_MATMUL_DESC_TRANSB: return emu::set_attribute(d->transpose_b, value, bytes);
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}
inline cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType_t type, uint64_t rows,
                                                 uint64_t columns, int64_t leading) {
    return *layout = new emu::MatrixLayout{type, rows, columns, leading}, CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
    return delete layout, CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                       cublasLtMatrixLayoutAttribute_t which, const void* value,
                                                       size_t bytes) {
    if (which == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT) return emu::set_attribute(layout->batches, value, bytes);
    return emu::set_attribute(layout->batch_stride, value, bytes);
}
inline cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* p) {
    return *p = new emu::MatmulPreference, CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p) {
    return delete p, CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t p,
                                                           cublasLtMatmulPreferenceAttributes_t which,
                                                           const void* value, size_t bytes) {
    switch (which) {
        case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: return emu::set_attribute(p->workspace_bytes, value, bytes);
        case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK: return emu::set_attribute(p->reduction, value, bytes);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
            return emu::set_attribute(p->alignments[which - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES], value, bytes);
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}

namespace emu {
// Checks what can be checked without the matrices: dimensions, leading dimensions, batches and types.
inline cublasStatus_t check_shapes(const MatmulDescription& d, const MatrixLayout& a, const MatrixLayout& b,
                                   const MatrixLayout& c, const MatrixLayout& out) {
    const bool ta = d.transpose_a == CUBLAS_OP_T, tb = d.transpose_b == CUBLAS_OP_T;
    const uint64_t m = ta ? a.columns : a.rows, k = ta ? a.rows : a.columns, n = tb ? b.rows : b.columns,
                   k_of_b = tb ? b.columns : b.rows;
    if (!m || !n || !k || k != k_of_b || out.rows != m || out.columns != n || c.rows != m || c.columns != n)
        return CUBLAS_STATUS_INVALID_VALUE;
    for (const MatrixLayout* l : {&a, &b, &c, &out}) {
        if (l->leading < int64_t(l->rows) || l->batches < 1 || l->batches != out.batches || l->batch_stride < 0)
            return CUBLAS_STATUS_INVALID_VALUE;
        if (l->type != CUDA_R_32F && l->type != CUDA_R_16BF) return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    if (out.batches > 1 && uint64_t(out.batch_stride) < (n - 1) * uint64_t(out.leading) + m)
        return CUBLAS_STATUS_INVALID_VALUE;  // results would overlap
    if (a.type != b.type || c.type != out.type || (a.type == CUDA_R_32F && out.type != CUDA_R_32F))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    return CUBLAS_STATUS_SUCCESS;
}

struct Matrix {  // in device memory, or a batch of them
    char* data;
    MatrixLayout layout;
    EMU_ENGINE Matrix of_batch(size_t batch) const {
        return {data + batch * size_t(layout.batch_stride) * layout.element(), layout};
    }
    EMU_ENGINE char* at(size_t row, size_t column) const {
        return data + (column * size_t(layout.leading) + row) * layout.element();
    }
    EMU_ENGINE float get(size_t row, size_t column) const {
        const char* p = at(row, column);
        return layout.type == CUDA_R_32F ? *(const float*)p : float(*(const __nv_bfloat16*)p);
    }
    EMU_ENGINE void put(size_t row, size_t column, float value) const {
        if (layout.type == CUDA_R_32F) *(float*)at(row, column) = value;
        else *(__nv_bfloat16*)at(row, column) = __nv_bfloat16(value);
    }
    // Fails unless an array of device memory holds it. Whether it is aligned as asked.
    bool check(const char* what, uint32_t alignment) const {
        check_device_array(what, data, layout.bytes());
        return uintptr_t(data) % alignment == 0;
    }
    bool overlaps(const Matrix& o) const { return data < o.data + o.layout.bytes() && o.data < data + layout.bytes(); }
};

// A matrix as fp32, packed[k * width + i] = op(matrix)(i, k), i padded with zeros to `width`.
// by_rows: an element's row is its i, its column its k; else the other way round.
EMU_ENGINE inline std::vector<float> pack(const Matrix& m, bool by_rows, size_t width) {
    const MatrixLayout& l = m.layout;
    std::vector<float> packed((by_rows ? l.columns : l.rows) * width);
    float* out = packed.data();
    for (size_t column = 0; column < l.columns; column++) {
        EMU_ACCESS(m.at(0, column), l.rows * l.element(), READ);
        for (size_t row = 0; row < l.rows; row++)
            out[by_rows ? column * width + row : row * width + column] = m.get(row, column);
    }
    return packed;
}
// sums[j][i] = sum over k of a[k][i] b[k][j], for 16 i and 4 j: as many as fit into the vector registers.
EMU_ENGINE inline void multiply_tile(const float* a, size_t a_width, const float* b, size_t b_width, size_t depth,
                                     float (&sums)[4][16]) {
    typedef float Vector __attribute__((vector_size(16)));
    Vector s[4][4] = {};
    for (size_t k = 0; k < depth; k++) {
        Vector x[4];
        memcpy(x, a + k * a_width, sizeof x);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++)
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) s[j][i] += x[i] * b[k * b_width + size_t(j)];
    }
    memcpy(sums, s, sizeof sums);
}

struct Matmul {
    MatmulDescription description;
    float alpha, beta;
    Matrix a, b, c, out;

    EMU_ENGINE void run() const {
        const OpenRange open;
        for (size_t i = 0; i < size_t(out.layout.batches); i++)
            run_one(a.of_batch(i), b.of_batch(i), c.of_batch(i), out.of_batch(i));
        check_guards();
    }
    EMU_ENGINE void run_one(const Matrix& x, const Matrix& y, const Matrix& addend, const Matrix& result) const {
        const size_t m = result.layout.rows, n = result.layout.columns, m_padded = (m + 15) / 16 * 16,
                     n_padded = (n + 3) / 4 * 4;
        const std::vector<float> px = pack(x, description.transpose_a == CUBLAS_OP_N, m_padded);
        const std::vector<float> py = pack(y, description.transpose_b == CUBLAS_OP_T, n_padded);
        for (size_t j = 0; j < n && beta != 0; j++) EMU_ACCESS(addend.at(0, j), m * addend.layout.element(), READ);
        for (size_t j0 = 0; j0 < n; j0 += 4)
            for (size_t i0 = 0; i0 < m; i0 += 16) {
                float sums[4][16];
                multiply_tile(px.data() + i0, m_padded, py.data() + j0, n_padded, px.size() / m_padded, sums);
                for (size_t j = j0; j < j0 + 4 && j < n; j++)
                    for (size_t i = i0; i < i0 + 16 && i < m; i++) {
                        float v = alpha * sums[j - j0][i - i0];
                        if (beta != 0) v += beta * addend.get(i, j);
                        result.put(i, j, v);
                    }
            }
        for (size_t j = 0; j < n; j++) EMU_ACCESS(result.at(0, j), m * result.layout.element(), WRITE);
    }
};
inline bool no_matmul_algorithm = false;  // a test sets it: no product is supported
inline int failing_algorithms = 0;        // a test sets it: so many of the first ones are proposed, but fail
}  // namespace emu

// As many algorithms as are asked for, or none and NOT_SUPPORTED, as from cuBLASLt; they compute the same. They ask for
// all the workspace and all the alignment that the preference allows, so that a caller who then gives less is caught.
inline cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t d,
                                                     cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                                     cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t out,
                                                     cublasLtMatmulPreference_t preference, int wanted,
                                                     cublasLtMatmulHeuristicResult_t* results, int* found) {
    if (!handle || !d || !a || !b || !c || !out || !preference || wanted < 1 || !results || !found)
        return CUBLAS_STATUS_INVALID_VALUE;
    *found = 0;
    const cublasStatus_t s = emu::check_shapes(*d, *a, *b, *c, *out);
    if (s != CUBLAS_STATUS_SUCCESS) return s;
    if (emu::no_matmul_algorithm) return CUBLAS_STATUS_NOT_SUPPORTED;
    const uint32_t alignment = *std::min_element(preference->alignments, preference->alignments + 4);
    // cuBLASLt has slow kernels for matrices that are aligned to less, the first or a later one of a batch
    if (alignment < 16) return CUBLAS_STATUS_NOT_SUPPORTED;
    for (const emu::MatrixLayout* l : {a, b, c, out})
        if (l->batches > 1 && uint64_t(l->batch_stride) * l->element() % 16) return CUBLAS_STATUS_NOT_SUPPORTED;
    for (*found = 0; *found < wanted; ++*found)
        results[*found] = {
            {preference->workspace_bytes, *found, alignment}, preference->workspace_bytes, CUBLAS_STATUS_SUCCESS, 1.0f};
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t* algo,
                                                           cublasLtMatmulAlgoConfigAttributes_t which, void* value,
                                                           size_t bytes, size_t* written) {
    const int32_t number = which == CUBLASLT_ALGO_CONFIG_ID ? algo->id : 1;
    if (!value || bytes != sizeof number || !written) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(value, &number, bytes);
    return *written = bytes, CUBLAS_STATUS_SUCCESS;
}

inline cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t d, const void* alpha, const void* a,
                                     cublasLtMatrixLayout_t a_layout, const void* b, cublasLtMatrixLayout_t b_layout,
                                     const void* beta, const void* c, cublasLtMatrixLayout_t c_layout, void* out,
                                     cublasLtMatrixLayout_t out_layout, const cublasLtMatmulAlgo_t* algo,
                                     void* workspace, size_t workspace_bytes, cudaStream_t stream) {
    if (!handle || !d || !alpha || !a || !a_layout || !b || !b_layout || !beta || !c || !c_layout || !out ||
        !out_layout)
        return CUBLAS_STATUS_INVALID_VALUE;
    const cublasStatus_t s = emu::check_shapes(*d, *a_layout, *b_layout, *c_layout, *out_layout);
    if (s != CUBLAS_STATUS_SUCCESS) return s;
    if (algo && workspace_bytes < algo->workspace_bytes) return CUBLAS_STATUS_INVALID_VALUE;
    if (algo && algo->id < emu::failing_algorithms) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (uintptr_t(workspace) % 256) return CUBLAS_STATUS_INVALID_VALUE;
    emu::check_device_array("cublasLtMatmul, workspace", workspace, workspace_bytes);

    const emu::Matmul matmul = {*d,
                                *(const float*)alpha,
                                *(const float*)beta,
                                {(char*)a, *a_layout},
                                {(char*)b, *b_layout},
                                {(char*)c, *c_layout},
                                {(char*)out, *out_layout}};
    const emu::Matrix& result = matmul.out;
    const uint32_t alignment = algo ? algo->alignment : 16;
    bool aligned = matmul.a.check("cublasLtMatmul, matrix a", alignment) &
                   matmul.b.check("cublasLtMatmul, matrix b", alignment) &
                   result.check("cublasLtMatmul, matrix d", alignment);
    if (matmul.beta != 0) aligned &= matmul.c.check("cublasLtMatmul, matrix c", alignment);
    if (!aligned) return CUBLAS_STATUS_INVALID_VALUE;
    if (result.overlaps(matmul.a) || result.overlaps(matmul.b))
        emu::stop("cublasLtMatmul: matrix d overlaps matrix a or b");
    if (matmul.beta != 0 && result.overlaps(matmul.c) && (c != out || c_layout->leading != out_layout->leading))
        emu::stop("cublasLtMatmul: matrix d overlaps matrix c, but is not the same");
    emu::enqueue(stream, [=] { matmul.run(); });
    return CUBLAS_STATUS_SUCCESS;
}
