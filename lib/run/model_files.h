// model_files.h: a model on its way to and from files: checkpoints, weights alone, and --dump-state. Used by the
// training loop and the verbs in train_nsa.cu, whose Model, Activations, forward(), classify() and backward() these
// templates take.
//
// A checkpoint RUN/step_00001000/ holds model.safetensors, config.json, one optimizer_<rank>-of-<ranks>.safetensors for
// each rank, and manifest.json with checksums and the TrainState. Any number of ranks can resume it. checkpoint.h says
// how such a folder becomes whole, saver.h how the ranks write it.
#pragma once
#include <set>
#include <string>
#include <type_traits>

#include "config_files.h"
#include "options.h"
#include "saver.h"
#include "tensor_files.h"
#include "train_state.h"

// What this rank writes of the model. All ranks call it.
template <class Model>
Snapshot take_snapshot(const Model& model, const World& world) {
    auto& dev = model.dev;
    const auto& specs = model.table.specs;
    const auto pieces = model.sharded ? model.owned : common(model.owned, model.partition.parts(model.rank));
    Snapshot s;
    s.config = config_json(model.config);
    if (model.sharded && std::decay_t<decltype(dev)>::has_master)
        s.weights = views_of_shards(dev, specs, model.master, model.owned, world, s.buffers);
    else if (world.rank == 0) s.weights = views_of(dev, specs, model.master, "", s.buffers);
    add_moments(s.moments, dev, specs, model.m, 'm', pieces, s.buffers);
    add_moments(s.moments, dev, specs, model.v, 'v', pieces, s.buffers);
    return s;
}

template <class Model>
void read_parameters(Model& model, const SafeTensors& file) {
    for (const auto& t : model.table.specs)
        model.set_parameter(t, static_cast<const float*>(file.get(t.name, "F32", t.shape()).data));
}

template <class Model>
TrainState load_checkpoint(Model& model, const std::string& folder) {
    const Manifest manifest = read_manifest(folder);
    const TrainState state = read_state(manifest);
    const SafeTensors weights(folder + "/model.safetensors");
    read_parameters(model, weights);
    round_parameters(model.dev, model.table.specs, model.params, weights, uint64_t(model.config.seed),
                     state.last_update);
    read_moments(model.dev, model.table.specs, model.m, model.v, model.owned, manifest, folder);
    return state;
}

// --dump-state: the first batch with everything that it leads to, for another program to compare itself with. c:
// all options of the run.
template <class Model, class Activations, class Loader>
void dump_first_batch(const Config& c, Model& model, Activations& a, Loader& loader,
                      const std::set<std::string>& given) {
    const NsaShape& s = a.shape;
    Buffers buffers;
    StateDump d;
    d.precision = model.dev.format();
    d.shape = s;
    d.V = a.V;
    d.inputs.resize(size_t(c.total_batch));
    d.targets.resize(size_t(c.total_batch));
    loader.next_batch(d.inputs.data(), d.targets.data(), s.B);
    forward(model, a, d.inputs.data(), 0, s.T);
    const double tokens = double(c.total_batch);
    d.loss = float(classify(model, a, d.targets.data(), 1 / tokens, true, &d.logits) / tokens);
    backward(model, a);
    d.add(views_of(model.dev, model.table.specs, model.master, "", buffers));
    d.add(views_of(model.dev, model.table.specs, model.grads, "grad.", buffers));
    d.add_selections(model.dev, a.layer);
    write_state_dump(c.dump_state, std::move(d), config_json(c), command_line(c, given, "dump-state"));
}
