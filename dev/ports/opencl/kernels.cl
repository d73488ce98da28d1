// kernels.cl: the model's operations as OpenCL C 1.2, in fp32, for any device. port.h launches them; what each
// computes is said in lib/model/engine.h, and here only how. Every work-group has ITEMS work-items, and no barrier
// stands where a part of them could miss it. All sums are fp32, in trees or in chunks: many devices have no double.
//
// An array comes as a buffer and an offset in elements, OUT(x), and AT(x) moves the pointer there; null stays
// null.
#pragma OPENCL FP_CONTRACT ON
#define ARRAY(T, x) global T *x, ulong x##_at
#define IN(x) ARRAY(const float, x)
#define OUT(x) ARRAY(float, x)
#define AT(x) x += x##_at;
#define ITEM ((int)get_local_id(0))
#define GROUP get_group_id(0)
#define SYNC barrier(CLK_LOCAL_MEM_FENCE)

// lib/model/shape.h has the same, and more of it.
typedef struct {
    int B, T, first, queries, H, G, D, l, d, slc_block, slc_count, window, F, full;
    uint left_out;
} Shape;
enum { CMP, SLC, WIN, BRANCHES };

int heads_per_group(const Shape* s) { return s->H / s->G; }
int cmp_blocks(const Shape* s, int tokens) { return s->full || tokens < s->l ? 0 : (tokens - s->l) / s->d + 1; }
int key_stride(const Shape* s, int branch) { return branch == CMP ? cmp_blocks(s, s->T) : s->T; }
int mask_words(const Shape* s) { return ((s->T + s->slc_block - 1) / s->slc_block + 31) / 32; }
bool has_block(global const uint* mask, int block) { return mask[block / 32] >> (block % 32) & 1; }
float sigmoid(float x) { return 1 / (1 + exp(-x)); }

// The sum, or the largest, of every work-item's x, the same for each of them. room [ITEMS].
float over_group(float x, bool largest, local float* room) {
    SYNC;  // the room may still be read
    room[ITEM] = x;
    for (int half_of = ITEMS / 2; half_of > 0; half_of /= 2) {
        SYNC;
        if (ITEM >= half_of) continue;
        const float other = room[ITEM + half_of];
        room[ITEM] = largest ? fmax(room[ITEM], other) : room[ITEM] + other;
    }
    SYNC;
    return room[0];
}
float group_sum(float x, local float* room) { return over_group(x, false, room); }
float group_max(float x, local float* room) { return over_group(x, true, room); }

// ---------------------------------------------------------------------------------------------------------------------
// Layers.

kernel void embedding_forward(OUT(x), ARRAY(const int, tokens), IN(embed), int C, ulong count) {
    AT(x) AT(tokens) AT(embed)
    const ulong i = get_global_id(0);
    if (i < count) x[i] = embed[(ulong)tokens[i / C] * C + i % C];
}
// A work-group for each position: the first one of a token adds up all of that token's.
kernel void embedding_backward(OUT(dembed), IN(dx), ARRAY(const int, tokens), int N, int C) {
    AT(dembed) AT(dx) AT(tokens)
    local float room[ITEMS];
    const int first = GROUP, token = tokens[first];
    float earlier = 0;
    for (int n = ITEM; n < first; n += ITEMS) earlier += tokens[n] == token;
    if (group_sum(earlier, room) > 0) return;
    for (int c = ITEM; c < C; c += ITEMS) {
        float sum = 0;
        for (int n = first; n < N; n++)
            if (tokens[n] == token) sum += dx[(ulong)n * C + c];
        dembed[(ulong)token * C + c] += sum;
    }
}

