// fuzz.h: what the targets of fuzz.cpp share. Each target hands libFuzzer's bytes to one reader. The reader may refuse
// them with an Error; everything else is a finding: a crash, a report of AddressSanitizer or UBSan, a leak, more than a
// second of processor time, an Error that is not one printable line of bounded length, any other exception, memory out
// of proportion to the input, or accepted bytes that read differently once they are written again.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include <signal.h>
#include <sys/time.h>
#include <unistd.h>

#include "../test/harness.h"

struct Target {
    const char* name;
    // The inputs that it starts from: small valid files, written by the project's own code where it can.
    std::vector<std::string> (*seeds)();
    // One execution.
    void (*run)(const std::string& input);
};
extern const std::vector<Target> TARGETS;
inline const Target* target = nullptr;

// A finding: libFuzzer saves the input.
template <class... Values>
[[noreturn]] void finding(const char* format, const Values&... values) {
    std::fprintf(stderr, "finding: %s\n", format_text(format, values...).c_str());
    std::abort();
}
#define EXPECT(condition)                                                                \
    do {                                                                                 \
        if (!(condition)) finding("%s:%d: expected %s", __FILE__, __LINE__, #condition); \
    } while (0)

// A message may hold printable ASCII and complete characters above U+009F. Checked byte by byte, without the functions
// under test.
inline void check_message(const std::string& text) {
    if (text.empty() || text.size() > 8100) finding("a message of %d bytes", text.size());
    for (size_t i = 0; i < text.size(); i++) {
        const unsigned char c = static_cast<unsigned char>(text[i]);
        if (c < 0x20 || c == 0x7F) finding("byte 0x%02x in the message '%s'", c, text);
        if (c < 0x80) continue;
        const int more = c >= 0xF0 ? 3 : c >= 0xE0 ? 2 : 1;
        if (c < 0xC2 || c > 0xF4) finding("stray byte 0x%02x in the message '%s'", c, text);
        for (int k = 1; k <= more; k++)
            if (i + size_t(k) >= text.size() || (static_cast<unsigned char>(text[i + size_t(k)]) & 0xC0) != 0x80)
                finding("half a character in the message '%s'", text);
        if (c == 0xC2 && static_cast<unsigned char>(text[i + 1]) < 0xA0)
            finding("a C1 control character in the message '%s'", text);
        i += size_t(more);
    }
}

// The message of the error that `read` throws, or nothing if it accepts.
inline std::string refusal(const std::function<void()>& read) {
    try {
        read();
    } catch (const Error& e) {
        EXPECT(e.status == 1 || e.status == 2);
        check_message(e.what());
        return e.what();
    }
    return "";
}
inline bool accepts(const std::function<void()>& read) { return refusal(read).empty(); }

// ---------------------------------------------------------------------------------------------------------------------
// Memory: while a MemoryLimit lives, the allocations that exist at once must stay below fixed + times * input. So no
// reader allocates a length just because a header claims it.

struct Allocations {
    int64_t live = 0, peak = 0;
};
inline Allocations& allocations() {
    static thread_local Allocations a;
    return a;
}
struct MemoryLimit {
    const int64_t before = allocations().live, limit;
    MemoryLimit(size_t input, size_t fixed, size_t times) : limit(int64_t(fixed + times * input)) {
        allocations().peak = before;
    }
    ~MemoryLimit() {
        if (allocations().peak - before > limit)
            finding("%d bytes allocated at once, limit %d", allocations().peak - before, limit);
    }
};

// Readers open paths. The input lies in a file of this folder, which is in memory: TMPDIR is /dev/shm.
inline const TempFolder& memory_folder() {
    static const TempFolder folder;
    return folder;
}
inline std::string write_memory_file(const std::string& name, const std::string& bytes) {
    write_file(memory_folder().file(name), bytes);
    return memory_folder().file(name);
}

// ---------------------------------------------------------------------------------------------------------------------

// Of AddressSanitizer, declared here so that any compiler reads this file.
extern "C" int __sanitizer_install_malloc_and_free_hooks(void (*)(const volatile void*, size_t),
                                                         void (*)(const volatile void*));
extern "C" size_t __sanitizer_get_allocated_size(const volatile void*);

static void count_allocation(const volatile void*, size_t bytes) {
    Allocations& a = allocations();
    a.live += int64_t(bytes);
    a.peak = std::max(a.peak, a.live);
}
static void count_release(const volatile void* p) {
    if (p) allocations().live -= int64_t(__sanitizer_get_allocated_size(p));
}

// libFuzzer's own limit is wall time, during which the machine may be busy with other things or the fuzzer stopped.
static void limit_processor_time(time_t seconds) {
    const struct itimerval timer = {{0, 0}, {seconds, 0}};
    setitimer(ITIMER_PROF, &timer, nullptr);
}
static void on_processor_time(int) {
    static const char text[] = "finding: more than a second of processor time\n";
    (void)!write(2, text, sizeof text - 1);  // fprintf is not for signal handlers
    std::abort();
}

// FUZZ_TARGET=NAME in the environment chooses the target; with FUZZ_SEEDS=FOLDER the program writes its seeds there and
// exits.
extern "C" int LLVMFuzzerInitialize(int*, char***) {
    const char* name = std::getenv("FUZZ_TARGET");
    for (const Target& one : TARGETS)
        if (name && !std::strcmp(name, one.name)) target = &one;
    if (!target) finding("FUZZ_TARGET is %s, which is no target", name ? name : "not set");
    if (const char* folder = std::getenv("FUZZ_SEEDS")) {
        make_folders(folder);
        int number = 0;
        for (const std::string& seed : target->seeds()) write_file(format_text("%s/seed_%03d", folder, number++), seed);
        std::exit(0);
    }
    if (!__sanitizer_install_malloc_and_free_hooks(count_allocation, count_release))
        finding("the sanitizer takes no allocation hooks");
    signal(SIGPROF, on_processor_time);
    return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    limit_processor_time(1);
    target->run(std::string(reinterpret_cast<const char*>(data), size));
    limit_processor_time(0);
    return 0;
}
