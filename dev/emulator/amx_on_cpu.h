// amx_on_cpu.h: a program that is compiled for Intel's AMX and includes this runs on processors without AMX too. Any
// other program takes it as a library:
//   g++ -std=c++17 -shared -fPIC -include amx_on_cpu.h -x c++ /dev/null -o amx_on_cpu.so
//   LD_PRELOAD=./amx_on_cpu.so PROGRAM
// A processor without AMX stops at each of its instructions with SIGILL. The handler reads which one it is, does by
// plain loops what Intel's manual says of it (Software Developer's Manual, volume 2; intrinsics guide), and goes on
// behind it. Only what lib/amx.h uses is here. A wrong use of tiles ends the program with a line that says what.
#pragma once
#include <array>
#include <cmath>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include <dlfcn.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

inline long amx_products_emulated = 0;  // how often tdpbf16ps was executed

namespace amx_on_cpu {

struct Tile {
    int rows, row_bytes;
    uint8_t data[16][64];
};
struct Registers {
    bool configured;
    Tile tile[8];
};
inline thread_local Registers registers;

[[noreturn]] inline void refuse(const char* why, const uint8_t* at) {
    std::fprintf(stderr, "amx_on_cpu: error: %s, instruction %02x %02x %02x %02x %02x %02x\n", why, at[0], at[1], at[2],
                 at[3], at[4], at[5]);
    _exit(1);
}

// An instruction with a VEX prefix of three bytes, which all of AMX's have (opcode map 0F38).
struct Instruction {
    const uint8_t *at, *end;
    int prefix;  // 0 none, 1 66, 2 F3, 3 F2
    int opcode, reg, rm, vvvv;
    bool memory;
    uint64_t address, stride;
};
// Registers in the order of their numbers in instructions.
constexpr std::array<int, 16> ORDER = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                       REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

inline Instruction decode(const uint8_t* at, const greg_t* general) {
    Instruction x = {};
    x.at = at;
    if (at[0] != 0xC4 || (at[1] & 0x1F) != 2) refuse("an illegal instruction that is none of AMX", at);
    const int high_base = at[1] & 0x20 ? 0 : 8, high_index = at[1] & 0x40 ? 0 : 8;
    x.vvvv = ~(at[2] >> 3) & 15, x.prefix = at[2] & 3, x.opcode = at[3];
    if (at[2] & 0x84) refuse("W and L of AMX's instructions are 0", at);
    const int mod = at[4] >> 6;
    x.reg = at[4] >> 3 & 7, x.rm = at[4] & 7, x.memory = mod != 3, x.end = at + 5;
    if (!x.memory) return x;
    const auto value = [&](int number) { return uint64_t(general[ORDER[size_t(number)]]); };
    int base = x.rm;
    if (x.rm == 4) {
        const int sib = *x.end++, index = (sib >> 3 & 7) + high_index;
        base = sib & 7;
        if (index != 4) x.stride = value(index) << (sib >> 6);
        if (base == 5 && mod == 0) refuse("an address without a base", at);
    } else if (base == 5 && mod == 0) {  // relative to the next instruction
        int32_t displacement;
        std::memcpy(&displacement, x.end, 4);
        x.end += 4, x.address = uint64_t(x.end) + uint64_t(int64_t(displacement));
        return x;
    }
    x.address = value(base + high_base);
    if (mod == 1) x.address += uint64_t(int64_t(int8_t(*x.end++)));
    if (mod == 2) {
        int32_t displacement;
        std::memcpy(&displacement, x.end, 4);
        x.end += 4, x.address += uint64_t(int64_t(displacement));
    }
    return x;
}

inline Tile& tile(int number, const Instruction& x) {
    if (!registers.configured) refuse("tiles are not configured", x.at);
    Tile& t = registers.tile[number];
    if (t.rows == 0 || t.row_bytes == 0) refuse("this tile has no rows", x.at);
    return t;
}

inline void load_config(const Instruction& x) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config;
    static_assert(sizeof config == 64, "as the processor reads it");
    std::memcpy(&config, reinterpret_cast<const void*>(x.address), 64);
    if (config.palette != 1 || config.start_row != 0) refuse("palette 1 from row 0 is the only one here", x.at);
    for (const uint8_t zero : config.reserved)
        if (zero) refuse("reserved bytes of the configuration are 0", x.at);
    registers = {};
    for (int i = 0; i < 16; i++) {
        const int rows = config.rows[i], bytes = config.row_bytes[i];
        if (i >= 8 && (rows || bytes)) refuse("there are eight tiles", x.at);
        if (rows > 16 || bytes > 64 || (rows == 0) != (bytes == 0))
            refuse("a tile has 16 rows of 64 bytes at most", x.at);
        if (i < 8) registers.tile[i].rows = rows, registers.tile[i].row_bytes = bytes;
    }
    registers.configured = true;
}

