// cuda_on_cpu_check.h: what the CHECK build adds: every access to shared and device memory is checked, misaligned ones
// too. Races are those that barriers, __syncwarp, atomics and launches leave (shuffles order nothing, as in CUDA),
// whether or not this schedule produces a wrong number. The compiler calls the __tsan functions at the end of this
// file. Local variables and host memory are recognised by their address and ignored. It takes 1.5 to 5 times as long as
// the plain build, and 27 bytes for every byte touched.
//
// A limit: the unit is two bytes, so it would report a false race if two threads used neighbouring single bytes.
#pragma once
#include "cuda_on_cpu_engine.h"
#ifdef EMU_CHECK

extern "C" char __executable_start;  // from the linker: where the program is loaded

namespace emu {

// Reads, or atomic updates, by one warp in one interval and between two of its __syncwarp().
struct Use {
    unsigned interval, lanes;
    unsigned short sync;  // how many __syncwarp() the warp has passed
    unsigned char warp;
    bool atomic;
    unsigned place;  // in the program, relative to __executable_start
};
// What is known about two bytes. Of reads and updates that no barrier orders, those of two warps are enough: a later
// access that conflicts with a third warp's also conflicts with one of these. Of plain writes the last is enough: if it
// had not been ordered after the one before, that would have been reported.
struct Cell {
    unsigned interval;  // of the last plain write
    unsigned short thread, sync;
    unsigned place;
    Use use[2];
    unsigned earlier_read, earlier_update;  // intervals of the latest by earlier blocks that have left `use`
};
inline Cell* cells = nullptr;   // one for every two bytes of the range
inline Known* known = nullptr;  // likewise

inline void reserve_cells() {
    cells = (Cell*)reserve_addresses(RANGE_BYTES / 2 * sizeof(Cell), PROT_READ | PROT_WRITE);
    known = (Known*)reserve_addresses(RANGE_BYTES / 2, PROT_READ | PROT_WRITE);
}
inline void release_cells(const char* address, size_t bytes) {
    const size_t first = size_t(address - machine.range) / 2;
    release_pages((char*)(cells + first), bytes / 2 * sizeof(Cell));
}
EMU_ENGINE inline void set_known(const void* address, size_t bytes, Known k) {
    const size_t start = size_t((const char*)address - machine.range);
    memset(known + start / 2, k, (start + bytes + 1) / 2 - start / 2);
}

// ---- reports

// "file:line" of an instruction: the innermost one outside the emulator's headers.
inline std::string source_line(unsigned place) {
    char program[256] = "", line[512];
    if (readlink("/proc/self/exe", program, sizeof program - 1) < 0) return "?";
    // Addresses in a position-independent program begin at 0. place is a return address, and place - 1 is in the call.
    const uint64_t start = uint64_t(&__executable_start), base = start > 0x10000000 ? 0 : start;
    std::string found = "an unknown line (compile with -g, install addr2line)";
    char command[600];
    snprintf(command, sizeof command, "addr2line -s -i -e '%s' 0x%llx", program,
             (unsigned long long)(base + place - 1));
    FILE* lines = popen(command, "r");
    while (lines && fgets(line, sizeof line, lines)) {
        line[strcspn(line, " \n")] = 0;
        if (strncmp(line, "cuda_on_cpu", 11) && line[0] != '?') {
            found = line;
            break;
        }
    }
    if (lines) pclose(lines);
    return found;
}

[[noreturn]] EMU_ENGINE EMU_NOINLINE inline void stop_access(const char* why, const char* p, Access kind,
                                                             unsigned place) {
    static const char* const verbs[] = {"reads", "writes", "atomically updates"};
    stop("%s: %s %s at %s", why, verbs[int(kind)], describe_address(p).c_str(), source_line(place).c_str());
}
// other: a thread of this block, or -1 for an earlier block; other_place 0: not remembered
[[noreturn]] EMU_ENGINE EMU_NOINLINE inline void stop_race(const char* p, Access kind, unsigned place,
                                                           const char* other_did, int other, unsigned other_place) {
    char who[64] = "another block";
    if (other >= 0) {
        const uint3& i = machine.threads[other].index;
        snprintf(who, sizeof who, "thread (%u,%u,%u)", i.x, i.y, i.z);
    }
    const std::string where = other_place ? " at " + source_line(other_place) : "";
    char why[700];
    snprintf(why, sizeof why, "race between %s, %s %s it%s and nothing orders the two",
             other >= 0 ? "threads" : "blocks", who, other_did, where.c_str());
    stop_access(why, p, kind, place);
}

// ---- checks

struct Accessor {  // who makes the access
    int thread, warp, lane;
    bool blocks_ordered;  // of shared memory, everything that earlier blocks did is before this access
};

// Whether an access by `lane` of the accessor's own warp, made when the warp had passed `sync` of its __syncwarp(), is
// ordered before the accessor's.
EMU_ENGINE __attribute__((always_inline)) inline bool after_sync(const Accessor& me, int lane, unsigned short sync) {
    const Clock& clock = machine.clock;
    return short(clock.last_sync[me.thread] - sync) > 0 && clock.last_sync_mask[me.thread] >> lane & 1;
}

EMU_ENGINE __attribute__((always_inline)) inline void judge_cell(Cell& c, const Accessor& me, Access kind,
                                                                 unsigned place, const char* p) {
    const Clock& clock = machine.clock;
    // An access belongs to this launch if its interval is >= launch_start, and to this block if >= block_start. Within
    // a block, no barrier is between accesses of the same interval.
    if (c.interval >= clock.launch_start) {
        const bool earlier_block = c.interval < clock.block_start;
        const bool same_warp_ordered = c.thread / 32 == me.warp && after_sync(me, c.thread % 32, c.sync);
        if (earlier_block ? !me.blocks_ordered
                          : c.interval == clock.interval && c.thread != me.thread && !same_warp_ordered)
            stop_race(p, kind, place, "wrote", earlier_block ? -1 : c.thread, c.place);
    }
    for (const Use& u : c.use) {
        if (u.interval < clock.launch_start || (u.atomic ? kind == Access::ATOMIC : kind == Access::READ)) continue;
        const bool earlier_block = u.interval < clock.block_start;
        const unsigned others = u.warp == me.warp ? u.lanes & ~(1u << me.lane) : u.lanes;
        const bool same_warp_ordered = others && u.warp == me.warp && after_sync(me, __builtin_ctz(others), u.sync);
        if (earlier_block ? !me.blocks_ordered : u.interval == clock.interval && others && !same_warp_ordered)
            stop_race(p, kind, place, u.atomic ? "atomically updated" : "read",
                      earlier_block ? -1 : u.warp * 32 + __builtin_ctz(others), u.place);
    }
    // earlier_read and earlier_update are intervals of earlier blocks; of this launch, if they are >= launch_start.
    if (!me.blocks_ordered && ((kind != Access::READ && c.earlier_read >= clock.launch_start) ||
                               (kind != Access::ATOMIC && c.earlier_update >= clock.launch_start)))
        stop_race(p, kind, place, "used", -1, 0);

    if (kind == Access::WRITE) {
        c.interval = clock.interval, c.thread = (unsigned short)me.thread, c.sync = clock.warp_syncs[me.warp],
        c.place = place;
        return;
    }
    const bool atomic = kind == Access::ATOMIC;
    Use* use = nullptr;
    for (Use& u : c.use)
        if (u.interval == clock.interval && u.warp == me.warp && u.atomic == atomic) use = &u;
    if (!use) {  // reuse one of an older interval, else this warp's own, so that two warps are remembered
        use = c.use[0].interval != clock.interval                               ? &c.use[0]
              : c.use[1].interval != clock.interval || c.use[1].warp == me.warp ? &c.use[1]
                                                                                : &c.use[0];
        unsigned& earlier = use->atomic ? c.earlier_update : c.earlier_read;
        if (use->interval < clock.block_start && use->interval > earlier) earlier = use->interval;
        use->interval = 0;
    }
    if (use->interval != clock.interval || use->sync != clock.warp_syncs[me.warp])
        *use = {clock.interval, 0, clock.warp_syncs[me.warp], (unsigned char)me.warp, atomic, place};
    use->lanes |= 1u << me.lane;
}

EMU_ENGINE EMU_NOINLINE inline void on_access(const void* address, size_t bytes, Access kind,
                                              const void* return_address) {
    const size_t offset = size_t((const char*)address - machine.range);
    if (offset >= RANGE_BYTES || !machine.range || !bytes) return;  // a local variable, or host memory
    const unsigned place = unsigned((const char*)return_address - &__executable_start);
    if (bytes <= 16 && !(bytes & (bytes - 1)) && offset & (bytes - 1))
        stop_access("misaligned", (const char*)address, kind, place);
    if (machine.current == HOST && !machine.range_opened)
        stop_access("host code touches device memory", (const char*)address, kind, place);
    const Accessor me = {machine.current, machine.current / 32, machine.current % 32, offset < SHARED_PART};
    for (size_t i = offset / 2; i <= (offset + bytes - 1) / 2; i++) {
        const char* p = i == offset / 2 ? (const char*)address : machine.range + i * 2;
        if (known[i] == OUTSIDE) stop_access("outside of any array", p, kind, place);
        if (machine.current != HOST) {  // copies and library calls are ordered by their stream
            if (known[i] == UNWRITTEN && kind != Access::WRITE) stop_access("never written", p, kind, place);
            judge_cell(cells[i], me, kind, place, p);
        }
        if (kind != Access::READ) known[i] = WRITTEN;
    }
    if (kind != Access::READ && offset < SHARED_PART && note_shared_write(address, bytes))
        stop_access("a wgmma under way reads these bytes", (const char*)address, kind, place);
}

}  // namespace emu

