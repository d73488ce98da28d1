// train.h: what the verb `train` needs of the model beside its loop: whether it fits, what log.jsonl says of its
// layers, and --dump-state. Included by train_nsa.cu behind the model.
#pragma once
#include <string>
#include <vector>

#include "../../dataloader.h"
#include "../run/config_files.h"
#include "../run/memory_needs.h"
#include "../run/run_printer.h"
#include "model_files.h"

// fit_batch() for a model and its activations, on the memory of this engine.
template <class Dev>
bool require_memory(Dev& dev, ModelConfig& c, const World& world, bool batch_is_given) {
    const double mib = 1 << 20;
    const double fixed = Model<Dev>::flat_bytes(c, world.size) / mib;
    // NCCL takes from 0.5 to 1.6 GiB of a GPU, as its users report
    const double for_nccl = Dev::on_host || world.size == 1 || world.device_sharers > 1 ? 0 : 1640;
    const double available = world.lowest(dev.available_bytes(world.device_sharers) / mib - for_nccl);
    return fit_batch(c, world, batch_is_given, fixed, available, [&](int64_t batch, int64_t recompute) {
        ModelConfig other = c;
        other.recompute = recompute;
        return fixed + Activations<Dev>::bytes_needed(dev, other, batch, c.seq_len, TRAINING) / mib;
    });
}

// Gates and selections of the last forward pass, layer by layer, for log.jsonl; {} of layers without NSA, nothing where
// no other is.
template <class Dev>
Json summarise_layers(const Activations<Dev>& a) {
    const NsaShape& s = a.shape;
    if (s.full) return Json();
    Json layers(Json::Array);
    const size_t words = size_t(s.selection_words()), queries = size_t(s.B) * s.G * s.T;
    std::vector<float> gate(s.branches() * s.query_rows()), chosen(queries);
    std::vector<uint32_t> masks(queries * words);
    for (size_t i = 0; i < a.layer.size(); i++) {
        layers.items.emplace_back(Json::Object);
        if (s.kind_of_layer(i) != NSA_LAYER) continue;
        a.dev.to_host(gate.data(), a.layer[i].gate, gate.size());
        a.dev.copy(masks.data(), a.layer[i].selection, masks.size());
        a.dev.to_host(chosen.data(), a.layer[i].chosen_importance, chosen.size());
        layers.items.back() = summarise_layer(gate, masks, words, chosen);
    }
    return layers;
}

// --dump-state: the first batch with everything that it leads to, for another program to compare itself with. c:
// all options of the run.
template <class Dev>
void dump_first_batch(const Config& c, Model<Dev>& model, Activations<Dev>& a, DataLoader& loader) {
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
    d.add(view_tensors(model.dev, model.table.specs, model.master, "", buffers));
    d.add(view_tensors(model.dev, model.table.specs, model.grads, "grad.", buffers));
    for (size_t i = 0; i < a.layer.size(); i++) {
        d.selection.emplace_back();
        if (s.kind_of_layer(i) != NSA_LAYER) continue;
        d.selection.back().resize(size_t(s.B) * s.G * s.T * s.selection_words());
        model.dev.copy(d.selection.back().data(), a.layer[i].selection, d.selection.back().size());
    }
    write_state_dump(c.dump_state, std::move(d), config_json(c), command_line(c, "dump-state"));
}
