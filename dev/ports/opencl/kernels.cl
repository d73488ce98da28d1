// kernels.cl: the model's operations as OpenCL C 1.2, in fp32, for any device. port.h launches them; what each
// computes is said in lib/model/engine.h, and here only how. Every work-group has ITEMS work-items, and no barrier
// stands where a part of them could miss it. All sums are fp32, in trees or in chunks: many devices have no double.
//
// An array comes as a buffer and an offset in elements, OUT(x), and AT(x) moves the pointer there; null stays null.
#pragma OPENCL FP_CONTRACT ON
#define ARRAY(T, x) global T *x, ulong x##_at
#define IN(x) ARRAY(const float, x)
#define OUT(x) ARRAY(float, x)
#define AT(x) x += x##_at;
// Where each of `work` numbers has a work-item, this is number i. Some have nothing to do, since work-groups are whole.
#define EACH(i)                       \
    const ulong i = get_global_id(0); \
    if (i >= work) return;
#define ITEM ((int)get_local_id(0))
#define GROUP get_group_id(0)
#define SYNC barrier(CLK_LOCAL_MEM_FENCE)

// lib/model/shape.h has the same, and more of it.
typedef struct {
    int B, T, first, queries, H, G, D, l, d, slc_block, slc_count, window, F, rope_base, qk_norm, window_only, sees_all;
    uint kinds;
    int period;
    uint left_out;
} Shape;
enum { CMP, SLC, WIN, BRANCHES };

int heads_per_group(const Shape* s) { return s->H / s->G; }
int cmp_blocks(const Shape* s, int tokens) { return s->window_only || tokens < s->l ? 0 : (tokens - s->l) / s->d + 1; }
int key_stride(const Shape* s, int branch) { return branch == CMP ? cmp_blocks(s, s->T) : s->T; }
int mask_words(const Shape* s) { return ((s->T + s->slc_block - 1) / s->slc_block + 31) / 32; }
float sigmoid(float x) { return 1 / (1 + exp(-x)); }

// The sum, or the largest, of every work-item's x, the same for each of them. room [ITEMS].
float over_group(float x, bool largest, local float* room) {
    SYNC;  // the room may still be read
    room[ITEM] = x;
    SYNC;
    float result = room[0];
    for (int i = 1; i < ITEMS; i++) result = largest ? fmax(result, room[i]) : result + room[i];
    return result;
}
float group_sum(float x, local float* room) { return over_group(x, false, room); }
float group_max(float x, local float* room) { return over_group(x, true, room); }

// ---------------------------------------------------------------------------------------------------------------------
// Layers.

kernel void embedding_forward(ulong work, OUT(x), ARRAY(const int, tokens), IN(embed), int C) {
    AT(x) AT(tokens) AT(embed) EACH(i)
    x[i] = embed[(ulong)tokens[i / C] * C + i % C];
}
// A work-item for each number of dx: at a token's first position it adds up all of that token's.
kernel void embedding_backward(ulong work, OUT(dembed), IN(dx), ARRAY(const int, tokens), int N, int C) {
    AT(dembed) AT(dx) AT(tokens) EACH(i)
    const int first = i / C, c = i % C;
    for (int n = 0; n < first; n++)
        if (tokens[n] == tokens[first]) return;
    float sum = 0;
    for (int n = first; n < N; n++)
        if (tokens[n] == tokens[first]) sum += dx[(ulong)n * C + c];
    dembed[(ulong)tokens[first] * C + c] += sum;
}

