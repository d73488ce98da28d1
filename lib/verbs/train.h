// train.h: what the verb `train` needs of the model beside its loop: whether it fits, what log.jsonl says of its
// layers, and --dump-state. Included by train_nsa.cu behind the model.
#pragma once
#include <string>
#include <vector>

#include "../../dataloader.h"
#include "../run/config_files.h"
#include "../run/run_printer.h"
#include "model_files.h"

// Before anything is allocated: a micro-batch that nobody gave becomes the largest that fits on every rank; if that
// does not help, fails and says what would. Returns whether more than three quarters of the memory will be taken.
template <class Dev>
bool require_memory(Dev& dev, ModelConfig& c, const World& world, bool batch_is_given) {
    const double mib = 1 << 20;
    const double fixed = Model<Dev>::flat_bytes(c, world.size) / mib;
    // NCCL takes from 0.5 to 1.6 GiB of a GPU, as its users report
    const double for_nccl = Dev::on_host || world.size == 1 || world.device_sharers > 1 ? 0 : 1640;
    const double available = world.lowest(dev.available_bytes(world.device_sharers) / mib - for_nccl);
    const int64_t samples = c.total_batch / c.seq_len / world.size;  // of a rank and step
    const auto needed = [&](int64_t batch, int64_t recompute) {
        ModelConfig other = c;
        other.recompute = recompute;
        return fixed + Activations<Dev>::bytes_needed(dev, other, batch, c.seq_len, TRAINING) / mib;
    };
    // The largest micro-batch, at most the one asked for, that divides a rank's samples and fits; 0 if none fits.
    const auto largest = [&](int64_t recompute) {
        int64_t batch = c.batch;
        while (batch > 0 && (samples % batch || !(needed(batch, recompute) <= available))) batch--;
        return batch;
    };
    const int64_t fits = largest(c.recompute);
    if (!batch_is_given && fits > 0 && fits < c.batch) {
        if (world.rank == 0)
            print("batch:  %s at a time and not %d, which do not fit into %.0f MiB\n", counted(fits, "sequence"),
                  c.batch, available);
        c.batch = fits;
    }
    const double needs = needed(c.batch, c.recompute);
    if (needs <= available) return needs > 0.75 * available;
    // the lowest level at which this micro-batch fits, else a smaller one at the highest
    std::string advice = "a smaller --seq-len or model";
    for (int64_t level = 2; level >= c.recompute; level--) {
        const int64_t batch = largest(level);
        if (batch == c.batch || (batch > 0 && level == 2))
            advice = format_text("--batch %d --recompute %d", batch, level);
    }
    fail(
        "--batch %d and --seq-len %d need %.0f MiB per rank, of which %.0f MiB are parameters, gradients and "
        "moments; %.0f MiB are available: choose %s",
        c.batch, c.seq_len, needs, fixed, available, advice);
}

// One layer's gates (3, rows), selection masks (queries, words) and chosen shares of the importance (queries), as JSON:
// mean gate and share of each branch, the gates' entropy, selected blocks, share of the importance that fell on them.
inline Json summarise_layer(const std::vector<float>& gate, const std::vector<uint32_t>& masks, size_t words,
                            const std::vector<float>& chosen) {
    const size_t rows = gate.size() / 3, queries = masks.size() / words;
    double mean[3] = {}, entropy = 0, importance = 0;
    for (size_t r = 0; r < rows; r++) {
        const double sum = gate[r] + gate[rows + r] + gate[2 * rows + r];
        for (int b = 0; b < 3; b++) {
            const double share = gate[b * rows + r] / sum;
            mean[b] += gate[b * rows + r] / double(rows);
            if (share > 0) entropy -= share * std::log(share) / double(rows);
        }
    }
    uint64_t selected = 0, largest = 0;
    for (size_t q = 0; q < queries; q++) {
        uint64_t count = 0;
        for (size_t j = 0; j < words; j++) count += uint64_t(__builtin_popcount(masks[q * words + j]));
        selected += count;
        largest = std::max(largest, count);
    }
    for (float share : chosen) importance += share / double(chosen.size());
    const double all = mean[0] + mean[1] + mean[2];
    std::vector<double> gates(mean, mean + 3), shares;
    for (const double gate_mean : gates) shares.push_back(gate_mean / all);
    return {{"gate", Json::numbers(gates, "%.4f")},
            {"gate_share", Json::numbers(shares, "%.4f")},
            {"gate_entropy", {entropy, "%.4f"}},
            {"blocks_mean", {double(selected) / double(queries), "%.2f"}},
            {"blocks_max", largest},
            {"importance_selected", {importance, "%.4f"}}};
}

// Gates and selections of the last forward pass, layer by layer, for log.jsonl; {} of layers without NSA, nothing where
// no other is.
template <class Dev>
Json summarise_layers(const Activations<Dev>& a) {
    const NsaShape& s = a.shape;
    if (s.window_only) return Json();
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
    const int64_t B = s.B, T = s.T, blocks = s.slc_blocks();
    const size_t words = size_t(s.selection_words()), queries = size_t(s.B) * s.G * s.T;
    std::vector<int32_t> inputs(size_t(c.total_batch)), targets(inputs.size());
    loader.next_batch(inputs.data(), targets.data(), s.B);
    forward(model, a, inputs.data(), 0, s.T);
    const double tokens = double(c.total_batch);
    std::vector<float> logits;
    const float loss = float(classify(model, a, targets.data(), 1 / tokens, true, &logits) / tokens);
    backward(model, a);
    Buffers buffers;
    std::vector<TensorView> tensors = view_tensors(model.dev, model.table.specs, model.master, "", buffers);
    for (const TensorView& t : view_tensors(model.dev, model.table.specs, model.grads, "grad.", buffers))
        tensors.push_back(t);
    tensors.push_back({"inputs", "I32", {B, T}, inputs.data(), inputs.size() * 4});
    tensors.push_back({"targets", "I32", {B, T}, targets.data(), targets.size() * 4});
    tensors.push_back(tensor_view("logits", {B, T, a.V}, logits.data()));
    tensors.push_back(tensor_view("loss", {1}, &loss));
    std::vector<std::vector<uint8_t>> selections(a.layer.size());  // a byte for each bit of the masks
    for (size_t i = 0; i < a.layer.size(); i++) {
        if (s.kind_of_layer(i) != NSA_LAYER) continue;
        std::vector<uint32_t> masks(queries * words);
        std::vector<uint8_t>& bytes = selections[i];
        model.dev.copy(masks.data(), a.layer[i].selection, masks.size());
        for (size_t q = 0; q < queries; q++)
            for (int j = 0; j < blocks; j++) bytes.push_back(is_selected(&masks[q * words], j));
        const std::string name = format_text("layers.%d.selection", i);
        tensors.push_back({name, "U8", {B, s.G, T, blocks}, bytes.data(), bytes.size()});
    }
    write_safetensors(
        c.dump_state,
        {{"config", config_json(c)}, {"options", command_line(c, "dump-state")}, {"precision", model.dev.format()}},
        tensors);
    print("state:  loss %.6f, written to %s; compare it with: python3 dev/reference.py compare %s\n", double(loss),
          printable(c.dump_state), shell_word(c.dump_state));
}
