// run_printer.cpp: the functions of run_printer.h.
#include "run_printer.h"

void print_run(const TrainConfig& c, const Machine& machine, const TensorList& table, const Partition& partition,
               const TrainingData& data, const std::string& weights) {
    const World& world = machine.world;
    const Device& device = machine.device;
    const bool synthetic = c.data == "synthetic";
    print("device: %s, because %s; %s (%s), %d on %s, %s each\n", machine.engine, device.reason,
          counted(world.size, "rank"), world.launcher, world.local_size, world.host,
          counted(device.threads, "CPU thread"));
    if (!device.idle.empty()) print("        %s\n", device.idle);
    if (world.size > 1 && std::getenv("OMPI_COMM_WORLD_SIZE") && world.launcher == "mpirun")
        print("        Open MPI's mpirun kills ranks 0.5 to 2 s after Ctrl-C: touch %s/halt saves before it ends\n",
              printable(c.out));
    if (world.size > 1)
        print("ranks:  gradients travel %s, in %s, %s of %.1f MB, %s%s\n", machine.path.text, c.grad_reduce,
              counted(int64_t(partition.buckets()), "bucket"), double(partition.bucket) * 4e-6,
              partition.buckets() > 1 ? "each as soon as it is final" : "at the end of the backward pass",
              c.zero ? "; optimiser state is shared out over the ranks" : "");
    print("model:  %s, %d parameters (%s, width %d, %s attention), %s\n", c.model, table.parameters,
          counted(c.layers, "layer"), c.dim, c.attention, printable(weights));
    print("data:   %s%s: %s; vocabulary %s, %d tokens\n",
          synthetic ? "the built-in synthetic corpus" : printable(c.data),
          c.is_chosen("data") ? "" : ", because no --data was given", printable(data.train->describe()), c.tokenizer,
          c.vocab_size);
    if (synthetic && c.tokenizer == "gpt2")
        print(
            "        its bytes are taken as the token ids 0..255: good for timing, not for learning GPT-2's tokens\n");
    if (data.val.empty()) print("        no validation: --val-data was not given\n");
    for (const ValidationSet& set : data.val)
        print("%s%s%s%s\n", &set == &data.val[0] ? "valid.: " : "        ", set.name, set.name.empty() ? "" : ": ",
              printable(set.loader->describe()));
    print("batch:  %d tokens a step = %s of %d x %s x %s; %s, %s schedule\n", c.total_batch,
          counted(c.batch, "sequence"), c.seq_len, counted(world.size, "rank"),
          counted(c.total_batch / (c.batch * c.seq_len * world.size), "micro-step"), counted(c.steps, "step"),
          c.schedule);
    if (!c.is_chosen("total-batch") && c.total_batch != preset_of(c).total_batch)
        print("        not the preset's %d tokens a step, %s; --total-batch sets them\n", preset_of(c).total_batch,
              !device.gpu && is_too_large_for_cpu(c) ? "which would take long on a CPU"
                                                     : "which ranks and --batch do not divide");
}

void print_selected(const std::string& kernels) {
    if (!kernels.empty()) print("        %s\n", kernels);
}

std::string bad_step_text(const StepResult& s, const std::vector<std::string>& finite, const std::string& tensor,
                          const std::string& file) {
    std::string culprits;
    for (size_t r = 0; finite.size() > 1 && r < finite.size(); r++)
        if (finite[r].empty()) culprits += (culprits.empty() ? ", from rank " : ", ") + std::to_string(r);
    return format_text(
        "step %d: loss %g, gradient norm %g%s: not finite; first tensor: %s; the step changed no weight, its batch "
        "is in %s",
        s.step, s.loss, s.norm, culprits, tensor, file);
}

std::string write_bad_step(const std::string& out, const StepResult& s, int rank, const std::string& tensor,
                           size_t seq_len) {
    const std::string path = format_text("%s/bad_step_%08d_rank%d.json", out, s.step, rank);
    std::string text = format_text(
        "{\"step\": %d, \"rank\": %d, \"loss\": \"%g\", \"loss_of_this_rank\": \"%g\", \"grad_norm\": \"%g\", "
        "\"first_nonfinite_gradient\": %s, \"tokens\": [",
        s.step, rank, s.loss, s.own_loss, s.norm, json_quote(tensor));
    for (size_t i = 0; i < s.tokens.size(); i++)
        text += (i % seq_len ? "," : i ? "],\n [" : "\n [") + std::to_string(s.tokens[i]);
    try_or_complain([&] { write_text_file(path, text + "]]}\n"); });
    return path;
}