// The smear. A work-group for each row; before [N + 1, C]: row n is the embedding before token n, row n + 1 its own.
float smear_gate(global const float* e, global const float* gate, int C, local float* room) {
    float sum = 0;
    for (int c = ITEM; c < C; c += ITEMS) sum += e[c] * gate[c];
    return sigmoid(group_sum(sum, room));
}
kernel void smear_forward(OUT(x), IN(before), IN(gate), IN(scale), int first, int queries, int C) {
    AT(x) AT(before) AT(gate) AT(scale)
    local float room[ITEMS];
    const ulong row = (ulong)GROUP * C;
    const float value = smear_gate(before + row + C, gate, C, room), g = first + GROUP % queries == 0 ? 0 : value;
    for (int c = ITEM; c < C; c += ITEMS) x[row + c] += g * scale[c] * before[row + c];
}
kernel void smear_rows(OUT(g), OUT(dz), IN(dx), IN(before), IN(gate), IN(scale), int T, int C) {
    AT(g) AT(dz) AT(dx) AT(before) AT(gate) AT(scale)
    local float room[ITEMS];
    const ulong row = (ulong)GROUP * C;
    const float value = smear_gate(before + row + C, gate, C, room);
    float sum = 0;
    for (int c = ITEM; c < C; c += ITEMS) sum += dx[row + c] * scale[c] * before[row + c];
    sum = group_sum(sum, room);
    if (ITEM > 0) return;
    g[GROUP] = GROUP % T == 0 ? 0 : value;
    dz[GROUP] = GROUP % T == 0 ? 0 : value * (1 - value) * sum;
}
kernel void smear_backward(ulong work, OUT(de), IN(dx), IN(g), IN(dz), IN(gate), IN(scale), int N, int C) {
    AT(de) AT(dx) AT(g) AT(dz) AT(gate) AT(scale) EACH(i)
    const int n = i / C, c = i % C;
    de[i] = dx[i] + dz[n] * gate[c] + (n + 1 < N ? g[n + 1] * scale[c] * dx[i + C] : 0);
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
// out [parts, C] = (with add, +=) the sums over `rows` rows each of a [N, C], or of a * x * rstd where x is given.
kernel void column_sums(OUT(out), IN(a), IN(x), IN(rstd), int rows, int add, int N, int C) {
    AT(out) AT(a) AT(x) AT(rstd)
    const int c = get_global_id(0), part = get_group_id(1);
    if (c >= C) return;
    const ulong to = (ulong)part * C + c;
    float sum = add ? out[to] : 0;
    for (int n = part * rows; n < min(N, (part + 1) * rows); n++) {
        const ulong i = (ulong)n * C + c;
        sum += x ? a[i] * x[i] * rstd[n] : a[i];
    }
    out[to] = sum;
}

kernel void silu_forward(ulong work, OUT(out), IN(x)) {
    AT(out) AT(x) EACH(i)
    out[i] = x[i] * sigmoid(x[i]);
}
kernel void silu_backward(ulong work, OUT(dx), IN(dout), IN(x)) {
    AT(dx) AT(dout) AT(x) EACH(i)
    const float s = sigmoid(x[i]);
    dx[i] = dout[i] * (s * (1 + x[i] * (1 - s)));
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
// C [M, N] = A [M, K] B [N, K]^T (+ beta addend, which may be C or null)
kernel void gemm(OUT(C), IN(A), IN(B), IN(addend), int M, int N, int K, Strides of_a, Strides of_b, Strides of_c,
                 float beta) {
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
        const float values[4] = {sums[i].x, sums[i].y, sums[i].z, sums[i].w};
        const ulong at = get_group_id(2) * of_c.matrix + (first_row + row + i) * of_c.row + first_column + column;
        for (int j = 0; j < 4 && first_column + column + j < N; j++)
            C[at + j] = values[j] + (addend ? beta * addend[at + j] : 0);
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
kernel void split_heads(ulong work, OUT(heads), OUT(projected), IN(rope), int column, int count, int length,
                        int is_turned, int back, int P, Shape s) {
    AT(heads) AT(projected) AT(rope) EACH(i)
    const ulong n = i / s.D / count, b = n / s.queries;
    const int x = i % s.D, unit = i / s.D % count, j = n % s.queries, t = s.first + j;
    global float* const head = heads + ((b * count + unit) * length + (length == s.queries ? j : t)) * s.D;
    global float* const in = projected + n * P + column + unit * s.D;
    if (back) in[x] = is_turned ? turned(head, x, t, -1, rope, &s) : head[x];
    else head[x] = is_turned ? turned(in, x, t, 1, rope, &s) : in[x];
}
// picked [B*queries, count*D] = such heads of `projected` or, backward, these = picked
kernel void pick_heads(ulong work, OUT(picked), OUT(projected), int column, int width, int back, int P) {
    AT(picked) AT(projected) EACH(i)
    global float* const at = projected + i / width * P + column + i % width;
    if (back) *at = picked[i];
    else picked[i] = *at;
}
// The same for the gates [branches, B, H, queries], whose logits begin at a column, and for the padding behind them. A
// work-item for each.
kernel void split_gates(ulong work, OUT(gate), OUT(projected), int column, int back, int P, Shape s) {
    AT(gate) AT(projected) EACH(i)
    const int columns = P - column, logit = i % columns, head = logit / BRANCHES, branch = logit % BRANCHES;
    const ulong n = i / columns, b = n / s.queries;
    global float* const z = projected + n * P + column + logit;
    gate += ((branch * (ulong)s.B + b) * s.H + head) * s.queries + n % s.queries;
    if (head >= s.H) *z = back ? 0 : *z;
    else if (back) *z = *gate;
    else *gate = s.left_out >> branch & 1 ? 0 : sigmoid(*z);
}

// ---------------------------------------------------------------------------------------------------------------------
// Compression. The products with fc1 and fc2 are gemm's: a block's l tokens are l*D neighbouring numbers, so the blocks
// are the rows of a matrix whose rows overlap.

// hidden += bias and activated [B*G, count, F] = its SiLU, for `count` blocks from `begin` on of each group
kernel void compress_activate(ulong work, OUT(hidden), OUT(activated), IN(bias), int begin, int count, int NC,
                              Shape s) {
    AT(hidden) AT(activated) AT(bias) EACH(i)
    const ulong row = i / s.F, at = (row / count * NC + begin + row % count) * s.F + i % s.F;
    const float x = hidden[at] + bias[i % s.F];
    hidden[at] = x;
    activated[i] = x * sigmoid(x);
}
// out = the mean of the block's tokens, for the same blocks
kernel void compress_mean(ulong work, OUT(out), IN(k), int begin, int count, int NC, Shape s) {
    AT(out) AT(k) EACH(i)
    const ulong row = i / s.D, group = row / count, block = begin + row % count;
    float sum = 0;
    for (int token = 0; token < s.l; token++) sum += k[(group * s.T + block * s.d + token) * s.D + i % s.D];
    out[(group * NC + block) * s.D + i % s.D] = sum / s.l;
}
// The same blocks of x turned in place, to their positions or back. A work-item for each pair that RoPE turns.
kernel void turn_blocks(ulong work, OUT(x), IN(rope), float direction, int begin, int count, int NC, Shape s) {
    AT(x) AT(rope) EACH(pair)
    const int pairs = s.D / 2, i = pair % pairs;
    const ulong row = pair / pairs, block = begin + row % count;
    global float* head = x + (row / count * NC + block) * s.D;
    const float low = turned(head, i, block * s.d, direction, rope, &s);
    head[i + pairs] = turned(head, i + pairs, block * s.d, direction, rope, &s);
    head[i] = low;
}
// dk of each token: of the blocks that contain it, dblocks [B*G*NC, l*D] and its share of the mean's gradient
kernel void compress_dk(ulong work, OUT(dk), IN(dblocks), IN(dout), int NC, Shape s) {
    AT(dk) AT(dblocks) AT(dout) EACH(i)
    const ulong row = i / s.D;
    const int x = i % s.D, t = row % s.T;
    float sum = 0;
    for (int block = t < s.l ? 0 : (t - s.l) / s.d + 1; block < NC && block * s.d <= t; block++) {
        const ulong at = row / s.T * NC + block;
        sum += dblocks[(at * s.l + t - block * s.d) * s.D + x] + dout[at * s.D + x] / s.l;
    }
    dk[i] = sum;
}

// ---------------------------------------------------------------------------------------------------------------------
// Attention, as plain as it can be: a work-item for each query of a head, or for each key of a group, goes through what
// it sees and keeps its sums to itself. Neighbours read the same rows at about the same time.

// Query `row` of [B*H, queries]. Keys begin .. end-1 are what it may see by its position; in the selected branch it
// sees those of them whose block it chose. lib/model/visible.h has the same.
typedef struct {
    int begin, end;
    ulong keys, mask;  // where its group's keys and its selection begin
    ulong dout;        // its row in [B*queries, H]
} Query;
Query query_of(ulong row, int branch, const Shape* s) {
    const ulong j = row % s->queries, head = row / s->queries, group = head / heads_per_group(s);
    const int t = s->first + j;
    Query at;
    at.begin = branch == WIN && !s->sees_all ? max(0, t - s->window + 1) : 0;
    at.end = branch == CMP ? cmp_blocks(s, t + 1) : t + 1;
    at.keys = group * key_stride(s, branch) * s->D;
    at.mask = (group * s->queries + j) * mask_words(s);
    at.dout = (head / s->H * s->queries + j) * s->H + head % s->H;
    return at;
}
bool sees(int branch, global const uint* mask, int key, const Shape* s) {
    return branch != SLC || mask[key / s->slc_block / 32] >> (key / s->slc_block % 32) & 1;
}
float product(global const float* a, global const float* b, int D) {
    float sum = 0;
    for (int i = 0; i < D; i++) sum += a[i] * b[i];
    return sum;
}

// The softmax is accumulated key by key (Milakov & Gimelshein 2018).
kernel void attention_forward(ulong work, OUT(out), OUT(lse), IN(q), IN(k), IN(v), ARRAY(const uint, selection),
                              int branch, float scale, Shape s) {
    AT(out) AT(lse) AT(q) AT(k) AT(v) AT(selection) EACH(row)
    const Query at = query_of(row, branch, &s);
    float sums[MAX_D] = {0}, largest = -INFINITY, total = 0;
    for (int key = at.begin; key < at.end; key++) {
        if (!sees(branch, selection + at.mask, key, &s)) continue;
        const ulong other = at.keys + (ulong)key * s.D;
        const float score = product(q + row * s.D, k + other, s.D) * scale, most = fmax(largest, score);
        const float keep = exp(largest - most), weight = exp(score - most);  // keep: 0 the first time
        for (int i = 0; i < s.D; i++) sums[i] = sums[i] * keep + weight * v[other + i];
        total = total * keep + weight;
        largest = most;
    }
    for (int i = 0; i < s.D; i++) out[row * s.D + i] = total > 0 ? sums[i] / total : total;
    lse[row] = total == 0 ? INFINITY : largest + log(total);
}

// dq = dS k / sqrt(D), or +=.  P' = e^(score - lse_gated), dS = P' (dout v^T - row_dot)
kernel void attention_dq(ulong work, OUT(dq), IN(dout), IN(row_dot), IN(lse_gated), IN(q), IN(k), IN(v),
                         ARRAY(const uint, selection), int add, int branch, float scale, Shape s) {
    AT(dq) AT(dout) AT(row_dot) AT(lse_gated) AT(q) AT(k) AT(v) AT(selection) EACH(row)
    const Query at = query_of(row, branch, &s);
    float sums[MAX_D] = {0};
    for (int key = at.begin; key < at.end; key++) {
        if (!sees(branch, selection + at.mask, key, &s)) continue;
        const ulong other = at.keys + (ulong)key * s.D;
        const float P = exp(product(q + row * s.D, k + other, s.D) * scale - lse_gated[row]);
        const float dS = P * (product(dout + at.dout * s.D, v + other, s.D) - row_dot[row]);
        for (int i = 0; i < s.D; i++) sums[i] += dS * k[other + i];
    }
    for (int i = 0; i < s.D; i++) dq[row * s.D + i] = (add ? dq[row * s.D + i] : 0) + sums[i] * scale;
}

// dk = dS^T q / sqrt(D), dv = P'^T dout, over the heads of the group and the queries that may see the key: a work-item
// for each of [B*G, stride].
kernel void attention_dkdv(ulong work, OUT(dk), OUT(dv), IN(dout), IN(row_dot), IN(lse_gated), IN(q), IN(k), IN(v),
                           ARRAY(const uint, selection), int branch, float scale, Shape s) {
    AT(dk) AT(dv) AT(dout) AT(row_dot) AT(lse_gated) AT(q) AT(k) AT(v) AT(selection) EACH(at)
    const ulong stride = key_stride(&s, branch), group = at / stride, h = heads_per_group(&s);
    const int key = at % stride, begin = branch == CMP ? key * s.d + s.l - 1 : key;
    const int end = branch == WIN && !s.sees_all && s.window < s.T - key ? key + s.window : s.T;
    float dk_sums[MAX_D] = {0}, dv_sums[MAX_D] = {0};
    for (int t = begin; t < end; t++) {
        if (!sees(branch, selection + (group * s.T + t) * mask_words(&s), key, &s)) continue;
        for (ulong head = group * h; head < (group + 1) * h; head++) {
            const ulong row = head * s.T + t, token = ((head / s.H * s.T + t) * s.H + head % s.H) * s.D;
            const float P = exp(product(q + row * s.D, k + at * s.D, s.D) * scale - lse_gated[row]);
            const float dS = P * (product(dout + token, v + at * s.D, s.D) - row_dot[row]);
            for (int i = 0; i < s.D; i++) {
                dk_sums[i] += dS * q[row * s.D + i];
                dv_sums[i] += P * dout[token + i];
            }
        }
    }
    for (int i = 0; i < s.D; i++) {
        dk[at * s.D + i] = dk_sums[i] * scale;
        dv[at * s.D + i] = dv_sums[i];
    }
}

// Paper eq. 8 to 10: importance [B*G, queries, blocks], summed over the heads of a group. A work-item for each.
kernel void block_importance(ulong work, OUT(importance), IN(q), IN(kc), IN(lse), float scale, int blocks, Shape s) {
    AT(importance) AT(q) AT(kc) AT(lse) EACH(i)
    const ulong j = i / blocks % s.queries, group = i / blocks / s.queries;
    const int begin = i % blocks * s.slc_block, end = begin + s.slc_block, visible = cmp_blocks(&s, s.first + j + 1);
    float sum = 0;
    for (int c = max(0, (begin - s.l) / s.d); c < visible && c * s.d < end; c++) {
        const int shared = min(end, c * s.d + s.l) - max(begin, c * s.d);
        const ulong key = (group * key_stride(&s, CMP) + c) * s.D;
        float p = 0;
        for (ulong head = group * heads_per_group(&s); head < (group + 1) * heads_per_group(&s); head++) {
            const ulong row = head * s.queries + j;
            p += exp(product(q + row * s.D, kc + key, s.D) * scale - lse[row]);
        }
        if (shared > 0) sum += p * shared / s.d;
    }
    importance[i] = sum;
}
// Eq. 11 and 12, a work-item for each query of a group. A block is chosen if it is forced, or if fewer than n - 3 of
// those that nobody forces go before it.
kernel void select_blocks(ulong work, ARRAY(uint, selection), OUT(chosen_importance), IN(importance), int blocks,
                          Shape s) {
    AT(selection) AT(chosen_importance) AT(importance) EACH(row)
    const int last = (s.first + row % s.queries) / s.slc_block, words = mask_words(&s);
    importance += row * blocks;
    selection += row * words;
    for (int word = 0; word < words; word++) selection[word] = 0;
    float of_chosen = 0, all = 0;
    for (int block = 0; block <= last; block++) {
        const float mine = importance[block];
        int before = 0;
        for (int other = 1; other < last - 1; other++)
            before += importance[other] > mine || (importance[other] == mine && other < block);
        all += mine;
        if (block > 0 && block < last - 1 && before >= s.slc_count - 3) continue;
        selection[block / 32] |= 1u << (block % 32);
        of_chosen += mine;
    }
    if (chosen_importance) chosen_importance[row] = all > 0 ? of_chosen / all : 1;
}

// A work-item for each number of the output [B*queries, H*D].
kernel void combine_forward(ulong work, OUT(out), IN(o), IN(gate), Shape s) {
    AT(out) AT(o) AT(gate) EACH(i)
    const ulong rows = work / s.D, to = i / s.D;
    const ulong n = to / s.H, row = (n / s.queries * s.H + to % s.H) * s.queries + n % s.queries, x = i % s.D;
    float sum = 0;
    for (int branch = 0; branch < (s.window_only ? 1 : BRANCHES); branch++)
        sum += (s.window_only ? 1 : gate[branch * rows + row]) * o[(branch * rows + row) * s.D + x];
    out[i] = sum;
}
// A work-item for each branch and query row.
kernel void attention_backward_rows(ulong work, OUT(row_dot), OUT(lse_gated), OUT(dgate_logit), IN(dout), IN(o),
                                    IN(gate), IN(lse), Shape s) {
    AT(row_dot) AT(lse_gated) AT(dgate_logit) AT(dout) AT(o) AT(gate) AT(lse) EACH(row)
    const ulong rows = work / (s.window_only ? 1 : BRANCHES), head = row % rows / s.queries;
    const ulong n = head / s.H * s.queries + row % s.queries;
    dout += (n * s.H + head % s.H) * s.D;
    const float r = product(dout, o + row * s.D, s.D), g = s.window_only ? 1 : gate[row];
    row_dot[row] = r;
    lse_gated[row] = lse[row] - log(g);
    if (!s.window_only) dgate_logit[row] = r * g * (1 - g);
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
kernel void adamw(ulong work, OUT(param), OUT(m), OUT(v), IN(grad), IN(squares), float beta1, float beta2, float eps,
                  float step_size, float keep, float v_correction, float grad_clip) {
    AT(param) AT(m) AT(v) AT(grad) AT(squares) EACH(i)
    const float norm = squares ? sqrt(squares[0]) : 0;
    if (!isfinite(norm)) return;
    const float g = grad[i] * (grad_clip > 0 && norm > grad_clip ? grad_clip / norm : 1);
    m[i] = beta1 * m[i] + (1 - beta1) * g;
    v[i] = beta2 * v[i] + (1 - beta2) * g * g;
    param[i] = param[i] * keep - step_size * m[i] / (sqrt(v[i]) * v_correction + eps);
}
// Where element i of a matrix lies in direction and y.
ulong muon_index(ulong i, ulong rows, ulong columns) { return rows > columns ? i % columns * rows + i / columns : i; }
kernel void muon_momentum(ulong work, OUT(direction), OUT(m), IN(grad), IN(squares), ulong columns,
                          float beta1, float grad_clip) {
    AT(direction) AT(m) AT(grad) AT(squares) EACH(i)
    const float norm = squares ? sqrt(squares[0]) : 0;
    if (!isfinite(norm)) return;
    const float g = grad[i] * (grad_clip > 0 && norm > grad_clip ? grad_clip / norm : 1);
    m[i] = beta1 * m[i] + (1 - beta1) * g;
    direction[muon_index(i, work / columns, columns)] = beta1 * m[i] + (1 - beta1) * g;
}
kernel void muon_normalise(ulong work, OUT(y), IN(direction), IN(squares), float factor) {
    AT(y) AT(direction) AT(squares) EACH(i)
    y[i] = direction[i] * (squares[0] > 0 ? factor / sqrt(squares[0]) : 0);
}
kernel void muon_apply(ulong work, OUT(param), IN(y), IN(squares), ulong columns, float step_size, float keep) {
    AT(param) AT(y) AT(squares) EACH(i)
    if (!squares || isfinite(squares[0]))
        param[i] = param[i] * keep - step_size * y[muon_index(i, work / columns, columns)];
}
