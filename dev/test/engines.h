// engines.h: the engines that the tests of the operations and of the model run on. ENGINE_TEST(rmsnorm) { .. } is a
// template over a row E of the list Engines, and every row of the build gets a test of its own: cpu_rmsnorm,
// cpu_fp64_rmsnorm, cuda_rmsnorm. What an engine cannot do is a skip that says what is missing: has_shape(), skip().
//
// The engine of dev/ports/NAME joins by port_test.h in that folder: PortEngine, a struct like CudaEngine that says how
// the engine is opened and where it may differ from plain sums. make GPU=NAME build/test_device then has its tests.
//
// Inputs are numbers that the engine's format holds exactly. The oracle, in Numbers of the type that the engine
// computes in, says what its arithmetic may do to each element; an element that is stored in a narrower format is
// rounded once more, see stored(). Fresh arrays are poison, and what an operation must leave alone still is afterwards.
// Every operation runs with its threads in several orders, and must give the same bits each time.
#pragma once
#include <functional>
#include <list>
#include <memory>

#ifdef USE_CUDA
#include "../../nsa_kernels.cuh"
#endif
#include "harness.h"
#include "ops/oracle.h"

template <class Dev_>
struct EngineTypes {
    using Dev = Dev_;
    using Real = typename Dev::real;
    using Value = typename Dev::Stat;  // of arithmetic
    using Num = oracle::Number<Value>;
    using Nums = oracle::Numbers<Value>;
    using Sum = oracle::Sum<Value>;
    using DevSum = typename Dev::Sum;  // of sums over the batch or over all parameters
    using Hyper = HyperAdamWOf<DevSum>;
    using Values = std::vector<Value>;
    static constexpr bool NARROW = sizeof(Real) < sizeof(Value);  // bf16: 8 bits of significand, rounded to nearest

    // A value that was computed and is then stored as Real. Below its smallest normal number the spacing of bf16 is
    // 2^-133.
    static Num stored(Num x) {
        return {x.value, x.error + (NARROW ? 0x1p-8 * (std::fabs(x.value) + x.error) + 0x1p-134 : 0)};
    }
    static Nums stored(Nums all) {
        for (Num& x : all) x = stored(x);
        return all;
    }
    static Value as_real(double x) { return Value(Real(Value(x))); }
    static Values random_reals(Random& random, size_t count, double scale = 1) {
        Values x(count);
        for (Value& e : x) e = as_real(scale * random.normal());
        return x;
    }
    static Values random_values(Random& random, size_t count, double scale = 1) {
        Values x(count);
        for (Value& e : x) e = Value(scale * random.normal());
        return x;
    }
};

template <class real>
struct CpuEngine : EngineTypes<Cpu<real>> {
    static constexpr const char* name = sizeof(real) == 4 ? "cpu" : "cpu_fp64";
    static constexpr size_t ALIGNMENT = 64;            // of what allocate() returns, in bytes
    static constexpr int COLUMNS = 1;                  // the widths of its matrices are multiples of this
    static constexpr bool FAST = true;                 // runs large shapes in no time
    static constexpr uint16_t FRESH = 0xFFFF;          // what fresh memory holds
    static constexpr int ORDERS = 2;                   // other orders of threads, besides the usual one
    static constexpr int WAYS = 1;                     // of computing attention, see set_way()
    static constexpr bool SAME_BITS_BY_ROW = false;    // a product's row does not depend on how many there are
    static constexpr double SIGMOID_AT_LEAST = 6e-39;  // e^-88, where its exponential ends
    static constexpr bool ADDS_TERM_BY_TERM =
        sizeof(real) == 8;  // to what a gradient of q held: so does the specification
    static double rescaling_of_classifier(int) { return 0; }
    template <class Dev = Cpu<real>>
    static std::unique_ptr<Dev> open() {
        auto dev = std::make_unique<Dev>();
        dev->poison = true;
        return dev;
    }
    static void set_order(int order) {
        static const int usual = omp_get_max_threads();
        omp_set_num_threads(order == 0 ? usual : order == 1 ? 1 : 3);
    }
    static void set_way(Cpu<real>&, int) {}
    static void run_late(bool) {}  // whether what a device is given runs as late as the program's waits allow
};

#ifdef USE_CUDA
constexpr size_t TEST_WORKSPACE = size_t(1) << 20;  // the emulator touches all of it at each launch

struct CudaEngine : EngineTypes<Cuda> {
    static constexpr const char* name = "cuda";
    static constexpr size_t ALIGNMENT = 256;
    static constexpr int COLUMNS = Cuda::WIDE;
    static constexpr int WAYS = NARROW ? 2 : 1;  // by the plain kernels, and on tensor cores
#ifdef CUDA_ON_CPU
    static constexpr bool SAME_BITS_BY_ROW = true;
    static constexpr bool FAST = false;
    static constexpr uint16_t FRESH = emu::DEVICE_POISON;
#else
    static constexpr bool SAME_BITS_BY_ROW = false;
    static constexpr bool FAST = true;
    static constexpr uint16_t FRESH = 0xFFFF;
#endif
#ifdef EMU_CHECK
    static constexpr int ORDERS = 1;  // every access is checked, so one order is enough
#else
    static constexpr int ORDERS = 3;
#endif
    static constexpr double SIGMOID_AT_LEAST = 0;
    static constexpr bool ADDS_TERM_BY_TERM = false;
    // The running sum is rescaled when the maximum grows: at most once per 16 bytes that a thread reads, in 5 steps of
    // a warp and once for each of 32 warps. Each is a product with an exponential, 5u, and an addition.
    static double rescaling_of_classifier(int V) { return 6 * Num::u * (V / 1024.0 + 1 + 5 + 32); }
    template <class Dev = Cuda>
    static std::unique_ptr<Dev> open() {
        auto dev = std::make_unique<Dev>(0, TEST_WORKSPACE);
        dev->choose_attention("plain");  // attention_kernel_tests.h has the kernels on tensor cores
#ifndef CUDA_ON_CPU
        dev->poison = true;  // the emulator poisons by itself, and knows what was written
#endif
        return dev;
    }
    static void set_order([[maybe_unused]] int order) {
#ifdef CUDA_ON_CPU
        emu::seed(uint64_t(order));
#endif
    }
    static void set_way(Cuda& dev, int way) { dev.choose_attention(way == 0 ? "plain" : "auto"); }
    static void run_late([[maybe_unused]] bool late) {
#ifdef CUDA_ON_CPU
        emu::machine.run_late = late;
#endif
    }
};
#endif

