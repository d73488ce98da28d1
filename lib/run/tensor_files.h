// tensor_files.h: an engine's flat arrays as named tensors in files, and back. Used by the checkpoints in train_nsa.cu.
//
// A list of specs names the tensors of a flat array: a spec has a name, shape(), offset and size, in elements. A list
// of pieces says which elements of the flat arrays a rank owns, and where they are in its own arrays, see
// lib/model/partition.h. The moments m and v are written by the ranks that own them, in pieces named
// m.<tensor>[<first>:<last>], so that any number of ranks can read them back.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <type_traits>
#include <vector>

#include "checkpoint.h"
#include "../base/safetensors.h"
#include "../model/shape.h"
#include "../base/util.h"

// What views point into, where the engine's own memory will not do.
using Buffers = std::vector<std::vector<float>>;

// `count` numbers of the engine as fp32 in the host's memory: where they are, if they are that already; else in
// `buffers`.
template <class Dev, class T>
const float* host_floats(Dev& dev, const T* p, size_t count, Buffers& buffers) {
    if constexpr (Dev::on_host && std::is_same<T, float>::value) return p;
    buffers.emplace_back(count);
    dev.to_host(buffers.back().data(), p, count);
    return buffers.back().data();
}

// A whole flat array, padding left out.
template <class Dev, class Specs, class T>
std::vector<TensorView> views_of(Dev& dev, const Specs& specs, const T* flat, const std::string& prefix,
                                 Buffers& buffers) {
    std::vector<TensorView> views;
    for (const auto& t : specs)
        views.push_back(tensor_view(prefix + t.name, t.shape(), host_floats(dev, flat + t.offset, t.size, buffers)));
    return views;
}

// The tensors in the first chunk whose sum of squares is not finite, for messages. chunk: elements of a chunk; squares:
// one sum for each.
template <class Specs, class Sum>
std::string first_bad_tensor(const Specs& specs, const std::vector<Sum>& squares, size_t chunk) {
    for (size_t i = 0; i < squares.size(); i++) {
        if (std::isfinite(squares[i])) continue;
        std::string names;
        for (const auto& t : specs)
            if (t.offset < (i + 1) * chunk && t.offset + t.size > i * chunk)
                names += (names.empty() ? "gradient of " : " or ") + t.name;
        return names;
    }
    return "none, only the loss";
}

// What a tensor's first `size` elements and a piece have in common: [first, last) in the flat arrays.
template <class Spec, class Piece>
std::pair<size_t, size_t> overlap(const Spec& t, size_t size, const Piece& p) {
    return {std::max(t.offset, p.begin), std::min(t.offset + size, p.begin + p.count)};
}

// Of a piece that AdamW updates: what is in it of each tensor, and whether it decays. None of a matrix of Muon.
template <class Specs, class Piece>
std::vector<AdamWSpan> spans_of(const Specs& specs, const Piece& p) {
    std::vector<AdamWSpan> all;
    for (const auto& t : specs) {
        const auto [first, last] = overlap(t, t.padded, p);
        if (first < last && !p.rows) add_span(all, first - p.begin, last - p.begin, t.decay);
    }
    return all;
}

// A flat array of which every rank holds its pieces (flat, by Piece::local): whole on rank 0, nothing elsewhere. All
// ranks call it.
template <class Dev, class Specs, class T, class Pieces>
std::vector<TensorView> views_of_shards(Dev& dev, const Specs& specs, const T* flat, const Pieces& owned,
                                        const World& world, Buffers& buffers) {
    std::vector<TensorView> views;
    for (const auto& t : specs) {
        std::vector<float> whole(t.size);
        for (const auto& p : owned) {
            const auto [first, last] = overlap(t, t.size, p);
            if (first < last)
                dev.to_host(whole.data() + (first - t.offset), flat + p.local + (first - p.begin), last - first);
        }
        world.sum(whole.data(), whole.size());  // the other ranks have zeros here
        if (world.rank != 0) continue;
        buffers.push_back(std::move(whole));
        views.push_back(tensor_view(t.name, t.shape(), buffers.back().data()));
    }
    return views;
}