inline float widen(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

// c += a b: the products of even and of odd elements are summed apart, denormals are zero.
inline void multiply(Tile& c, const Tile& a, const Tile& b, const Instruction& x) {
    if (&c == &a || &c == &b || &a == &b) refuse("tdpbf16ps of one tile twice", x.at);
    if (c.rows != a.rows || c.row_bytes != b.row_bytes || a.row_bytes != 4 * b.rows)
        refuse("tdpbf16ps of tiles whose sizes do not fit", x.at);
    __atomic_add_fetch(&amx_products_emulated, 1, __ATOMIC_RELAXED);
    for (int m = 0; m < c.rows; m++)
        for (int n = 0; n < c.row_bytes / 4; n++) {
            float sum[2] = {}, all;
            for (int k = 0; k < a.row_bytes / 4; k++)
                for (int half = 0; half < 2; half++) {
                    uint16_t left, right;
                    std::memcpy(&left, &a.data[m][4 * k + 2 * half], 2);
                    std::memcpy(&right, &b.data[k][4 * n + 2 * half], 2);
                    sum[half] = flushed(std::fma(flushed(widen(left)), flushed(widen(right)), sum[half]));
                }
            std::memcpy(&all, &c.data[m][4 * n], 4);
            all = flushed(flushed(all) + flushed(sum[0] + sum[1]));
            std::memcpy(&c.data[m][4 * n], &all, 4);
        }
}

inline void execute(const Instruction& x) {
    enum { NONE, P66, F3, F2 };
    if (x.opcode == 0x49 && x.prefix == NONE && x.memory) return load_config(x);
    if (x.opcode == 0x49 && x.prefix == NONE && x.reg == 0 && x.rm == 0) return void(registers = {});
    if (x.opcode == 0x49 && x.prefix == F2 && !x.memory) return void(std::memset(tile(x.reg, x).data, 0, 16 * 64));
    if (x.opcode == 0x4B && x.memory && (x.prefix == F2 || x.prefix == F3)) {
        Tile& t = tile(x.reg, x);
        if (x.prefix == F2) std::memset(t.data, 0, sizeof t.data);
        for (int row = 0; row < t.rows; row++) {
            void* const memory = reinterpret_cast<void*>(x.address + uint64_t(row) * x.stride);
            if (x.prefix == F2) std::memcpy(t.data[row], memory, size_t(t.row_bytes));
            else std::memcpy(memory, t.data[row], size_t(t.row_bytes));
        }
        return;
    }
    if (x.opcode == 0x5C && x.prefix == F3 && !x.memory)
        return multiply(tile(x.reg, x), tile(x.rm, x), tile(x.vvvv, x), x);
    refuse("an instruction that is not emulated", x.at);
}

inline void on_illegal_instruction(int, siginfo_t*, void* context) {
    greg_t* const general = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
    const Instruction x = decode(reinterpret_cast<const uint8_t*>(general[REG_RIP]), general);
    execute(x);
    general[REG_RIP] = greg_t(x.end);
}
inline const struct Installed {
    Installed() {
        struct sigaction action = {};
        action.sa_sigaction = on_illegal_instruction;
        action.sa_flags = SA_SIGINFO;
        sigaction(SIGILL, &action, nullptr);
    }
} installed;

}  // namespace amx_on_cpu

// A processor without AMX is refused AMX by Linux (arch_prctl ARCH_REQ_XCOMP_PERM, XTILEDATA); here it is granted.
extern "C" long syscall(long number, ...) {
    va_list arguments;
    va_start(arguments, number);
    long x[6];
    for (long& value : x) value = va_arg(arguments, long);
    va_end(arguments);
    static const auto system = reinterpret_cast<long (*)(long, ...)>(dlsym(RTLD_NEXT, "syscall"));
    const long result = system(number, x[0], x[1], x[2], x[3], x[4], x[5]);
    return number == SYS_arch_prctl && x[0] == 0x1023 && x[1] == 18 ? 0 : result;
}
