// util.h: UTF-8, errors that fit on one line, clocks, counter-based random numbers, limits of a container. Every other
// file uses it.
#pragma once
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fstream>
#include <limits>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "output.h"

// The text of a macro's value.
#define QUOTED(word) #word
#define QUOTED_VALUE(macro) QUOTED(macro)

// ---------------------------------------------------------------------------------------------------------------------
// UTF-8 (RFC 3629: no overlong forms, no surrogates, nothing above U+10FFFF), and text that is safe to print.

// Decodes the character at s[0], of which n bytes may be read: returns its length in bytes (1 to 4) and its code point
// in *code, or 0 if the bytes are not valid UTF-8.
inline int utf8_decode(const char* s, size_t n, uint32_t* code) {
    const unsigned char* u = reinterpret_cast<const unsigned char*>(s);
    if (n == 0) return 0;
    if (u[0] < 0x80) {
        *code = u[0];
        return 1;
    }
    const auto continues = [&](size_t i) { return i < n && (u[i] & 0xC0) == 0x80; };
    if (u[0] >= 0xC2 && u[0] <= 0xDF && continues(1)) {
        *code = uint32_t(u[0] & 0x1F) << 6 | (u[1] & 0x3F);
        return 2;
    }
    if (u[0] >= 0xE0 && u[0] <= 0xEF && continues(1) && continues(2)) {
        *code = uint32_t(u[0] & 0x0F) << 12 | uint32_t(u[1] & 0x3F) << 6 | (u[2] & 0x3F);
        return *code >= 0x800 && (*code < 0xD800 || *code > 0xDFFF) ? 3 : 0;
    }
    if (u[0] >= 0xF0 && u[0] <= 0xF4 && continues(1) && continues(2) && continues(3)) {
        *code = uint32_t(u[0] & 0x07) << 18 | uint32_t(u[1] & 0x3F) << 12 | uint32_t(u[2] & 0x3F) << 6 | (u[3] & 0x3F);
        return *code >= 0x10000 && *code <= 0x10FFFF ? 4 : 0;
    }
    return 0;
}

// Makes any text safe to print in a message: one line that cannot upset the terminal, whatever a file, an option or a
// variable put into it. The bytes of control characters, of Unicode's line separators and direction marks, and of
// invalid UTF-8 are shown as \xNN; a long text loses its middle.
inline std::string printable(const std::string& text) {
    constexpr size_t limit = 2000, tail = 500;
    size_t gap_begin = text.size(), gap_end = text.size();
    if (text.size() > limit) {
        const auto in_character = [&](size_t i) { return (text[i] & 0xC0) == 0x80; };  // not at its first byte
        gap_begin = limit - tail;
        gap_end = text.size() - tail;
        for (int back = 0; back < 3 && in_character(gap_end); back++) gap_end--;
    }
    std::string out;
    for (size_t i = 0; i < text.size();) {
        if (i >= gap_begin && i < gap_end) {
            out += " ... ";
            i = gap_end;
        }
        uint32_t code = 0;
        const int length = utf8_decode(text.data() + i, text.size() - i, &code);
        const bool hidden = code < 0x20 || (code >= 0x7F && code < 0xA0) || code == 0xFEFF ||
                            (code >= 0x200B && code <= 0x200F) || (code >= 0x2028 && code <= 0x202E) ||
                            (code >= 0x2060 && code <= 0x206F);
        const size_t end = i + size_t(length ? length : 1);
        for (; i < end; i++) {
            const unsigned char byte = static_cast<unsigned char>(text[i]);
            if (length == 0 || hidden)
                out += std::string("\\x") + "0123456789abcdef"[byte >> 4] + "0123456789abcdef"[byte & 15];
            else out += text[i];
        }
    }
    return out;
}

// ---------------------------------------------------------------------------------------------------------------------
// Errors. Everything a user can cause is thrown as an Error, whose text is one line: what went wrong, where (file,
// offset, option), what was expected, what to do. main() prints it and exits with its status: 2 for wrong usage, 1 for
// everything else.

