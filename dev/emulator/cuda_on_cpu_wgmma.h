// cuda_on_cpu_wgmma.h: wgmma, the products of warpgroups on GPUs of compute capability 9.0, under the names that
// lib/cuda/wgmma.cuh gives to its PTX. As late as the program allows: a product is made when its warp waits for it, and
// until then its accumulators are NaN.
//
// Reported, beyond what ends in NaN
//   - a wgmma without a wgmma_fence since the last wgmma_wait, or whose accumulators or A registers were written after
//     the fence (seen for arrays that an earlier wgmma had too, so in a loop from its second turn on)
//   - accumulators or A registers written before the wait; the arrays must live until then
//   - shared memory that a wgmma reads under way written before all four warps have waited (by cp.async, and in the
//     CHECK build by anything, at once; else found at the wait, if the bytes have changed)
//   - bytes that a wgmma reads and whose writer had no async_fence and then a barrier in between: by cp.async, and in
//     the CHECK build by anything
//   - tiles that do not begin at a multiple of 1024 bytes, operands that begin inside of a row or outside of shared
//     memory, warps of a warpgroup that issue different wgmma, a return with any of them not waited for, and wgmma on a
//     GPU that has none
#pragma once

struct WgmmaTile {
    char* tile;
    int offset;        // of the operand, in bytes
    unsigned leading;  // bytes from 64 columns to the next, where rows run along k
    bool operator==(const WgmmaTile& o) const { return tile == o.tile && offset == o.offset && leading == o.leading; }
};

namespace emu {
struct Operand {  // of rows of 32 bytes, or of 16 rows along k
    WgmmaTile at;
    int rows, row_bytes;
    EMU_ENGINE int chunks() const { return rows * row_bytes / 16; }  // of 16 bytes, row by row
    EMU_ENGINE char* chunk(int i) const {
        const int row = i / (row_bytes / 16), byte = i % (row_bytes / 16) * 16;
        const int place = at.offset + row * 128 + byte / 128 * int(at.leading) + byte % 128;
        return at.tile + (place ^ (place >> 3 & 0x70));
    }
};

struct Product {  // one wgmma of a warpgroup
    int n;        // pieces of 8 columns
    bool add, a_in_registers, columns;
    WgmmaTile a_tile, b_tile;
    Site site;
    const void* place;   // of the call in the program
    int to_land = 4;     // warps that have not waited for it
    uint64_t bytes = 0;  // what the operands held when it was issued
    EMU_ENGINE Operand a() const { return {a_tile, a_in_registers ? 0 : 64, 32}; }
    EMU_ENGINE Operand b() const { return columns ? Operand{b_tile, 16, n * 16} : Operand{b_tile, n * 8, 32}; }
    EMU_ENGINE bool operator==(const Product& o) const {
        return n == o.n && add == o.add && a_in_registers == o.a_in_registers && columns == o.columns &&
               a_tile == o.a_tile && b_tile == o.b_tile && site == o.site;
    }
};
struct Warpgroup {
    std::deque<Product> products;  // that not all four warps have waited for
    long first;                    // number of the front one
};
inline Warpgroup warpgroups[MAX_WARPS / 4];

struct Accumulators {  // of a warp, that its wgmma under way write
    float* c[32];
    int n, under_way;
    float values[16][128];
};
struct Issued {
    long number;
    int group;
    float* c;  // of lane 0
    const unsigned* a[32];
    uint64_t a_held[32];
};
struct Registers {  // an array that a wgmma had, and what it held at the last wgmma_fence
    const void* at;
    int words;
    uint64_t held;
};
struct WgmmaWarp {
    bool fenced;
    int group;
    long issued;
    std::deque<Issued> under_way;
    std::deque<Accumulators> accumulators;
    std::vector<Registers> registers[32];
};
inline WgmmaWarp wgmma_warps[MAX_WARPS];

// A hash of words that may belong to a variable that is gone.
__attribute__((no_sanitize_address)) EMU_ENGINE EMU_NOINLINE inline uint64_t hash_of(const void* at, int words,
                                                                                     uint64_t hash = 1) {
    for (int i = 0; i < words; i++)
        hash = (hash ^ ((const unsigned*)at)[i]) * 0x9E3779B97F4A7C15ull, hash ^= hash >> 29;
    return hash;
}
EMU_ENGINE inline uint64_t hash_of(const Product& p) {
    uint64_t hash = 1;
    for (const Operand& o : {p.a(), p.b()})
        for (int i = 0; i < o.chunks(); i++) hash = hash_of(o.chunk(i), 4, hash);
    return hash;
}

EMU_ENGINE inline void begin_wgmma() {  // of a block
    for (Warpgroup& g : warpgroups) g.first = 0;
    for (WgmmaWarp& w : wgmma_warps) {
        w.fenced = false, w.group = 0, w.issued = 0;
        if (w.registers[0].size())
            for (auto& r : w.registers) r.clear();
    }
}
EMU_ENGINE inline void end_wgmma() {  // of the running thread
    const int warp = machine.current / 32;
    const WgmmaWarp& w = wgmma_warps[warp];
    const Warpgroup& g = warpgroups[warp / 4];
    if (w.under_way.size())
        stop("the thread returns with %zu wgmma that it has not %s", w.under_way.size(),
             w.under_way.back().group == w.group ? "committed" : "waited for");
    if (g.first + long(g.products.size()) > w.issued)
        stop("the thread returns, but other warps of its warpgroup have issued a wgmma at %s:%d",
             g.products.back().site.file, g.products.back().site.line);
}

// What the asynchronous proxy reads has to be written, fenced by its writer, and then behind a barrier.
EMU_ENGINE inline void start_operand(const Operand& o, const Product& p) {
    if (o.at.offset % 1024 + min(o.row_bytes, 128) > 128 || o.at.offset % 16)
        stop("wgmma at %s:%d: an operand begins at byte %d of a tile, inside of a row or of eight rows", p.site.file,
             p.site.line, o.at.offset);
    for (int i = 0; i < o.chunks(); i++) {
        char* chunk = o.chunk(i);
        if (!is_shared(chunk, 16)) stop("wgmma at %s:%d: outside of shared memory", p.site.file, p.site.line);
        for (int byte = 0; byte < 16; byte += 2) {
            SharedCell& cell = shared_cells[(chunk + byte - machine.range) / 2];
            cell.readers++;
            if (cell.interval < machine.clock.block_start) continue;  // not known
            const std::vector<unsigned>& fences = machine.threads[cell.thread].async_fences;
            const uint3& writer = machine.threads[cell.thread].index;
            if (cell.fences == fences.size() || fences[cell.fences] == machine.clock.interval)
                stop("wgmma at %s:%d reads %s, which thread (%u,%u,%u) wrote without %s since", p.site.file,
                     p.site.line, describe_address(chunk + byte).c_str(), writer.x, writer.y, writer.z,
                     cell.fences == fences.size() ? "an async_fence" : "a barrier behind its async_fence");
        }
    }
}
EMU_ENGINE inline void end_operand(const Operand& o) {
    for (int i = 0; i < o.chunks(); i++)
        for (int byte = 0; byte < 16; byte += 2) shared_cells[(o.chunk(i) + byte - machine.range) / 2].readers--;
}

struct IssueWgmma {
    Product product;
    float* c;
    const unsigned* a;