// How each line of log.jsonl begins. time: of the day, which somebody may set; clock: counts the seconds at work.
static Json begin_record(int64_t step) {
    return {{"step", step}, {"time", {unix_time(), "%.3f"}}, {"clock", {seconds_now(), "%.3f"}}};
}

void RunPrinter::log_start(const TrainState& state, const Machine& machine, int64_t parameters, int64_t vocab_size,
                           double flops) {
    ranks = machine.world.size;
    tokens = state.tokens;
    flops_per_token = flops;
    peak_flops = machine.peak_flops;
    Json start = start_record(machine);
    start.add({{"parameters", parameters},
               {"vocab_size", vocab_size},
               {"flops_per_token", {flops, "%.0f"}},
               {"peak_flops", {peak_flops, "%.6g"}}});
    log->add_record(begin_record(state.step).add({{"tokens", tokens}, {"start", start}}));
}

void RunPrinter::log_sample(int64_t step, const std::string& text) {
    log->add_record(begin_record(step).add("sample", text));
}

double RunPrinter::lap() {
    const double now = seconds_now(), seconds = now - last_lap;
    last_lap = now;
    speed.push_back(double(total_batch) / seconds);
    return seconds;
}

void RunPrinter::print_step(const StepResult& s, double seconds, double peak_gpu_mib, bool last) {
    tokens = s.all_tokens;
    log->add_line(format_text("s:%d trl:%.6f lr:%.6e norm:%.4f", s.step, s.loss, s.lr, s.norm));
    Json record = begin_record(s.step);
    record.add({{"loss", {s.loss, "%.6f"}},
                {"lr", {s.lr, "%.6e"}},
                {"grad_norm", {s.norm, "%.6f"}},
                {"skipped", s.is_bad()},
                {"ms", {seconds * 1e3, "%.2f"}},
                {"tokens_per_s", {speed.back(), "%.1f"}},
                {"tokens", s.all_tokens},
                {"epoch", {double(s.samples) / double(epoch_samples), "%.6f"}},
                {"peak_memory_mib", {peak_resident_bytes() / (1 << 20), "%.1f"}}});
    if (peak_gpu_mib) record.add("peak_gpu_memory_mib", {peak_gpu_mib, "%.1f"});
    if (!s.layers.items.empty()) record.add("layers", s.layers);
    log->add_record(record);
    unprinted_seconds += seconds, unprinted_steps++;
    const bool due = log_every ? s.step % log_every == 0 : seconds_now() >= last_printed + 1;
    if (!due && s.step != first_step + 1 && s.step != steps && !last && !s.is_bad()) return;
    last_printed = seconds_now();
    const double left = (last_lap - started) / double(s.step - first_step) * double(steps - s.step);
    // The mean since the line before: a GPU's host runs ahead, so by its clock the last of several steps takes no
    // time.
    const double mean = unprinted_seconds / double(unprinted_steps);
    unprinted_seconds = 0, unprinted_steps = 0;
    print("step %04d | loss %.4f | lr %.2e | toks/s %.0f | grad_norm %.2f | %.0f ms | eta %s\n", s.step, s.loss, s.lr,
          double(total_batch) / mean, s.norm, mean * 1e3, duration_text(left));
    std::fflush(stdout);
}

void RunPrinter::print_validation(int64_t step, const std::string& set, bool decides, const EvalResult& r) {
    if (decides) last_recall = r.answers ? r.answer_loss : -1;
    if (!log) return;
    const std::string of = decides ? "" : "/" + set;
    std::string line = format_text("step %04d | val loss %.4f", step, r.loss);
    if (!set.empty()) line += " (" + set + ")";
    Json record = begin_record(step);
    record.add({{"tokens", tokens}, {"val_loss" + of, {r.loss, "%.6f"}}, {"val_tokens" + of, r.tokens}});
    if (decides && !set.empty()) record.add("val_set", set);
    if (r.bytes) {
        line += format_text(" | bits/byte %.4f", r.bits_per_byte());
        record.add("bits_per_byte" + of, {r.bits_per_byte(), "%.6f"});
    }
    if (r.answers) {
        line += format_text(" | recall loss %.4f (chance %.4f)", r.answer_loss, std::log(SYNTHETIC_ALPHABET));
        record.add("recall_loss" + of, {r.answer_loss, "%.6f"});
    }
    print("%s\n", line);
    log->add_line(format_text("s:%d tel%s:%.6f", step, of, r.loss));
    log->add_record(record);
}

