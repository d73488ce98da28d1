// model_files.h: a model on its way to and from files: checkpoints, and weights alone. Included by train_nsa.cu behind
// the model.
//
// A checkpoint RUN/step_00001000/ holds model.safetensors, config.json, one optimizer_<rank>-of-<ranks>.safetensors for
// each rank, and manifest.json with checksums and the TrainState. Any number of ranks can resume it. checkpoint.h says
// how such a folder becomes whole, saver.h how the ranks write it.
#pragma once
#include <algorithm>
#include <string>
#include <type_traits>
#include <vector>

#include "../run/config_files.h"
#include "../run/saver.h"
#include "../run/tensor_files.h"
#include "../run/train_state.h"

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
template <class Dev, class T>
std::vector<TensorView> view_tensors(Dev& dev, const std::vector<TensorSpec>& specs, const T* flat,
                                     const std::string& prefix, Buffers& buffers) {
    std::vector<TensorView> views;
    for (const TensorSpec& t : specs)
        views.push_back(tensor_view(prefix + t.name, t.shape(), host_floats(dev, flat + t.offset, t.size, buffers)));
    return views;
}

// The master copy, of which every rank holds its pieces: whole on rank 0, nothing elsewhere. All ranks call it.
template <class Dev>
std::vector<TensorView> gather_tensors(const Model<Dev>& model, const World& world, Buffers& buffers) {
    std::vector<TensorView> views;
    for (const TensorSpec& t : model.table.specs) {
        std::vector<float> whole(t.size);
        for (const Piece& p : model.owned) {
            const auto [first, last] = overlap(t, t.size, p);
            if (first < last)
                model.dev.to_host(whole.data() + (first - t.offset), model.master_at(p, first), last - first);
        }
        world.sum(whole.data(), whole.size());  // the other ranks have zeros here
        if (world.rank != 0) continue;
        buffers.push_back(std::move(whole));
        views.push_back(tensor_view(t.name, t.shape(), buffers.back().data()));
    }
    return views;
}

// The moments m and v are written by the ranks that own them, in pieces named m.<tensor>[<first>:<last>], so that any
// number of ranks can read them back. A list of pieces says which elements a rank owns, see lib/model/partition.h.
struct MomentPiece {
    char moment;          // 'm' or 'v'
    size_t begin, count;  // in the flat array
    const float* values;
};

inline MomentPiece moment_piece(const TensorView& view, const std::vector<TensorSpec>& specs, const std::string& path) {
    size_t first = 0, last = 0;
    const size_t bracket = view.name.find('[');
    int length = 0;
    if (bracket == std::string::npos ||
        std::sscanf(view.name.c_str() + bracket, "[%zu:%zu]%n", &first, &last, &length) != 2 ||
        view.name.size() != bracket + size_t(length) || view.dtype != "F32")
        fail("%s: tensor %s: expected F32 and a name like m.norm.weight[0:128]", path, json_quote(view.name));
    const std::string prefix = view.name.substr(0, 2), name = bracket < 2 ? "" : view.name.substr(2, bracket - 2);
    const auto t = std::find_if(specs.begin(), specs.end(), [&](const auto& spec) { return spec.name == name; });
    if ((prefix != "m." && prefix != "v.") || t == specs.end() || (prefix == "v." && t->orthogonal))
        fail("%s: tensor %s belongs to no tensor of this model", path, json_quote(view.name));
    if (first >= last || last > t->size || view.elements() != int64_t(last - first))
        fail("%s: tensor %s has %d elements, the whole one %d", path, view.name, view.elements(), t->size);
    return {prefix[0], t->offset + first, last - first, static_cast<const float*>(view.data)};
}