    // Registers that were written after the last wgmma_fence.
    EMU_ENGINE static void check_registers(std::vector<Registers>& known, const void* at, int words, const char* what,
                                           const Product& p, bool check) {
        const uint64_t holds = hash_of(at, words);
        for (const Registers& r : known)
            if (r.at == at && r.words == words) {
                if (check && r.held != holds)
                    stop("wgmma at %s:%d: its %s were written after the wgmma_fence", p.site.file, p.site.line, what);
                return;
            }
        known.push_back({at, words, holds});
    }
    EMU_ENGINE static void run(unsigned lanes, void** arguments) {
        const int warp = machine.current / 32, first_warp = warp / 4 * 4;
        const IssueWgmma& call = *(IssueWgmma*)arguments[0];
        const Product& p = call.product;
        const Site& site = p.site;
        if (machine.capability != 90) stop("wgmma at %s:%d: this GPU has no wgmma, only 9.0 has", site.file, site.line);
        if (lanes != ~0u || first_warp * 32 + 128 > machine.thread_count)
            stop("wgmma at %s:%d needs four whole warps", site.file, site.line);
        for (int l = 0; l < 32; l++)
            if (!(((IssueWgmma*)arguments[l])->product == p))
                stop("wgmma at %s:%d: the lanes of a warp name different tiles", site.file, site.line);
        WgmmaWarp& w = wgmma_warps[warp];
        Warpgroup& g = warpgroups[warp / 4];
        for (int i = first_warp; i < first_warp + 4; i++)
            if (!machine.warp_live[i] && wgmma_warps[i].issued <= w.issued)
                stop("wgmma at %s:%d: another warp of the warpgroup has returned", site.file, site.line);
        if (!w.fenced)
            stop("wgmma at %s:%d without a wgmma_fence before it, behind the last wgmma_wait", site.file, site.line);
        const long number = w.issued++;
        if (number == g.first + long(g.products.size())) {
            start_operand(p.a(), p), start_operand(p.b(), p);
            g.products.push_back(p);
            g.products.back().bytes = hash_of(p);
        } else if (const Product& other = g.products[size_t(number - g.first)]; !(other == p))
            stop("wgmma at %s:%d: other warps of the warpgroup issue another one, at %s:%d, or name other tiles",
                 site.file, site.line, other.site.file, other.site.line);

        Accumulators* held = nullptr;
        for (Accumulators& of : w.accumulators)
            if (of.c[0] == call.c) held = &of;
        Issued issued = {number, w.group, call.c, {}, {}};
        for (int l = 0; l < 32; l++) {
            const IssueWgmma& lane = *(IssueWgmma*)arguments[l];
            if (p.a_in_registers) check_registers(w.registers[l], lane.a, 4, "A registers", p, true);
            if (!held) check_registers(w.registers[l], lane.c, p.n * 4, "accumulators", p, p.add);
            issued.a[l] = lane.a, issued.a_held[l] = p.a_in_registers ? hash_of(lane.a, 4) : 0;
        }
        w.under_way.push_back(issued);
        if (!held) {
            w.accumulators.push_back({});
            held = &w.accumulators.back();
            held->n = p.n;
            for (int l = 0; l < 32; l++) {
                held->c[l] = ((IssueWgmma*)arguments[l])->c;
                move_lane(*held, l, false);
                poison(held->c[l], size_t(p.n) * 16, SHARED_POISON);
            }
        }
        held->under_way++;
    }
    // From the lane's registers into the rows of its warp, or back.
    EMU_ENGINE static void move_lane(Accumulators& of, int lane, bool back) {
        for (int i = 0; i < of.n * 2; i++) {
            float* pair = &of.values[lane / 4 + i % 2 * 8][i / 2 * 8 + lane % 4 * 2];
            memcpy(back ? of.c[lane] + i * 2 : pair, back ? pair : of.c[lane] + i * 2, 8);
        }
    }
};

struct WaitWgmma {
    int groups;
    EMU_ENGINE static void run(unsigned, void** arguments) {
        WgmmaWarp& w = wgmma_warps[machine.current / 32];
        Warpgroup& g = warpgroups[machine.current / 128];
        w.fenced = false;
        while (w.under_way.size() && w.under_way.front().group < w.group - ((WaitWgmma*)arguments[0])->groups) {
            land(w, w.under_way.front(), g.products[size_t(w.under_way.front().number - g.first)]);
            w.under_way.pop_front();
            for (; g.products.size() && g.products.front().to_land == 0; g.products.pop_front()) g.first++;
        }
    }
    EMU_ENGINE static void land(WgmmaWarp& w, const Issued& issued, Product& p) {
        if (hash_of(p) != p.bytes)
            stop("shared memory that a wgmma at %s:%d reads was written before the wgmma_wait", p.site.file,
                 p.site.line);
        const int warp = machine.current / 32;
        alignas(16) float a[16][16], b[16][128];
        for (int l = 0; l < 32 && p.a_in_registers; l++) {
            if (hash_of(issued.a[l], 4) != issued.a_held[l])
                stop("the A registers of a wgmma at %s:%d were written before the wgmma_wait", p.site.file,
                     p.site.line);
            for (int r = 0; r < 4; r++) {
                float* pair = &a[l / 4 + r % 2 * 8][l % 4 * 2 + r / 2 * 8];
                Mma::unpack(issued.a[l][r], pair[0], pair[1]);
            }
        }
        for (int i = 0; i < 32 && !p.a_in_registers; i++)
            read_chunk(&a[i / 2][i % 2 * 8], 1, p.a(), warp % 4 * 32 + i, p);
        const Operand b_at = p.b();
        for (int i = 0; i < b_at.chunks(); i++)
            if (p.columns) read_chunk(&b[i / p.n][i % p.n * 8], 1, b_at, i, p);
            else read_chunk(&b[i % 2 * 8][i / 2], 128, b_at, i, p);
        auto held = w.accumulators.begin();
        while (held->c[0] != issued.c) ++held;
        if (!p.add) memset(held->values, 0, sizeof held->values);
        for (int row = 0; row < 16; row++)
            for (int column = 0; column < p.n * 8; column += 4) {
                float* c = &held->values[row][column];
                Mma::Vector sum;
                memcpy(&sum, c, 16);
                sum = Mma::add_products(sum, a[row], &b[0][column], 128);
                memcpy(c, &sum, 16);
            }
        if (--p.to_land == 0) end_operand(p.a()), end_operand(p.b());
        if (--held->under_way) return;
        for (int l = 0; l < 32; l++) {
            for (int i = 0; i < held->n * 8; i++)
                if (((const unsigned short*)held->c[l])[i] != SHARED_POISON)
                    stop("the accumulators of a wgmma at %s:%d were written before the wgmma_wait", p.site.file,
                         p.site.line);
            IssueWgmma::move_lane(*held, l, true);
        }
        w.accumulators.erase(held);
    }
    EMU_ENGINE static void read_chunk(float* out, int stride, const Operand& o, int i, const Product& p) {
        const char* chunk = o.chunk(i);
#ifdef EMU_CHECK
        on_access(chunk, 16, Access::READ, p.place);
#endif
        (void)p;
        for (int e = 0; e < 8; e++) {
            unsigned short bits;
            memcpy(&bits, chunk + e * 2, 2);
            const unsigned word = unsigned(bits) << 16;
            memcpy(out + e * stride, &word, 4);
        }
    }
};

EMU_ENGINE inline void fence_wgmma(unsigned, void**) {
    WgmmaWarp& w = wgmma_warps[machine.current / 32];
    w.fenced = true;
    for (auto& lane : w.registers)
        for (Registers& r : lane) r.held = hash_of(r.at, r.words);
}
EMU_ENGINE inline void commit_wgmma(unsigned, void**) { wgmma_warps[machine.current / 32].group++; }

template <int N>
EMU_ENGINE EMU_NOINLINE inline void issue_wgmma(float (&c)[N][4], const unsigned* a, WgmmaTile a_tile, WgmmaTile b,
                                                bool add, bool columns, Site site) {
    static_assert(N == 8 || N == 16);
    IssueWgmma call = {{N, add, a != nullptr, columns, a_tile, b, site, __builtin_return_address(0)}, c[0], a};
    warp_function(~0u, IssueWgmma::run, &call, "wgmma", site);
}
}  // namespace emu