// A work-group for each row.
kernel void rmsnorm_forward(OUT(out), OUT(rstd), IN(x), IN(weight), int C, float eps) {
    AT(out) AT(rstd) AT(x) AT(weight)
    local float room[ITEMS];
    const ulong row = (ulong)GROUP * C;
    float sum = 0;
    for (int c = ITEM; c < C; c += ITEMS) sum += x[row + c] * x[row + c];
    const float s = 1 / sqrt(group_sum(sum, room) / C + eps);
    for (int c = ITEM; c < C; c += ITEMS) out[row + c] = x[row + c] * s * weight[c];
    if (ITEM == 0) rstd[GROUP] = s;
}
kernel void rmsnorm_backward(OUT(dx), IN(dout), IN(x), IN(rstd), IN(weight), int C) {
    AT(dx) AT(dout) AT(x) AT(rstd) AT(weight)
    local float room[ITEMS];
    const ulong row = (ulong)GROUP * C;
    float sum = 0;
    for (int c = ITEM; c < C; c += ITEMS) sum += dout[row + c] * weight[c] * x[row + c];
    const float s = rstd[GROUP], correction = group_sum(sum, room) * s * s / C;
    for (int c = ITEM; c < C; c += ITEMS) dx[row + c] += s * (dout[row + c] * weight[c] - x[row + c] * correction);
}
// Sums over rows in two steps: parts [., C] of PART_ROWS rows each, then out [C] += their sums. The terms are a, or
// a * x * rstd where x is given.
kernel void column_parts(OUT(parts), IN(a), IN(x), IN(rstd), int N, int C) {
    AT(parts) AT(a) AT(x) AT(rstd)
    const int c = get_global_id(0), part = get_group_id(1);
    if (c >= C) return;
    float sum = 0;
    for (int n = part * PART_ROWS; n < min(N, (part + 1) * PART_ROWS); n++) {
        const ulong i = (ulong)n * C + c;
        sum += x ? a[i] * x[i] * rstd[n] : a[i];
    }
    parts[(ulong)part * C + c] = sum;
}
kernel void column_totals(OUT(out), IN(parts), int count, int C) {
    AT(out) AT(parts)
    const int c = get_global_id(0);
    if (c >= C) return;
    float sum = 0;
    for (int part = 0; part < count; part++) sum += parts[(ulong)part * C + c];
    out[c] += sum;
}

kernel void silu_forward(OUT(out), IN(x), ulong count) {
    AT(out) AT(x)
    const ulong i = get_global_id(0);
    if (i < count) out[i] = x[i] * sigmoid(x[i]);
}
kernel void silu_backward(OUT(dx), IN(dout), IN(x), ulong count) {
    AT(dx) AT(dout) AT(x)
    const ulong i = get_global_id(0);
    if (i >= count) return;
    const float s = sigmoid(x[i]);
    dx[i] = dout[i] * s * (1 + x[i] * (1 - s));
}

// A work-group for each row.
kernel void classifier(OUT(losses), OUT(logits), ARRAY(const int, targets), float dloss, int want_gradient, int V,
                       int Vp) {
    AT(losses) AT(logits) AT(targets)
    local float room[ITEMS];
    logits += (ulong)GROUP * Vp;
    const int target = targets[GROUP];
    float largest = -INFINITY, sum = 0;
    for (int v = ITEM; v < V; v += ITEMS) largest = fmax(largest, logits[v]);
    largest = group_max(largest, room);
    for (int v = ITEM; v < V; v += ITEMS) sum += exp(logits[v] - largest);
    sum = group_sum(sum, room);
    if (ITEM == 0) losses[GROUP] = log(sum) + largest - logits[target];
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);  // the target's logit has been read
    if (!want_gradient) return;
    for (int v = ITEM; v < Vp; v += ITEMS)
        logits[v] = v < V ? exp(logits[v] - largest) * (dloss / sum) - (v == target ? dloss : 0) : 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Matrix products. A work-group owns a tile of TILE x TILE of C and a work-item 4 x 4 of its elements in registers;
// slices of A and B that are DEPTH deep pass through local memory, so that each number is read from global memory once
// for TILE uses. Element (row, k) of a factor is at row * its_row + k * its_k, so one kernel serves A B^T, A B, A^T B.

#define SIDE (TILE / 4)
#define STEP (TILE + 4)  // from one k of a slice to the next
typedef struct {
    ulong row, k, matrix;  // elements from one row, one k and one matrix of the batch to the next
} Strides;