// The pieces of m or v that a rank writes. A matrix of Muon has no v.
template <class Dev>
void add_moments(std::vector<TensorView>& views, const Model<Dev>& model, char moment, const std::vector<Piece>& pieces,
                 Buffers& buffers) {
    const auto* const flat = moment == 'm' ? model.m : model.v;
    for (const Piece& p : pieces)
        for (const TensorSpec& t : model.table.specs) {
            const auto [first, last] = overlap(t, t.size, p);
            if (first >= last || (moment == 'v' && t.orthogonal)) continue;
            const size_t at = (moment == 'm' ? p.m_at : p.v_at) + (first - p.begin);
            const std::string name = format_text("%s.%s[%d:%d]", moment, t.name, first - t.offset, last - t.offset);
            views.push_back(
                tensor_view(name, {int64_t(last - first)}, host_floats(model.dev, flat + at, last - first, buffers)));
        }
}

// What this rank writes of the model. All ranks call it.
template <class Dev>
Snapshot take_snapshot(const Model<Dev>& model, const World& world) {
    const auto pieces = model.sharded ? model.owned : common(model.owned, model.partition.parts(model.rank));
    Snapshot s;
    s.config = config_json(model.config);
    if (model.sharded && Dev::has_master) s.weights = gather_tensors(model, world, s.buffers);
    else if (world.rank == 0) s.weights = view_tensors(model.dev, model.table.specs, model.master, "", s.buffers);
    add_moments(s.moments, model, 'm', pieces, s.buffers);
    add_moments(s.moments, model, 'v', pieces, s.buffers);
    return s;
}

// For an engine with an fp32 master copy, which is what the file holds: rounds the parameters from it as the
// optimiser's last update, in step last_update, rounded them.
template <class Dev>
void round_parameters(Model<Dev>& model, const SafeTensors& weights, int64_t last_update) {
    if constexpr (Dev::has_master) {
        if (last_update == 0) return;
        Dev& dev = model.dev;
        const auto seed = uint64_t(model.config.seed);
        size_t largest = 0;
        for (const TensorSpec& t : model.table.specs) largest = std::max(largest, t.padded);
        auto* whole = dev.template allocate<typename Dev::Master>(largest);
        for (const TensorSpec& t : model.table.specs) {
            dev.zero(whole, t.padded);
            dev.from_host(whole, static_cast<const float*>(weights.get(t.name, "F32", t.shape()).data), t.size);
            dev.round_master(model.params + t.offset, whole, t.padded, seed, last_update, t.offset);
        }
        dev.release(whole);
    }
}

// Reads what a rank owns of m and v out of every rank's file, however many ranks wrote them. Fails unless all moments
// are there.
template <class Dev>
void read_moments(Model<Dev>& model, const Checkpoint& checkpoint) {
    const std::vector<TensorSpec>& specs = model.table.specs;
    size_t expected = 0, found = 0;
    for (const TensorSpec& t : specs) expected += (t.orthogonal ? 1 : 2) * t.size;
    for (const FileRecord& record : checkpoint.files) {
        if (record.name.compare(0, 10, "optimizer_") != 0) continue;
        const SafeTensors file(checkpoint.folder + "/" + record.name);
        for (const TensorView& view : file.tensors) {
            const MomentPiece piece = moment_piece(view, specs, file.path);
            found += piece.count;
            for (const Piece& p : model.owned) {
                const size_t from = std::max(piece.begin, p.begin);
                const size_t to = std::min(piece.begin + piece.count, p.begin + p.count);
                if (from >= to) continue;
                auto* const to_array = piece.moment == 'm' ? model.m + p.m_at : model.v + p.v_at;
                model.dev.from_host(to_array + (from - p.begin), piece.values + (from - piece.begin), to - from);
            }
        }
    }
    if (found != expected)
        fail("%s: the optimiser's files hold %d of %d moments: one of them is missing or of another model",
             checkpoint.path, found, expected);
}

template <class Dev>
void read_parameters(Model<Dev>& model, const SafeTensors& file) {
    for (const TensorSpec& t : model.table.specs)
        model.set_parameter(t, static_cast<const float*>(file.get(t.name, "F32", t.shape()).data));
}

template <class Dev>
TrainState load_checkpoint(Model<Dev>& model, const Checkpoint& checkpoint) {
    const TrainState state = read_state(checkpoint);
    const SafeTensors weights(checkpoint.folder + "/model.safetensors");
    read_parameters(model, weights);
    round_parameters(model, weights, state.last_update);
    read_moments(model, checkpoint);
    return state;
}