EMU_ENGINE inline WgmmaTile wgmma_tile(const __nv_bfloat16* tile, unsigned leading_bytes = 0, EMU_SITE) {
    if (uintptr_t(tile) % 1024)
        emu::stop("wgmma_tile: %s is at %d modulo 1024, at %s:%d", emu::describe_address(tile).c_str(),
                  int(uintptr_t(tile) % 1024), site.file, site.line);
    return {(char*)tile, 0, leading_bytes};
}
inline WgmmaTile operator+(WgmmaTile tile, int bytes) { return {tile.tile, tile.offset + bytes, tile.leading}; }
EMU_ENGINE EMU_NOINLINE inline void wgmma_fence(EMU_SITE) {
    emu::warp_function(~0u, emu::fence_wgmma, nullptr, "wgmma_fence", site);
}
EMU_ENGINE EMU_NOINLINE inline void wgmma_commit(EMU_SITE) {
    emu::warp_function(~0u, emu::commit_wgmma, nullptr, "wgmma_commit", site);
}
template <int GROUPS>
EMU_ENGINE EMU_NOINLINE inline void wgmma_wait(EMU_SITE) {
    emu::WaitWgmma wait = {GROUPS};
    emu::warp_function(~0u, emu::WaitWgmma::run, &wait, "wgmma_wait", site);
}
template <int GROUPS, int N>
EMU_ENGINE EMU_NOINLINE inline void wgmma_wait(float (&)[N][4], EMU_SITE) {
    wgmma_wait<GROUPS>(site);
}
EMU_ENGINE inline void async_fence() {
    emu::machine.threads[emu::machine.current].async_fences.push_back(emu::machine.clock.interval);
}
// c (64 x 8 N) = a b^T or += a b^T, and += a b where b's rows run along k; 16 rows of c and a in each warp
template <int N>
inline void wgmma_first(float (&c)[N][4], WgmmaTile a, WgmmaTile b, EMU_SITE) {
    emu::issue_wgmma(c, nullptr, a, b, false, false, site);
}
template <int N>
inline void wgmma_add(float (&c)[N][4], WgmmaTile a, WgmmaTile b, EMU_SITE) {
    emu::issue_wgmma(c, nullptr, a, b, true, false, site);
}
template <int N>
inline void wgmma_first(float (&c)[N][4], const unsigned (&a)[4], WgmmaTile b, EMU_SITE) {
    emu::issue_wgmma(c, a, {}, b, false, false, site);
}
template <int N>
inline void wgmma_add(float (&c)[N][4], const unsigned (&a)[4], WgmmaTile b, EMU_SITE) {
    emu::issue_wgmma(c, a, {}, b, true, false, site);
}
template <int N>
inline void wgmma_add_columns(float (&c)[N][4], const unsigned (&a)[4], WgmmaTile b, EMU_SITE) {
    emu::issue_wgmma(c, a, {}, b, true, true, site);
}