struct Error : std::runtime_error {
    int status;
    Error(int status, const std::string& text) : std::runtime_error(printable(text)), status(status) {}
};

// An error that every rank throws at the same place: rank 0 alone prints it.
struct SharedError : Error {
    explicit SharedError(const std::string& text, int status = 1) : Error(status, text) {}
};

__attribute__((format(printf, 1, 0))) inline std::string format_list(const char* format, va_list args) {
    va_list again;
    va_copy(again, args);
    std::string text(static_cast<size_t>(std::vsnprintf(nullptr, 0, format, args)), '\0');
    std::vsnprintf(&text[0], text.size() + 1, format, again);
    va_end(again);
    return text;
}

__attribute__((format(printf, 1, 2))) inline std::string format_text(const char* format, ...) {
    va_list args;
    va_start(args, format);
    std::string text = format_list(format, args);
    va_end(args);
    return text;
}

// A path as it can be pasted into a shell, and seen on a terminal: what a terminal would obey, and bytes that are no
// UTF-8, take the $'\x1b' of bash and zsh.
inline std::string shell_word(const std::string& path) {
    if (printable(path) != path) {
        std::string word = "$'";
        for (const char c : path) {
            if (c == '\'' || c == '\\') word += '\\';
            word += uint8_t(c) >= ' ' && uint8_t(c) < 127 ? std::string(1, c) : format_text("\\x%02x", uint8_t(c));
        }
        return word + "'";
    }
    if (path.find_first_not_of("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-+=.,:/@%") ==
        std::string::npos)
        return path;
    std::string word = "'";
    for (char c : path) word += c == '\'' ? "'\\''" : std::string(1, c);
    return word + "'";
}

// Bad data, a failed system call, a missing file: exit status 1.
[[noreturn]] __attribute__((format(printf, 1, 2))) inline void fail(const char* format, ...) {
    va_list args;
    va_start(args, format);
    std::string text = format_list(format, args);
    va_end(args);
    throw Error(1, text);
}

// A wrong option or a contradiction between options: exit status 2.
[[noreturn]] __attribute__((format(printf, 1, 2))) inline void fail_usage(const char* format, ...) {
    va_list args;
    va_start(args, format);
    std::string text = format_list(format, args);
    va_end(args);
    throw Error(2, text);
}

// One line about something that went wrong and that the program survives. Where stderr would make it wait, it stands
// among what is printed.
inline void complain(const std::string& text) {
    output().settle();
    std::FILE* const file = output().may_wait || takes_output(STDERR_FILENO) ? stderr : stdout;
    std::fprintf(file, "train_nsa: warning: %s\n", printable(text).c_str());
}

// What start() returns, which starts a thread. purpose: what for, where the system has none to give.
template <class Start>
auto start_or_fail(const char* purpose, Start start) {
    try {
        return start();
    } catch (const std::system_error& e) {
        fail("cannot start a thread %s: %s; raise the limit on threads (ulimit -u) or on memory (ulimit -v)", purpose,
             e.what());
    }
}

inline std::string joined_words(const std::vector<std::string>& words, const char* between) {
    std::string all;
    for (const std::string& word : words) all += (all.empty() ? "" : between) + word;
    return all;
}
// "1 rank", "2 ranks".
inline std::string counted(int64_t n, const char* noun) { return std::to_string(n) + " " + noun + (n == 1 ? "" : "s"); }

// The larger of two errors, and NaN if either is: std::max(0.0, NAN) is 0, which every limit lets pass.
inline double worse_error(double a, double b) { return a > b || std::isnan(a) ? a : b; }

// Seconds on a clock that never goes back.
inline double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
// Seconds since 1970, for logs.
inline double unix_time() {
    return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}
// The date and time of day in Greenwich, in a format of strftime.
inline std::string utc_text(const char* format, double time) {
    const time_t seconds = time_t(time);
    struct tm parts;
    char text[64];
    return gmtime_r(&seconds, &parts) && std::strftime(text, sizeof text, format, &parts) ? text : "?";
}