void RunPrinter::print_choices(int64_t step, const ChoiceResult& r) {
    if (!log) return;
    print("step %04d | %s\n", step, describe_choices(r));
    log->add_line(format_text("s:%d eval:%.6f", step, r.accuracy_per_token()));
    log->add_record(begin_record(step).add(
        {{"hellaswag", {r.accuracy_per_token(), "%.6f"}}, {"hellaswag_plain", {r.accuracy(), "%.6f"}}}));
}

void RunPrinter::print_done(int64_t step, double peak_device_mib, const std::string& device) {
    const double chance = std::log(SYNTHETIC_ALPHABET);
    if (last_recall >= 0)
        print("recall: %.2f for a letter of a name that was last seen beyond the window, guessing costs %.2f: %s\n",
              last_recall, chance,
              last_recall < 1              ? "the model looks such names up"
              : last_recall < 0.9 * chance ? "the model has begun to look such names up"
                                           : "the model does not look such names up, it guesses");
    std::sort(speed.begin(), speed.end());
    const double tokens_per_second = speed.empty() ? 0 : speed[speed.size() / 2],  // the median
        rate = flops_per_token * tokens_per_second / ranks;
    print("done:   %s in %s, %speak memory %s%.0f MiB%s\n", counted(step - first_step, "step"),
          duration_text(seconds_now() - begun),
          speed.empty() ? "" : format_text("median %.0f tokens/s, ", tokens_per_second),
          peak_device_mib ? format_text("%.0f MiB on the %s, of the host ", peak_device_mib, device) : "",
          peak_resident_bytes() / (1 << 20), ranks > 1 ? " on rank 0" : "");
    if (speed.empty()) return;
    print("        %.1f MFLOP a token by the model's own count: %s TFLOP/s%s%s\n", flops_per_token * 1e-6,
          format_text(rate < 1e13 ? "%.3f" : "%.1f", rate * 1e-12), ranks > 1 ? " on each rank" : "",
          peak_flops > 0 ? format_text(", MFU %.1f %% of %.1f TFLOP/s", 100 * rate / peak_flops, peak_flops * 1e-12)
                         : "");
}

void RunPrinter::print_reductions(const ReduceTimes& times) {
    if (times.steps)
        print("ranks:  reductions %.1f ms a step, of which %.1f ms exposed: not hidden behind the backward pass\n",
              times.total * 1e3 / double(times.steps),
              std::min(times.exposed, times.total) * 1e3 / double(times.steps));
}

void RunPrinter::print_end(Stop stop, const TrainState& state, const TrainConfig& c, const CheckpointSaver& saver,
                           bool has_vocabulary) const {
    const std::string &save_error = saver.last_error, &last_saved = saver.last_saved;
    // One that comes when the last step is done has nothing to stop, and is not to stop the next start.
    if (stop == HALTED || stop == GO_ON) remove_halt_file(c.out);
    if (!save_error.empty())
        fail(
            "the last checkpoint could not be written: %s; what was learnt since %s is lost; mend that and run "
            "again%s",
            save_error, last_saved.empty() ? "the start" : last_saved, last_saved.empty() ? "" : " with --resume");
    if (stop != GO_ON) {  // such a run is to be resumed, and its exit status says so
        const bool unread = stop_signal == SIGPIPE;
        const std::string text =
            format_text("stopped by %s after step %d of %d; %s",
                        unread                ? "the end of what read its output"
                        : stop == HALTED      ? "the halt file"
                        : stop == INTERRUPTED ? "SIGINT"
                                              : "SIGTERM, SIGUSR1, SIGHUP or SIGXCPU",
                        state.step, steps,
                        last_saved.empty() ? "nothing is saved yet, so the same command begins again"
                                           : "the same command with --resume goes on");
        return unread ? complain(text) : print("%s\n", text);
    }
    if (state.bad_steps)
        fail(
            "the last %s not finite, so the weights are those of step %d; lower --lr or look at the data: the "
            "batch is in %s/bad_step_*.json",
            state.bad_steps == 1 ? "step is" : format_text("%d steps are", state.bad_steps), state.last_update, c.out);
    if (!std::isfinite(state.validation.loss))
        fail(
            "the last validation loss is not finite: the weights are no use any more; lower --lr, and --resume "
            "from an earlier checkpoint in %s",
            c.out);
    if (state.step == first_step)
        print("no step was to be done: --steps is %d%s\n", steps,
              first_step ? format_text(", and step %d is reached already; run.json stays as it was", first_step) : "");
    if (!last_saved.empty())
        print("next:   %s sample --from %s%s --prompt \"...\"\n        %s report --from %s --html %s\n",
              shell_word(program_name), shell_word(c.out), has_vocabulary ? "" : " --vocab-dir DIR",
              shell_word(program_name), shell_word(c.out), shell_word(c.out + ".html"));
}