void load_slice(local float* slice, global const float* x, Strides at, int first_row, int rows, int first_k, int K) {
    for (int i = ITEM; i < TILE * DEPTH; i += SIDE * SIDE) {
        // neighbouring work-items take neighbouring addresses
        const int row = at.k == 1 ? i / DEPTH : i % TILE, k = at.k == 1 ? i % DEPTH : i / TILE;
        const bool there = first_row + row < rows && first_k + k < K;
        slice[k * STEP + row] = there ? x[(first_row + row) * at.row + (first_k + k) * at.k] : 0;
    }
}
// C [M, N] = A [M, K] B [N, K]^T (+ addend, which may be C or null)
kernel void gemm(OUT(C), IN(A), IN(B), IN(addend), int M, int N, int K, Strides of_a, Strides of_b, Strides of_c) {
    AT(C) AT(A) AT(B) AT(addend)
    local float a_slice[DEPTH * STEP], b_slice[DEPTH * STEP];
    const int first_row = get_group_id(1) * TILE, first_column = get_group_id(0) * TILE;
    const int row = ITEM / SIDE * 4, column = ITEM % SIDE * 4;
    float4 sums[4] = {0, 0, 0, 0};
    A += get_group_id(2) * of_a.matrix;
    B += get_group_id(2) * of_b.matrix;
    for (int first_k = 0; first_k < K; first_k += DEPTH) {
        SYNC;
        load_slice(a_slice, A, of_a, first_row, M, first_k, K);
        load_slice(b_slice, B, of_b, first_column, N, first_k, K);
        SYNC;
        for (int k = 0; k < DEPTH; k++) {
            const float4 a = vload4(0, a_slice + k * STEP + row), b = vload4(0, b_slice + k * STEP + column);
            sums[0] += a.x * b;
            sums[1] += a.y * b;
            sums[2] += a.z * b;
            sums[3] += a.w * b;
        }
    }
    for (int i = 0; i < 4 && first_row + row + i < M; i++) {
        float values[4];
        vstore4(sums[i], 0, values);
        const ulong at = get_group_id(2) * of_c.matrix + (first_row + row + i) * of_c.row + first_column + column;
        for (int j = 0; j < 4 && first_column + column + j < N; j++)
            C[at + j] = values[j] + (addend ? addend[at + j] : 0);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Heads. rope: cosines [T, D/2], then sines [T, D/2].

// Element x of a head that is turned by its position's angle; direction -1 turns back.
float turned(global const float* head, int x, int position, float direction, global const float* rope, const Shape* s) {
    const int pairs = s->D / 2, i = position * pairs + x % pairs;
    const float cosine = rope[i], sine = rope[s->T * pairs + i] * direction;
    return x < pairs ? head[x] * cosine - head[x + pairs] * sine : head[x - pairs] * sine + head[x] * cosine;
}
// q, or the keys or values of a slot: `count` heads, which begin at a column of `projected` [B*queries, P]; of each are
// `length` rows kept, queries or T. Backward it is dprojected = the heads' gradients. A work-item for each element.
kernel void split_heads(OUT(heads), OUT(projected), IN(rope), int column, int count, int length, int is_turned,
                        int back, int P, Shape s) {
    AT(heads) AT(projected) AT(rope)
    const ulong i = get_global_id(0), n = i / s.D / count, b = n / s.queries;
    const int x = i % s.D, unit = i / s.D % count, j = n % s.queries, t = s.first + j;
    if (b >= (ulong)s.B) return;
    global float* const head = heads + ((b * count + unit) * length + (length == s.queries ? j : t)) * s.D;
    global float* const in = projected + n * P + column + unit * s.D;
    if (back) in[x] = is_turned ? turned(head, x, t, -1, rope, &s) : head[x];
    else head[x] = is_turned ? turned(in, x, t, 1, rope, &s) : in[x];
}
// The same for the gates [branches, B, H, queries], whose logits begin at a column, and for the padding behind them. A
// work-item for each.
kernel void split_gates(OUT(gate), OUT(projected), int column, int back, int P, Shape s) {
    AT(gate) AT(projected)
    const int columns = P - column, logit = get_global_id(0) % columns;
    const int head = logit / BRANCHES, branch = logit % BRANCHES;
    const ulong n = get_global_id(0) / columns, b = n / s.queries;
    if (b >= (ulong)s.B) return;
    global float* const z = projected + n * P + column + logit;
    gate += ((branch * (ulong)s.B + b) * s.H + head) * s.queries + n % s.queries;
    if (head >= s.H) *z = back ? 0 : *z;
    else if (back) *z = *gate;
    else *gate = s.left_out >> branch & 1 ? 0 : sigmoid(*z);
}

// ---------------------------------------------------------------------------------------------------------------------
// Compression. The products with fc1 and fc2 are gemm's: a block's l tokens are l*D neighbouring numbers, so the blocks
// are the rows of a matrix whose rows overlap.

// hidden and activated of `count` blocks from `begin` on, for each of B*G groups; sums [B*G*count, F] are fc1 X
kernel void compress_activate(OUT(hidden), OUT(activated), IN(sums), IN(bias), int begin, int count, int NC, Shape s) {
    AT(hidden) AT(activated) AT(sums) AT(bias)
    const ulong i = get_global_id(0), row = i / s.F;
    if (row >= (ulong)s.B * s.G * count) return;
    const float x = sums[i] + bias[i % s.F];
    hidden[(row / count * NC + begin + row % count) * s.F + i % s.F] = x;
    activated[i] = x * sigmoid(x);
}
// out = sums + the mean of the block's tokens
kernel void compress_output(OUT(out), IN(sums), IN(k), int begin, int count, int NC, Shape s) {
    AT(out) AT(sums) AT(k)
    const ulong i = get_global_id(0), row = i / s.D, group = row / count, block = begin + row % count;
    if (row >= (ulong)s.B * s.G * count) return;
    float sum = 0;
    for (int token = 0; token < s.l; token++) sum += k[(group * s.T + block * s.d + token) * s.D + i % s.D];
    out[(group * NC + block) * s.D + i % s.D] = sums[i] + sum / s.l;
}
// The same blocks of x turned in place, to their positions or back. A work-item for each pair that RoPE turns.
kernel void turn_blocks(OUT(x), IN(rope), float direction, int begin, int count, int NC, Shape s) {
    AT(x) AT(rope)
    const int pairs = s.D / 2, i = get_global_id(0) % pairs;
    const ulong row = get_global_id(0) / pairs, block = begin + row % count;
    if (row >= (ulong)s.B * s.G * count) return;
    global float* head = x + (row / count * NC + block) * s.D;
    const float low = turned(head, i, block * s.d, direction, rope, &s);
    head[i + pairs] = turned(head, i + pairs, block * s.d, direction, rope, &s);
    head[i] = low;
}
// dk of each token: of the blocks that contain it, dblocks [B*G*NC, l*D] and its share of the mean's gradient
kernel void compress_dk(OUT(dk), IN(dblocks), IN(dout), int NC, Shape s) {
    AT(dk) AT(dblocks) AT(dout)
    const ulong i = get_global_id(0), row = i / s.D;
    if (row >= (ulong)s.B * s.G * s.T) return;
    const int x = i % s.D, t = row % s.T;
    float sum = 0;
    for (int block = t < s.l ? 0 : (t - s.l) / s.d + 1; block < NC && block * s.d <= t; block++) {
        const ulong at = row / s.T * NC + block;
        sum += dblocks[(at * s.l + t - block * s.d) * s.D + x] + dout[at * s.D + x] / s.l;
    }
    dk[i] = sum;
}

// ---------------------------------------------------------------------------------------------------------------------
// Attention. A work-group takes one query of one group and all h heads of it, which see the same keys: these pass
// through local memory in tiles and serve every head. `most` keys make a tile; the host finds out how many fit.

typedef struct {
    int begin, end;
} Range;
// The keys of query t are the union of these ranges, oldest first; lib/model/visible.h has the same.
int range_count(int branch, int t, const Shape* s) { return branch == SLC ? t / s->slc_block + 1 : 1; }
Range key_range(int branch, int i, int t, global const uint* mask, const Shape* s) {
    Range r = {0, t + 1};
    if (branch == CMP) r.end = cmp_blocks(s, t + 1);
    if (branch == WIN && !s->full) r.begin = max(0, t - s->window + 1);
    if (branch != SLC) return r;
    r.begin = i * s->slc_block;
    r.end = has_block(mask, i) ? min(r.begin + s->slc_block, t + 1) : r.begin;
    return r;
}

// Which query and group this is: one work-group for each of [B*G, queries].
typedef struct {
    int t, h;
    ulong group, row;   // row: of the first head's query; the others' follow, `queries` rows apart
    ulong dout;         // the first head's row in [B*queries, H]; the others' follow at once
    ulong mask, keys;   // where its selection and the group's keys begin
} Query;
Query query_of(int branch, const Shape* s) {
    const int j = GROUP % s->queries, h = heads_per_group(s);
    const ulong group = GROUP / s->queries, b = group / s->G, g = group % s->G;
    Query at = {s->first + j, h, group, (group * h) * s->queries + j, (b * s->queries + j) * s->H + g * h,
                GROUP * mask_words(s), group * key_stride(s, branch) * s->D};
    return at;
}
// rows [h, D] = the heads' rows of x, `apart` rows from one to the next, times scale
void load_heads(local float* rows, global const float* x, ulong apart, int h, float scale, int D) {
    for (int i = ITEM; i < h * D; i += ITEMS) rows[i] = x[i / D * apart * D + i % D] * scale;
}
// tile [count, D + 1] = rows of x, `apart` rows from one to the next; the gap puts them into different banks
void load_tile(local float* tile, global const float* x, ulong apart, int count, int D) {
    for (int i = ITEM; i < count * D; i += ITEMS) tile[i / D * (D + 1) + i % D] = x[i / D * apart * D + i % D];
}
// products [h, most] = the dot products of rows [h, D] and the tile's `count` rows
void multiply(local float* products, local const float* rows, local const float* tile, int h, int count, int most,
              int D) {
    for (int i = ITEM; i < h * count; i += ITEMS) {
        local const float *a = rows + i / count * D, *b = tile + i % count * (D + 1);
        float sum = 0;
        for (int x = 0; x < D; x++) sum += a[x] * b[x];
        products[i / count * most + i % count] = sum;
    }
}
// sums [h, D] += weights [h, most] times the tile's `count` rows
void accumulate(local float* sums, local const float* weights, local const float* tile, int h, int count, int most,
                int D) {
    for (int i = ITEM; i < h * D; i += ITEMS) {
        float sum = sums[i];
        for (int j = 0; j < count; j++) sum += weights[i / D * most + j] * tile[j * (D + 1) + i % D];
        sums[i] = sum;
    }
}
float largest_of(float x, local const float* row, int count) {
    for (int i = 0; i < count; i++) x = fmax(x, row[i]);
    return x;
}

// The softmax is accumulated tile by tile (Milakov & Gimelshein 2018).
// room: query, sums [h, D], tile [most, D + 1], scores, weights [h, most], largest, total [h]
kernel void attention_forward(OUT(out), OUT(lse), IN(q), IN(k), IN(v), ARRAY(const uint, selection), int branch,
                              int most, float scale, Shape s, local float* room) {
    AT(out) AT(lse) AT(q) AT(k) AT(v) AT(selection)
    const Query at = query_of(branch, &s);
    const int D = s.D, h = at.h;
    local float *query = room, *sums = query + h * D, *tile = sums + h * D, *scores = tile + most * (D + 1);
    local float *weights = scores + h * most, *largest = weights + h * most, *total = largest + h;
    load_heads(query, q + at.row * D, s.queries, h, scale, D);
    for (int i = ITEM; i < h * D; i += ITEMS) sums[i] = 0;
    for (int i = ITEM; i < h; i += ITEMS) {
        largest[i] = -INFINITY;
        total[i] = 0;
    }
    for (int range = 0; range < range_count(branch, at.t, &s); range++) {
        const Range keys = key_range(branch, range, at.t, selection + at.mask, &s);
        for (int key = keys.begin; key < keys.end; key += most) {
            const int count = min(most, keys.end - key);
            SYNC;
            load_tile(tile, k + at.keys + (ulong)key * D, 1, count, D);
            SYNC;
            multiply(scores, query, tile, h, count, most, D);
            SYNC;
            load_tile(tile, v + at.keys + (ulong)key * D, 1, count, D);
            for (int i = ITEM; i < h * count; i += ITEMS) {
                local const float* row = scores + i / count * most;
                const float m = largest_of(largest[i / count], row, count);
                weights[i / count * most + i % count] = exp(row[i % count] - m);
            }
            for (int i = ITEM; i < h * D; i += ITEMS)  // the first time by 0
                sums[i] *= exp(largest[i / D] - largest_of(largest[i / D], scores + i / D * most, count));
            SYNC;
            for (int i = ITEM; i < h; i += ITEMS) {
                const float m = largest_of(largest[i], scores + i * most, count);
                total[i] *= exp(largest[i] - m);
                for (int j = 0; j < count; j++) total[i] += weights[i * most + j];
                largest[i] = m;
            }
            accumulate(sums, weights, tile, h, count, most, D);
        }
    }
    SYNC;
    for (int i = ITEM; i < h * D; i += ITEMS) {
        const float sum = total[i / D];
        out[(at.row + i / D * (ulong)s.queries) * D + i % D] = sum > 0 ? sums[i] / sum : sum;
    }
    for (int i = ITEM; i < h; i += ITEMS)
        lse[at.row + i * (ulong)s.queries] = total[i] == 0 ? INFINITY : largest[i] + log(total[i]);
}

// dq = dS k / sqrt(D), or +=.  P' = e^(score - lse_gated), dS = P' (dout v^T - row_dot)
// room: query, gradient, sums [h, D], tile [most, D + 1], scores, products [h, most]
kernel void attention_dq(OUT(dq), IN(dout), IN(row_dot), IN(lse_gated), IN(q), IN(k), IN(v),
                         ARRAY(const uint, selection), int add, int branch, int most, float scale, Shape s,
                         local float* room) {
    AT(dq) AT(dout) AT(row_dot) AT(lse_gated) AT(q) AT(k) AT(v) AT(selection)
    const Query at = query_of(branch, &s);
    const int D = s.D, h = at.h;
    local float *query = room, *gradient = query + h * D, *sums = gradient + h * D, *tile = sums + h * D;
    local float *scores = tile + most * (D + 1), *products = scores + h * most;
    load_heads(query, q + at.row * D, s.queries, h, scale, D);
    load_heads(gradient, dout + at.dout * D, 1, h, 1, D);
    for (int i = ITEM; i < h * D; i += ITEMS) sums[i] = 0;
    for (int range = 0; range < range_count(branch, at.t, &s); range++) {
        const Range keys = key_range(branch, range, at.t, selection + at.mask, &s);
        for (int key = keys.begin; key < keys.end; key += most) {
            const int count = min(most, keys.end - key);
            SYNC;
            load_tile(tile, v + at.keys + (ulong)key * D, 1, count, D);
            SYNC;
            multiply(products, gradient, tile, h, count, most, D);
            SYNC;
            load_tile(tile, k + at.keys + (ulong)key * D, 1, count, D);
            SYNC;
            multiply(scores, query, tile, h, count, most, D);
            SYNC;
            for (int i = ITEM; i < h * count; i += ITEMS) {
                const ulong row = at.row + i / count * (ulong)s.queries;
                const int to = i / count * most + i % count;
                products[to] = exp(scores[to] - lse_gated[row]) * (products[to] - row_dot[row]);
            }
            SYNC;
            accumulate(sums, products, tile, h, count, most, D);
        }
    }
    SYNC;
    for (int i = ITEM; i < h * D; i += ITEMS) {
        const ulong to = (at.row + i / D * (ulong)s.queries) * D + i % D;
        dq[to] = (add ? dq[to] : 0) + sums[i] * scale;
    }
}

bool sees(int branch, int t, int key, global const uint* mask, const Shape* s) {
    if (branch == CMP) return key * s->d + s->l - 1 <= t;
    if (key > t) return false;
    return branch == SLC ? has_block(mask, key / s->slc_block) : s->full || t - key < s->window;
}
// Whether one of `rows` queries from t on, whose selections begin at mask, chose a block that has keys first .. last.
bool any_sees(int branch, int t, int rows, int first, int last, global const uint* mask, const Shape* s) {
    if (branch != SLC) return true;
    for (int i = 0; i < rows; i++)
        for (int block = first / s->slc_block; block <= last / s->slc_block; block++)
            if (t + i >= block * s->slc_block && has_block(mask + (ulong)i * mask_words(s), block)) return true;
    return false;
}
// dk = dS^T q / sqrt(D), dv = P'^T dout. A work-group takes `most` keys of a group and goes through the queries that
// may see them, `most` at a time, and through their heads.
// room: key, value, dk, dv [most, D], query, gradient [most, D + 1], P, dS [most keys, most queries]
kernel void attention_dkdv(OUT(dk), OUT(dv), IN(dout), IN(row_dot), IN(lse_gated), IN(q), IN(k), IN(v),
                           ARRAY(const uint, selection), int branch, int most, float scale, Shape s,
                           local float* room) {
    AT(dk) AT(dv) AT(dout) AT(row_dot) AT(lse_gated) AT(q) AT(k) AT(v) AT(selection)
    const int D = s.D, h = heads_per_group(&s), stride = key_stride(&s, branch), words = mask_words(&s);
    const int first = GROUP * most, keys = min(most, stride - first), last = first + keys - 1;
    const ulong group = get_group_id(1), b = group / s.G, at = (group * stride + first) * D;
    local float *key = room, *value = key + most * D, *dk_sums = value + most * D, *dv_sums = dk_sums + most * D;
    local float *query = dv_sums + most * D, *gradient = query + most * (D + 1), *P = gradient + most * (D + 1);
    local float* dS = P + most * most;
    load_heads(key, k + at, 1, keys, scale, D);
    load_heads(value, v + at, 1, keys, 1, D);
    for (int i = ITEM; i < keys * D; i += ITEMS) dk_sums[i] = dv_sums[i] = 0;
    const int end = branch == WIN && !s.full ? min(s.T, last + s.window) : s.T;
    for (int t = branch == CMP ? first * s.d + s.l - 1 : first; t < end; t += most) {
        const int rows = min(most, end - t);
        global const uint* mask = selection + (group * s.T + t) * words;
        const int heads = any_sees(branch, t, rows, first, last, mask, &s) ? h : 0;
        for (int head = group % s.G * h; head < (int)(group % s.G) * h + heads; head++) {
            const ulong row = (b * s.H + head) * s.T + t;
            SYNC;
            load_tile(query, q + row * D, 1, rows, D);
            load_tile(gradient, dout + ((b * s.T + t) * s.H + head) * D, s.H, rows, D);
            SYNC;
            multiply(P, key, query, keys, rows, most, D);
            multiply(dS, value, gradient, keys, rows, most, D);
            SYNC;
            for (int i = ITEM; i < keys * rows; i += ITEMS) {
                const int c = i / rows, r = i % rows, to = c * most + r;
                const bool seen = sees(branch, t + r, first + c, mask + (ulong)r * words, &s);
                P[to] = seen ? exp(P[to] - lse_gated[row + r]) : 0;
                dS[to] = seen ? P[to] * (dS[to] - row_dot[row + r]) : 0;
            }
            SYNC;
            accumulate(dk_sums, dS, query, keys, rows, most, D);
            accumulate(dv_sums, P, gradient, keys, rows, most, D);
        }
    }
    SYNC;
    for (int i = ITEM; i < keys * D; i += ITEMS) {
        dk[at + i] = dk_sums[i] * scale;
        dv[at + i] = dv_sums[i];
    }
}

// Paper eq. 8 to 12, a work-group for each query of a group. A block is chosen if fewer than n - 3 of those that nobody
// forces go before it.
// room: query [h, D], importance, chosen [blocks]
kernel void select_blocks(ARRAY(uint, selection), OUT(chosen_importance), IN(q), IN(kc), IN(lse), float scale, Shape s,
                          local float* room) {
    AT(selection) AT(chosen_importance) AT(q) AT(kc) AT(lse)
    const Query at = query_of(CMP, &s);
    const int D = s.D, h = at.h, last = at.t / s.slc_block, visible = cmp_blocks(&s, at.t + 1);
    local float *query = room, *importance = query + h * D, *chosen = importance + last + 1;
    load_heads(query, q + at.row * D, s.queries, h, scale, D);
    SYNC;
    for (int block = ITEM; block <= last; block += ITEMS) {
        const int begin = block * s.slc_block, end = begin + s.slc_block;
        float sum = 0;
        for (int i = max(0, (begin - s.l) / s.d); i < visible && i * s.d < end; i++) {
            const int shared = min(end, i * s.d + s.l) - max(begin, i * s.d);
            float p = 0;
            for (int head = 0; head < h && shared > 0; head++) {
                float score = 0;
                for (int x = 0; x < D; x++) score += query[head * D + x] * kc[at.keys + (ulong)i * D + x];
                p += exp(score - lse[at.row + head * (ulong)s.queries]);
            }
            if (shared > 0) sum += p * shared / s.d;
        }
        importance[block] = sum;
    }
    SYNC;
    for (int block = ITEM; block <= last; block += ITEMS) {
        int before = 0;
        for (int other = 1; other < last - 1; other++)
            before += importance[other] > importance[block] ||
                      (importance[other] == importance[block] && other < block);
        const bool forced = block == 0 || block >= last - 1;
        chosen[block] = forced || before < s.slc_count - 3;
    }
    SYNC;
    selection += at.mask;
    for (int word = ITEM; word < mask_words(&s); word += ITEMS) {
        uint bits = 0;
        for (int block = word * 32; block <= min(last, word * 32 + 31); block++)
            if (chosen[block] != 0) bits |= 1u << (block % 32);
        selection[word] = bits;
    }
    if (ITEM > 0 || !chosen_importance) return;
    float of_chosen = 0, all = 0;
    for (int block = 0; block <= last; block++) {
        all += importance[block];
        of_chosen += chosen[block] * importance[block];
    }
    chosen_importance[GROUP] = all > 0 ? of_chosen / all : 1;
}

// A work-item for each number of the output [B*queries, H*D].
kernel void combine_forward(OUT(out), IN(o), IN(gate), Shape s) {
    AT(out) AT(o) AT(gate)
    const ulong i = get_global_id(0), rows = (ulong)s.B * s.H * s.queries, to = i / s.D;
    if (to >= rows) return;
    const int head = to % s.H, x = i % s.D;
    const ulong n = to / s.H, row = (n / s.queries * s.H + head) * s.queries + n % s.queries;
    float sum = 0;
    for (int branch = 0; branch < (s.full ? 1 : BRANCHES); branch++)
        sum += (s.full ? 1 : gate[branch * rows + row]) * o[(branch * rows + row) * s.D + x];
    out[i] = sum;
}
// A work-item for each branch and query row.
kernel void attention_backward_rows(OUT(row_dot), OUT(lse_gated), OUT(dgate_logit), IN(dout), IN(o), IN(gate), IN(lse),
                                    Shape s) {
    AT(row_dot) AT(lse_gated) AT(dgate_logit) AT(dout) AT(o) AT(gate) AT(lse)
    const ulong row = get_global_id(0), rows = (ulong)s.B * s.H * s.queries;
    if (row >= rows * (s.full ? 1 : BRANCHES)) return;
    const ulong head = row % rows / s.queries, n = head / s.H * s.queries + row % s.queries;
    dout += (n * s.H + head % s.H) * s.D;
    float r = 0;
    for (int x = 0; x < s.D; x++) r += dout[x] * o[row * s.D + x];
    const float g = s.full ? 1 : gate[row];
    row_dot[row] = r;
    lse_gated[row] = lse[row] - log(g);
    if (!s.full) dgate_logit[row] = r * g * (1 - g);
}

// ---------------------------------------------------------------------------------------------------------------------
// Update.

// to[i] = (or, with add, +=) the sum of x or, with squares, of x^2, over chunk i of x, which ends at `total`. A
// work-group for each chunk from the first on. NaN where a guard is given and not finite.
kernel void sums(OUT(to), IN(x), IN(guard), int add, int squares, ulong chunk, ulong first, ulong total) {
    AT(to) AT(x) AT(guard)
    local float room[ITEMS];
    const ulong at = first + GROUP;
    float sum = 0;
    for (ulong i = at * chunk + ITEM; i < min(total, (at + 1) * chunk); i += ITEMS) sum += squares ? x[i] * x[i] : x[i];
    sum = group_sum(sum, room);
    if (ITEM == 0) to[at] = guard && !isfinite(guard[0]) ? NAN : add ? to[at] + sum : sum;
}
kernel void set_guard(OUT(guard), IN(loss)) {
    AT(guard) AT(loss)
    if (get_global_id(0) == 0) guard[0] = loss[0];
}
kernel void adamw(OUT(param), OUT(m), OUT(v), IN(grad), IN(squares), ulong count, float beta1, float beta2, float eps,
                  float step_size, float keep, float v_correction, float grad_clip) {
    AT(param) AT(m) AT(v) AT(grad) AT(squares)
    const ulong i = get_global_id(0);
    if (i >= count) return;
    const float norm = squares ? sqrt(squares[0]) : 0;
    if (!isfinite(norm)) return;
    const float g = grad[i] * (grad_clip > 0 && norm > grad_clip ? grad_clip / norm : 1);
    m[i] = beta1 * m[i] + (1 - beta1) * g;
    v[i] = beta2 * v[i] + (1 - beta2) * g * g;
    param[i] = param[i] * keep - step_size * m[i] / (sqrt(v[i]) * v_correction + eps);
}
// Where element i of a matrix lies in direction and y.
ulong muon_index(ulong i, ulong rows, ulong columns) { return rows > columns ? i % columns * rows + i / columns : i; }
kernel void muon_momentum(OUT(direction), OUT(m), IN(grad), IN(squares), ulong rows, ulong columns, float beta1,
                          float grad_clip) {
    AT(direction) AT(m) AT(grad) AT(squares)
    const ulong i = get_global_id(0);
    if (i >= rows * columns) return;
    const float norm = squares ? sqrt(squares[0]) : 0;
    if (!isfinite(norm)) return;
    const float g = grad[i] * (grad_clip > 0 && norm > grad_clip ? grad_clip / norm : 1);
    m[i] = beta1 * m[i] + (1 - beta1) * g;
    direction[muon_index(i, rows, columns)] = beta1 * m[i] + (1 - beta1) * g;
}
kernel void muon_normalise(OUT(y), IN(direction), IN(squares), float factor, ulong count) {
    AT(y) AT(direction) AT(squares)
    const ulong i = get_global_id(0);
    if (i < count) y[i] = direction[i] * (squares[0] > 0 ? factor / sqrt(squares[0]) : 0);
}
kernel void muon_apply(OUT(param), IN(y), IN(squares), ulong rows, ulong columns, float step_size, float keep) {
    AT(param) AT(y) AT(squares)
    const ulong i = get_global_id(0);
    if (i >= rows * columns || (squares && !isfinite(squares[0]))) return;
    param[i] = param[i] * keep - step_size * y[muon_index(i, rows, columns)];
}