// ---------------------------------------------------------------------------------------------------------------------
// Counter-based random numbers: number i of stream s under a seed is a pure function of (seed, s, i), so weights, data
// order, samples and rounding do not depend on how many ranks or threads there are, and there is no state to save.
// Philox 4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; cuRAND has it too.

#if defined(__CUDACC__) || defined(__HIP__)
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif

struct Philox {
    uint32_t word[4];
};

HOST_DEVICE inline Philox philox4x32(uint64_t counter, uint64_t stream, uint64_t seed) {
    uint32_t c0 = uint32_t(counter), c1 = uint32_t(counter >> 32), c2 = uint32_t(stream), c3 = uint32_t(stream >> 32);
    uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
    for (int round = 0; round < 10; round++) {
        const uint64_t p0 = uint64_t(0xD2511F53u) * c0, p1 = uint64_t(0xCD9E8D57u) * c2;
        c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
        c1 = uint32_t(p1);
        c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
        c3 = uint32_t(p0);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

// Number i of its eight times 16 bits.
HOST_DEVICE inline uint32_t bits16(const Philox& p, int i) {
    const uint64_t low = p.word[0] | uint64_t(p.word[1]) << 32, high = p.word[2] | uint64_t(p.word[3]) << 32;
    return uint32_t((i < 4 ? low : high) >> i % 4 * 16) & 0xffffu;
}

// Every use has its own streams, so no two uses ever share a random number. Stream = use + 2^32 * index (of the tensor,
// the epoch ...).
enum RandomUse : uint64_t {
    RANDOM_INIT = 1,
    RANDOM_SHUFFLE = 2,
    RANDOM_SAMPLE = 3,
    RANDOM_SYNTHETIC = 4,
    RANDOM_ROUNDING = 5,
    RANDOM_TEST = 6,
    RANDOM_DOCUMENT = 7
};
HOST_DEVICE inline uint64_t random_stream(RandomUse use, uint64_t index = 0) { return use + (index << 32); }

// 64 random bits.
HOST_DEVICE inline uint64_t random_bits(uint64_t seed, uint64_t stream, uint64_t counter) {
    const Philox p = philox4x32(counter, stream, seed);
    return p.word[0] | uint64_t(p.word[1]) << 32;
}

// Uniform in [0, 1), 53 bits.
HOST_DEVICE inline double random_uniform(uint64_t seed, uint64_t stream, uint64_t counter) {
    return double(random_bits(seed, stream, counter) >> 11) * 0x1p-53;
}

// A uniform integer in [0, n): the high half of a 64 x 64 bit product. The bias is below n / 2^64.
inline uint64_t random_below(uint64_t n, uint64_t seed, uint64_t stream, uint64_t counter) {
    return uint64_t((unsigned __int128)random_bits(seed, stream, counter) * n >> 64);
}

// Standard normal, by Box-Muller. The same seed must give the same weights on every machine, but libm's logarithm and
// cosine differ from one to the next; so both are written out in fused multiply-adds, which IEEE 754 defines to the
// last bit.
inline double random_normal(uint64_t seed, uint64_t stream, uint64_t counter) {
    const Philox p = philox4x32(counter, stream, seed);
    const double u = double(((uint64_t(p.word[1]) << 32 | p.word[0]) >> 11) + 1) * 0x1p-53;  // (0, 1]
    int exponent;
    double m = std::frexp(u, &exponent);  // u = m * 2^exponent, m in [0.5, 1)
    if (m < 0.70710678118654752) {
        m *= 2;
        exponent--;
    }
    const double s = (m - 1) / (m + 1), s2 = s * s;  // ln m = 2 artanh(s), |s| < 0.172
    double series = 0;
    for (int k = 21; k >= 1; k -= 2) series = std::fma(series, s2, 1.0 / k);
    const double log_u = std::fma(double(exponent), 0.69314718055994531, 2 * s * series);
    // The angle is a quarter turn times (quadrant + f), f in [-0.5, 0.5): only f goes through the Taylor series.
    const uint64_t turn = (uint64_t(p.word[3]) << 32 | p.word[2]) >> 11;
    const int quadrant = int(turn >> 51);
    const double f = std::fma(double(turn & ((1ull << 51) - 1)), 0x1p-51, -0.5) * 1.5707963267948966, f2 = f * f;
    double cosine = 1, sine = 1;
    for (int k = 18; k >= 2; k -= 2) {
        cosine = std::fma(cosine, -f2 / (k * (k - 1)), 1.0);
        sine = std::fma(sine, -f2 / (k * (k + 1)), 1.0);
    }
    sine *= f;
    const double projection = quadrant == 0 ? cosine : quadrant == 1 ? -sine : quadrant == 2 ? -cosine : sine;
    return std::sqrt(-2 * log_u) * projection;
}

// ---------------------------------------------------------------------------------------------------------------------
// What the control groups of this process (the limits of a container or a Slurm job; of version 2, or of version 1,
// which has a tree for each kind of limit) leave it: bytes of memory that it can still allocate, counting file pages
// that the kernel would give back, and processors. Infinity where there is no limit.
struct ResourceLimits {
    double bytes = std::numeric_limits<double>::infinity(), processors = std::numeric_limits<double>::infinity();
};
inline ResourceLimits cgroup_limits(const std::string& root = "/sys/fs/cgroup",
                                    const std::string& own_group = "/proc/self/cgroup") {
    ResourceLimits limits;
    const auto limit_memory = [&](const std::string& max_file, const std::string& current_file,
                                  const std::string& statistics_file, const std::string& prefix) {
        double most, current;
        if (!(std::ifstream(max_file) >> most && std::ifstream(current_file) >> current)) return;
        std::ifstream statistics(statistics_file);
        std::string key;
        for (double value; statistics >> key >> value;)
            if (key == prefix + "active_file" || key == prefix + "inactive_file") current -= value;
        limits.bytes = std::min(limits.bytes, std::max(0.0, most - current));
    };
    // without a limit version 2 says max, which is no number, and version 1 says -1
    const auto limit_processors = [&](double quota, double period) {
        if (quota > 0 && period > 0) limits.processors = std::min(limits.processors, quota / period);
    };
    std::ifstream groups(own_group);
    for (std::string line; std::getline(groups, line);) {  // 0::/group, or 4:cpu,cpuacct:/group
        const size_t kinds_at = line.find(':') + 1, group_at = line.find(":/") + 1;
        if (kinds_at == 0 || group_at < kinds_at + 1) continue;
        const std::string kinds = line.substr(kinds_at, group_at - 1 - kinds_at);
        const bool has_memory = ("," + kinds + ",").find(",memory,") != std::string::npos,
                   has_processors = ("," + kinds + ",").find(",cpu,") != std::string::npos;
        // this group, then every group above it; in a container the names may be those outside, and it sees the root
        for (std::string group = line.substr(group_at);; group.erase(group.rfind('/'))) {
            if (group == "/") group.clear();
            const std::string folder = root + (kinds.empty() ? "" : "/" + kinds) + group + "/";
            double quota = 0, period = 0;
            if (kinds.empty())
                limit_memory(folder + "memory.max", folder + "memory.current", folder + "memory.stat", "");
            if (kinds.empty() && std::ifstream(folder + "cpu.max") >> quota >> period) limit_processors(quota, period);
            if (has_memory)
                limit_memory(folder + "memory.limit_in_bytes", folder + "memory.usage_in_bytes", folder + "memory.stat",
                             "total_");
            for (const std::string& tree : {kinds, std::string("cpu")}) {
                const std::string cpu = root + "/" + tree + group + "/cpu.cfs_";
                if (has_processors && std::ifstream(cpu + "quota_us") >> quota &&
                    std::ifstream(cpu + "period_us") >> period)
                    limit_processors(quota, period);
            }
            if (group.empty()) break;
        }
    }
    return limits;
}

// The sizes of a matrix product: C [M, N] = A [M, K] B [K, N].
struct GemmSize {
    int M, N, K;
};