// ---------------------------------------------------------------------------------------------------------------------
// What code that is compiled with -fsanitize=thread calls. Weak, because several object files may contain them.

#define EMU_HOOK EMU_ENGINE __attribute__((weak))
extern "C" {
#define EMU_ACCESS_HOOKS(bytes)                                                         \
    EMU_HOOK void __tsan_read##bytes(void* p) { EMU_ACCESS(p, bytes, READ); }           \
    EMU_HOOK void __tsan_write##bytes(void* p) { EMU_ACCESS(p, bytes, WRITE); }         \
    EMU_HOOK void __tsan_unaligned_read##bytes(void* p) { EMU_ACCESS(p, bytes, READ); } \
    EMU_HOOK void __tsan_unaligned_write##bytes(void* p) { EMU_ACCESS(p, bytes, WRITE); }
EMU_ACCESS_HOOKS(1)
EMU_ACCESS_HOOKS(2)
EMU_ACCESS_HOOKS(4)
EMU_ACCESS_HOOKS(8)
EMU_ACCESS_HOOKS(16)
EMU_HOOK void __tsan_read_range(void* p, size_t bytes) { EMU_ACCESS(p, bytes, READ); }
EMU_HOOK void __tsan_write_range(void* p, size_t bytes) { EMU_ACCESS(p, bytes, WRITE); }
EMU_HOOK void __tsan_init() {}
EMU_HOOK void __tsan_func_entry(void*) {}
EMU_HOOK void __tsan_func_exit() {}
EMU_HOOK void __tsan_vptr_update(void**, void*) {}
EMU_HOOK void __tsan_vptr_read(void**) {}

// With -fsanitize=undefined too: prints the thread before the report of an undefined shift, overflow or index.
EMU_HOOK void __ubsan_on_report() {
    emu::print_where();
    fprintf(stderr, "undefined behaviour, as follows\n");
}

// std::atomic, std::shared_ptr and guards of static variables in host code, which may have several threads, go to the
// hardware.
#define EMU_ATOMIC_HOOKS(bits, type)                                                                                 \
    EMU_HOOK type __tsan_atomic##bits##_load(const volatile type* p, int) {                                          \
        return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                                                 \
    }                                                                                                                \
    EMU_HOOK void __tsan_atomic##bits##_store(volatile type* p, type v, int) {                                       \
        __atomic_store_n(p, v, __ATOMIC_SEQ_CST);                                                                    \
    }                                                                                                                \
    EMU_HOOK type __tsan_atomic##bits##_exchange(volatile type* p, type v, int) {                                    \
        return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST);                                                          \
    }                                                                                                                \
    EMU_HOOK type __tsan_atomic##bits##_fetch_add(volatile type* p, type v, int) {                                   \
        return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);                                                           \
    }                                                                                                                \
    EMU_HOOK type __tsan_atomic##bits##_fetch_sub(volatile type* p, type v, int) {                                   \
        return __atomic_fetch_sub(p, v, __ATOMIC_SEQ_CST);                                                           \
    }                                                                                                                \
    EMU_HOOK type __tsan_atomic##bits##_fetch_or(volatile type* p, type v, int) {                                    \
        return __atomic_fetch_or(p, v, __ATOMIC_SEQ_CST);                                                            \
    }                                                                                                                \
    EMU_HOOK int __tsan_atomic##bits##_compare_exchange_strong(volatile type* p, type* expected, type v, int, int) { \
        return __atomic_compare_exchange_n(p, expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);               \
    }
EMU_ATOMIC_HOOKS(8, unsigned char)
EMU_ATOMIC_HOOKS(16, unsigned short)
EMU_ATOMIC_HOOKS(32, unsigned)
EMU_ATOMIC_HOOKS(64, unsigned long)
EMU_HOOK void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
EMU_HOOK void __tsan_atomic_signal_fence(int) {}
}
#endif
