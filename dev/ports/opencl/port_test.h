// port_test.h: how the tests of dev/test open this engine, and where it may differ from plain sums; CudaEngine in
// dev/test/engines.h has the same members and says what they mean. Included there.
#pragma once
#include <csignal>
#include <sys/wait.h>
#include <unistd.h>

#include "port.h"

struct PortEngine : EngineTypes<OpenCl> {
    static constexpr const char* name = "opencl";
    static constexpr size_t ALIGNMENT = 256;
    static constexpr int COLUMNS = 1;
    static constexpr bool FAST = true;
    static constexpr uint16_t FRESH = 0xFFFF;
    static constexpr int ORDERS = 1;  // its queue has one order, and a second run has to give the same bits
    static constexpr int WAYS = 1;
    static constexpr bool SAME_BITS_BY_ROW = false;  // Intel's compiler takes work-items together, in vectors
    static constexpr double SIGMOID_AT_LEAST = 0;
    static constexpr bool ADDS_TERM_BY_TERM = false;
    static double rescaling_of_classifier(int) { return 0; }
    template <class Dev = OpenCl>
    static std::unique_ptr<Dev> open() {
        auto dev = std::make_unique<Dev>(0);
        dev->poison = true;
        return dev;
    }
    static void set_order(int) {}
    static void set_way(OpenCl&, int) {}
    static void run_late(bool) {}
};

// Whoever reads or writes on the host through an address that this engine made up is stopped at once.
TEST(opencl_addresses_stop_the_host) {
    const auto dev = PortEngine::open();
    const Stats<PortEngine> numbers(*dev, size_t(1000));
    for (const size_t at : {0, 999})
        for (const bool writes : {false, true}) {
            const pid_t child = fork();
            REQUIRE(child >= 0);
            if (child == 0) {
                signal(SIGSEGV, SIG_DFL);
                volatile float* const x = numbers.data + at;
                if (writes) *x = 0;
                else static_cast<void>(*x);
                _exit(0);
            }
            int status = 0;
            waitpid(child, &status, 0);
            CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
        }
}
