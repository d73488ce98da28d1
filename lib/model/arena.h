// arena.h: one allocation of an engine, cut into named buffers. Used by the activations in train_nsa.cu.
#pragma once
#include <string>
#include <vector>

// What activations are for, which decides how many there are.
enum Mode { INFERENCE, TRAINING };

// Buffers of one name, together.
struct MemoryEntry {
    std::string name;
    size_t count, bytes;
};

struct MemoryPlan {
    std::vector<MemoryEntry> memory;
    size_t bytes = 0;
    double wanted = 0;  // the same as a double, since options can ask for more than size_t holds
};

// take() every buffer once to add up the sizes, allocate(), then take() them again in the same order for their
// addresses.
template <class Dev>
struct Arena : MemoryPlan {
    explicit Arena(Dev& device) : dev(device) {}
    ~Arena() { dev.release(base); }
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    void allocate() {
        base = dev.template allocate<char>(bytes);
        memory.clear();
        bytes = 0;
        wanted = 0;
    }

    template <class T>
    void take(T*& p, const char* name, size_t count) {
        p = base ? reinterpret_cast<T*>(base + bytes) : nullptr;
        const size_t size = (count * sizeof(T) + 255) / 256 * 256;
        bytes += size;
        wanted += double(count) * sizeof(T);
        for (MemoryEntry& e : memory) {
            if (e.name != name) continue;
            e.count++;
            e.bytes += size;
            return;
        }
        memory.push_back({name, 1, size});
    }

  private:
    Dev& dev;
    char* base = nullptr;
};