// ---------------------------------------------------------------------------------------------------------------------
// What a test does with its engine.

// `count` elements on the engine, fresh or from host values. On the host they are a Buffer, whose guards are checked.
template <class E, class T>
class Array {
    Buffer<T> buffer;

  public:
    typename E::Dev& dev;
    T* const data;
    const size_t count;
    Array(typename E::Dev& engine, size_t n)
        : buffer(E::Dev::on_host ? n : 0, "an operation's array"), dev(engine), data(memory(n)), count(n) {}
    template <class From>
    Array(typename E::Dev& engine, const std::vector<From>& values) : Array(engine, values.size()) {
        std::vector<T> converted;
        converted.reserve(count);
        for (const From& x : values) converted.push_back(T(x));
        if (count) dev.copy(data, static_cast<const T*>(converted.data()), count);
    }
    Array(const Array&) = delete;
    ~Array() {
        if (!E::Dev::on_host) dev.release(data);
    }
    operator T*() const { return data; }
    std::vector<T> raw() const {
        std::vector<T> values(count);
        if (count) dev.copy(values.data(), static_cast<const T*>(data), count);
        return values;
    }
    typename E::Values host() const {
        typename E::Values values;
        for (const T& x : raw()) values.push_back(typename E::Value(x));
        return values;
    }
    // How many elements still are as fresh memory is.
    long unwritten() const {
        long fresh = 0;
        for (const T& x : raw()) {
            uint16_t words[sizeof(T) / 2];
            std::memcpy(words, &x, sizeof(T));
            fresh += std::all_of(words, words + sizeof(T) / 2, [](uint16_t word) { return word == E::FRESH; });
        }
        return fresh;
    }

  private:
    T* memory(size_t n) { return E::Dev::on_host ? buffer.data() : dev.template allocate<T>(n); }
};
template <class E>
using Reals = Array<E, typename E::Real>;
template <class E>
using Stats = Array<E, typename E::Value>;

// run() uploads, computes and returns the outputs, under several orders of threads.
template <class E>
std::vector<typename E::Values> in_every_order(const std::function<std::vector<typename E::Values>()>& run) {
    const auto first = run();
    for (int order = 1; order <= E::ORDERS; order++) {
        E::set_order(order);
        const auto again = run();
        REQUIRE(again.size() == first.size());
        for (size_t i = 0; i < first.size(); i++) CHECK_SAME_BITS(again[i].data(), first[i].data(), first[i].size());
    }
    E::set_order(0);
    return first;
}

// Says which set-up a check failed in.
struct ShapeReport {
    const NsaShape& s;
    const char* engine;
    int failed = tests().failed_checks;
    ShapeReport(const NsaShape& shape, const char* name) : s(shape), engine(name) {}
    ~ShapeReport() {
        if (tests().failed_checks > failed && tests().failed_checks <= 10)
            std::printf(
                "    with %s, B %d T %d first %d queries %d H %d G %d D %d l %d d %d l' %d n %d w %d F %d "
                "window only %d sees all %d\n",
                engine, s.B, s.T, s.first, s.queries, s.H, s.G, s.D, s.l, s.d, s.slc_block, s.slc_count, s.window, s.F,
                s.window_only, s.sees_all);
    }
};
// Whether the engine has this shape; where it refuses, its words are a skip.
template <class E>
bool has_shape(typename E::Dev& dev, const char* test, const NsaShape& s) {
    try {
        dev.check_shape(s);
        return true;
    } catch (const Error& e) {
        const std::string what = format_text("%s_%s: %s", E::name, test, e.what());
        if (!std::count(tests().skipped.begin(), tests().skipped.end(), what)) skip(what);
        return false;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The list.

template <class... E>
struct EngineList {
    template <template <class> class Test>
    static void add(const char* name, bool is_long) {
        static std::list<std::string> names;
        (tests().cases.push_back(
             {names.emplace_back(std::string(E::name) + "_" + name).c_str(), Test<E>::run, is_long}),
         ...);
    }
};
#define ENGINE_TEST(name) TEST_ON(Engines, name, false)
#define TEST_ON(list, name, is_long)                                                      \
    template <class E>                                                                    \
    struct Test_##name {                                                                  \
        static void run();                                                                \
    };                                                                                    \
    static const bool registered_##name = (list::add<Test_##name>(#name, is_long), true); \
    template <class E>                                                                    \
    void Test_##name<E>::run()

// ModelEngines: those that are compared with whole models in fp64.
#ifdef USE_CUDA
using Engines = EngineList<CudaEngine>;
using ModelEngines = Engines;
#elif defined(ENGINE) && defined(DEVICE_TESTS_ONLY)
#include <port_test.h>
using Engines = EngineList<PortEngine>;
using ModelEngines = Engines;
#else
using Engines = EngineList<CpuEngine<float>, CpuEngine<double>>;
using ModelEngines = EngineList<CpuEngine<float>>;
#endif