// With weights that are not finite nothing can be computed.
inline void require_finite(const SafeTensors& file) {
    for (const TensorView& t : file.tensors) {
        const float* const values = static_cast<const float*>(t.data);
        const size_t n = size_t(t.bytes / sizeof *values);
        const float* const bad = std::find_if(values, values + n, [](float x) { return !std::isfinite(x); });
        if (t.dtype == "F32" && bad != values + n)
            fail("%s: number %zu of %s is %g: the weights are no use; take an earlier checkpoint", file.path.c_str(),
                 size_t(bad - values), t.name.c_str(), double(*bad));
    }
}

// A checkpoint's weights. Every tensor's name and shape are checked, before memory is allocated for what a config.json
// says.
template <class Specs>
std::unique_ptr<SafeTensors> open_weights(const std::string& checkpoint, const Specs& specs) {
    auto weights = std::make_unique<SafeTensors>(checkpoint + "/model.safetensors");
    for (const auto& t : specs) weights->get(t.name, "F32", t.shape());
    require_finite(*weights);
    return weights;
}

// For an engine with an fp32 master copy, which is what the file holds: rounds the parameters from it as the
// optimiser's last update, in step last_update, rounded them.
template <class Dev, class Specs, class T>
void round_parameters(Dev& dev, const Specs& specs, T* params, const SafeTensors& weights, uint64_t seed,
                      int64_t last_update) {
    if constexpr (Dev::has_master) {
        if (last_update == 0) return;
        size_t largest = 0;
        for (const auto& t : specs) largest = std::max(largest, t.padded);
        auto* whole = dev.template allocate<typename Dev::Master>(largest);
        for (const auto& t : specs) {
            dev.zero(whole, t.padded);
            dev.from_host(whole, static_cast<const float*>(weights.get(t.name, "F32", t.shape()).data), t.size);
            dev.round_master(params + t.offset, whole, t.padded, seed, last_update, t.offset);
        }
        dev.release(whole);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Moments.

// The pieces of m or v that a rank writes. A matrix of Muon has no v.
template <class Dev, class Specs, class T, class Pieces>
void add_moments(std::vector<TensorView>& views, Dev& dev, const Specs& specs, const T* flat, char moment,
                 const Pieces& pieces, Buffers& buffers) {
    for (const auto& p : pieces)
        for (const auto& t : specs) {
            const auto [first, last] = overlap(t, t.size, p);
            if (first >= last || (moment == 'v' && t.orthogonal)) continue;
            const size_t at = (moment == 'm' ? p.local : p.second) + (first - p.begin);
            const std::string name =
                format_text("%c.%s[%zu:%zu]", moment, t.name.c_str(), first - t.offset, last - t.offset);
            views.push_back(
                tensor_view(name, {int64_t(last - first)}, host_floats(dev, flat + at, last - first, buffers)));
        }
}

struct MomentPiece {
    char moment;          // 'm' or 'v'
    size_t begin, count;  // in the flat array
    const float* values;
};

template <class Specs>
MomentPiece moment_piece(const TensorView& view, const Specs& specs, const std::string& path) {
    size_t first = 0, last = 0;
    const size_t bracket = view.name.find('[');
    int length = 0;
    if (bracket == std::string::npos ||
        std::sscanf(view.name.c_str() + bracket, "[%zu:%zu]%n", &first, &last, &length) != 2 ||
        view.name.size() != bracket + size_t(length) || view.dtype != "F32")
        fail("%s: tensor %s: expected F32 and a name like m.norm.weight[0:128]", path.c_str(),
             json_quote(view.name).c_str());
    const std::string prefix = view.name.substr(0, 2), name = bracket < 2 ? "" : view.name.substr(2, bracket - 2);
    const auto t = std::find_if(specs.begin(), specs.end(), [&](const auto& spec) { return spec.name == name; });
    if ((prefix != "m." && prefix != "v.") || t == specs.end() || (prefix == "v." && t->orthogonal))
        fail("%s: tensor %s belongs to no tensor of this model", path.c_str(), json_quote(view.name).c_str());
    if (first >= last || last > t->size || view.elements() != int64_t(last - first))
        fail("%s: tensor %s has %lld elements, the whole one %zu", path.c_str(), view.name.c_str(),
             (long long)view.elements(), t->size);
    return {prefix[0], t->offset + first, last - first, static_cast<const float*>(view.data)};
}

// Reads what a rank owns of m and v out of every rank's file, however many ranks wrote them. Fails unless all moments
// are there.
template <class Dev, class Specs, class T, class Pieces>
void read_moments(Dev& dev, const Specs& specs, T* m, T* v, const Pieces& owned, const Manifest& manifest,
                  const std::string& folder) {
    size_t expected = 0, found = 0;
    for (const auto& t : specs) expected += (t.orthogonal ? 1 : 2) * t.size;
    for (const FileRecord& record : manifest.files) {
        if (record.name.compare(0, 10, "optimizer_") != 0) continue;
        const SafeTensors file(folder + "/" + record.name);
        for (const TensorView& view : file.tensors) {
            const MomentPiece piece = moment_piece(view, specs, file.path);
            found += piece.count;
            for (const auto& p : owned) {
                const size_t from = std::max(piece.begin, p.begin);
                const size_t to = std::min(piece.begin + piece.count, p.begin + p.count);
                if (from >= to) continue;
                T* const to_array = piece.moment == 'm' ? m + p.local : v + p.second;
                dev.from_host(to_array + (from - p.begin), piece.values + (from - piece.begin), to - from);
            }
        }
    }
    if (found != expected)
        fail("%s: the optimiser's files hold %zu of %zu moments: one of them is missing or of another model",
             manifest.path.c_str(), found, expected);
}

// ---------------------------------------------------------------------------------------------------------------------
// --dump-state: what another program needs to compare itself with this one.

struct StateDump {
    std::string precision;            // format() of the engine
    std::vector<TensorView> tensors;  // parameters, and gradients named grad.<tensor>
    NsaShape shape;
    int64_t V = 0;                                 // vocabulary
    std::vector<int32_t> inputs, targets;          // [B, T]
    std::vector<float> logits;                     // [B, T, V]
    float loss = 0;                                // mean over the tokens
    std::vector<std::vector<uint32_t>> selection;  // per layer the bitmasks [B, G, T]; none of layers without NSA

    void add(const std::vector<TensorView>& more) { tensors.insert(tensors.end(), more.begin(), more.end()); }
    template <class Dev, class Layers>
    void add_selections(Dev& dev, const Layers& layers) {
        for (size_t i = 0; i < layers.size(); i++) {
            selection.emplace_back();
            if (shape.kind_of_layer(i) != NSA_LAYER) continue;
            selection.back().resize(size_t(shape.B) * shape.G * shape.T * shape.selection_words());
            dev.copy(selection.back().data(), layers[i].selection, selection.back().size());
        }
    }
};

// A bitmask becomes a byte per block.
inline std::vector<uint8_t> bytes_of_masks(const std::vector<uint32_t>& masks, size_t words, size_t blocks) {
    const size_t rows = masks.size() / words;
    std::vector<uint8_t> bytes(rows * blocks);
    for (size_t r = 0; r < rows; r++)
        for (size_t j = 0; j < blocks; j++) bytes[r * blocks + j] = is_selected(&masks[r * words], int(j));
    return bytes;
}

inline void write_state_dump(const std::string& path, StateDump d, const std::string& config,
                             const std::string& command) {
    const int64_t B = d.shape.B, T = d.shape.T, blocks = d.shape.slc_blocks();
    d.tensors.push_back({"inputs", "I32", {B, T}, d.inputs.data(), d.inputs.size() * 4});
    d.tensors.push_back({"targets", "I32", {B, T}, d.targets.data(), d.targets.size() * 4});
    d.tensors.push_back(tensor_view("logits", {B, T, d.V}, d.logits.data()));
    d.tensors.push_back(tensor_view("loss", {1}, &d.loss));
    std::vector<std::vector<uint8_t>> selections;
    for (const auto& masks : d.selection)
        selections.push_back(bytes_of_masks(masks, size_t(d.shape.selection_words()), size_t(blocks)));
    for (size_t i = 0; i < selections.size(); i++)
        if (!selections[i].empty())
            d.tensors.push_back({format_text("layers.%zu.selection", i),
                                 "U8",
                                 {B, d.shape.G, T, blocks},
                                 selections[i].data(),
                                 selections[i].size()});
    write_safetensors(path, {{"config", config}, {"options", command}, {"precision", d.precision}}, d.tensors);
    std::printf("state:  loss %.6f, written to %s; compare it with: python3 dev/reference.py compare %s\n",
                double(d.loss), printable(path).c_str(), printable(path).c_str());
}
