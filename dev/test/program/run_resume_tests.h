// Tests of what a run keeps: all of its options over a resume, and what was learnt when an error ends it.
#pragma once
#include <thread>

#include "../../../lib/model/engine.h"
#include "program.h"

// ---------------------------------------------------------------------------------------------------------------------
// Options.

// Every option of the table, given at the start, is in force after a bare --resume; but for those of the list.
PROGRAM_TEST(resume_inherits_every_option) {
    const std::set<std::string> not_inherited = {"out",        "resume", "config", "allow-new-data",
                                                 "dump-state", "help",   "version"};
    const auto started = [](const Words& words) {
        Config c = parse_and_preset(words);
        resolve_batch(c, 1, false);
        return c;
    };
    const Config standard = started({});
    for (const Option& o : OPTIONS) {
        if (!(o.verbs & TRAIN)) continue;
        CHECK_EQUAL(is_inherited(o), !not_inherited.count(o.name));
        if (!is_inherited(o)) continue;
        // Another value than the one that a run without the option has.
        const std::string name = o.name, now = value_text(standard, o), choices = o.choices ? o.choices : "";
        std::string value = o.flag ? "on" : "some/file";
        if (o.choices)
            value = choices.substr(0, now.size()) == now ? choices.substr(choices.rfind('|') + 1)
                                                         : choices.substr(0, choices.find('|'));
        if (o.integer || o.real)
            value = format_text("%.15g", std::atof(now.c_str()) != o.low ? o.low : std::min(o.high, 5.0));
        if (name == "total-batch") value = "8192";
        const Config first = started({"--" + name + "=" + value});
        CHECK(value_text(first, o) != now);
        write_file(folder.file("run.json"), manifest_json(first));
        Config resumed = parse({"--resume", "--out", folder.path});
        CHECK(inherit_options(resumed));
        apply_preset(resumed);
        CHECK_EQUAL(value_text(resumed, o), value_text(with_absolute_paths(first), o));
        if (o.flag) continue;  // cannot be given as off, and need not
        // What is given with --resume counts.
        const std::string other = o.text && !o.choices ? "/another" : now;
        if (o.integer && std::atof(other.c_str()) < o.low) continue;
        Config changed = parse({"--resume", "--out=" + folder.path, "--" + name + "=" + other});
        CHECK(inherit_options(changed));
        apply_preset(changed);
        CHECK_EQUAL(value_text(changed, o), other);
    }
}

// What decides the bits of a run that nobody gives again, in the whole program: micro-batch, threads, statistics.
PROGRAM_TEST(run_resumed_bare_is_the_run) {
    const std::string options = "small --batch=1 --save-every=2 --schedule=constant --optimizer=muon --steps=4" +
                                std::string(HAVE_BF16 ? " --cpu-dtype=bf16" : "");
    for (const char* run_folder : {" --out=@/whole", " --out=@/parts"}) REQUIRE_GOOD(run(options + run_folder));
    std::filesystem::remove_all(file("parts/step_00000004"));
    const std::string resumed = printed("--resume @/parts");
    CHECK(!holds(resumed, "resume: --"));  // nothing has changed
    CHECK(weights_of(file("whole"), 4) == weights_of(file("parts"), 4));
    const auto with_statistics = [&](const char* run_folder) {
        std::vector<int64_t> steps;
        for (const Json& line : log_of(file(run_folder)))
            if (line.find("layers")) steps.push_back(line.integer("step", run_folder));
        return steps;
    };
    CHECK(with_statistics("parts") == std::vector<int64_t>({1, 2, 3, 4}) &&
          with_statistics("whole") == with_statistics("parts"));
    CHECK(holds(resumed, "1 CPU thread each"));
    check({{"--resume @/parts --seed 4", 1, {"--seed 4", "1337"}},
           {"--resume @/parts --optimizer adamw", 1, {"--optimizer adamw", "muon"}},
           {"--resume @/parts --model 2m", 1, {"--model 2m", "tiny"}},
           {"--resume @/parts/step_00000004", 1, {"parts/step_00000004", "is a checkpoint", "folder of a run"}},
           {"--resume @/nowhere", 2, {"nowhere", "no such folder", "--out"}},
           {"--resume @/parts/run.json", 2, {"run.json", "folder"}}});
    // What is given counts.
    CHECK(holds(printed("--resume @/parts --steps 9 --schedule linear"), "resume: --steps is 9, was 4"));
}

// dev/reference.py, in fp64, repeats a step of either optimiser from one checkpoint to the next, and notices one that
// is not the next.
PROGRAM_TEST_LONG(pytorch_repeats_an_update) {
    if (execute({"/usr/bin/env", "python3", "-c", "import torch, numpy"}).status)
        return skip("a step of each optimiser in PyTorch, which python3 does not find");
    for (const std::string optimizer : {"adamw", "muon"}) {
        const std::string run_folder = file(optimizer), part = run_folder + "_part", state = run_folder + "_state";
        REQUIRE_GOOD(run("small --steps=5 --save-every=1 --optimizer=" + optimizer + " --out=" + run_folder));
        copy_folder(run_folder, part);
        for (const char* later : {"/step_00000004", "/step_00000005"}) std::filesystem::remove_all(part + later);
        REQUIRE_GOOD(run("--resume " + part + " --dump-state " + state));
        const auto compare = [&](const char* after) {
            return execute({"/usr/bin/env", "PYTHONDONTWRITEBYTECODE=1", "python3", "dev/reference.py", "update", state,
                            run_folder + "/step_00000003", run_folder + after});
        };
        REQUIRE_GOOD(compare("/step_00000004"));
        const Result other = compare("/step_00000005");
        CHECK(other.status == 1 && holds(other.err, "of a change of"));
    }
}

// What the machine cannot give is said in the line that names the change; what was given with --resume is kept, or
// refused elsewhere.
PROGRAM_TEST(resume_gives_up_what_the_machine_cannot_give) {
    const GpuSearch gpus = NoEngine::search();
    const bool gpu = gpus.count > 0;
    const auto on_two_processors = [&](Source source) {
        Config c;
        overlay(c, option_named("device"), "cuda", source);
        overlay(c, option_named("cpu-dtype"), "bf16", source);
        overlay(c, option_named("threads"), "3", source);
        drop_unsupported_options(c, 2, gpus);
        return c;
    };
    const Config c = on_two_processors(Source::RUN_JSON);
    CHECK_EQUAL(c.threads, 0);
    CHECK_EQUAL(c.settings.at("threads").reason, "this rank has 2 processors");
    CHECK_EQUAL(c.device, gpu ? "cuda" : "auto");
    CHECK_EQUAL(c.cpu_dtype, gpu ? "fp32" : "bf16");
    if (!gpu) CHECK_EQUAL(c.settings.at("device").reason, why_no_gpu(gpus));
    const Config kept = on_two_processors(Source::COMMAND_LINE);
    CHECK(kept.cpu_dtype == "bf16" && kept.threads == 3 && kept.device == "cuda");

    const int more = usable_processors() + 1;
    const Result asked = run(format_text("small --threads=%d", more));  // taken at its word, with a warning
    CHECK(asked.status == 0 && holds(asked.out, format_text("%d CPU threads each", more)));
    CHECK(holds(asked.err, format_text("warning: --threads %d, and this rank has ", more)));
    CHECK(holds(printed("--resume @/run --steps 3"),
                format_text("resume: --threads is auto, was %d: this rank has %d processors\n", more, more - 1)));
}

// run.json may be lost: the newest checkpoint's manifest holds the options. Paths are found from another folder, and
// the closing command works from there.
PROGRAM_TEST(run_resumed_elsewhere_and_without_run_json) {
    write_small_corpus(folder, "train.bin", 1);
    make_folders(file("elsewhere"));
    const auto in = [&](const std::string& where, const Command& command) {
        return in_shell("cd " + file(where) + " && \"$@\"", command);
    };
    REQUIRE_GOOD(in("", "small --data=train.bin --out=run --lr=0.003 --batch=1"));
    REQUIRE(std::remove(file("run/run.json").c_str()) == 0);
    const Result r = in("elsewhere", "--resume --out ../run --steps 3");
    REQUIRE_GOOD(r);
    CHECK(holds(r.out, "resume: --steps is 3, was 2\n"));
    CHECK_EQUAL(logged(out, "lr").back(), 3e-4);  // the end of a schedule from 0.003
    const Words next = {"/bin/sh", "-c", "cd " + file("elsewhere") + " && " + behind(r.out, "next:   ")};
    CHECK_EQUAL(execute(next).status, 0);
    write("run/run.json", "{\"program\": \"train_nsa\", \"lr\": 11}");
    CHECK_REFUSED(in("elsewhere", "--resume --out ../run"), 1, "../run/run.json", "--lr", "remove the file");
    for (const char* damaged : {"", "[]", "{}", "{\"lr\""}) {
        write("run/run.json", damaged);
        CHECK_REFUSED(in("elsewhere", "--resume --out ../run"), 1, "../run/run.json: byte", "remove the file");
    }
}

// The tokens of a log are those that the loader gave out: after another --total-batch, and after other data, with which
// the loader's own count begins anew.
PROGRAM_TEST(run_counts_the_tokens_that_it_was_given) {
    write_small_corpus(folder, "a.bin", 1), write_small_corpus(folder, "b.bin", 2);
    REQUIRE_GOOD(run("small --data=@/a.bin --val-data=@/b.bin"));
    const auto resume = [&](const std::string& more) {
        REQUIRE_GOOD(run("--resume @/run " + more));
        std::vector<double> tokens;
        for (const Json& line : log_of(out))
            if (line.find("tokens")) tokens.push_back(line.number("tokens", "log.jsonl"));
        return std::vector<double>(tokens.end() - 3, tokens.end());  // of the start, its step, the validation
    };
    CHECK(resume("--steps=3 --total-batch=512") == (std::vector<double>{256, 768, 768}));
    CHECK(resume("--steps=4 --total-batch=256") == (std::vector<double>{768, 1024, 1024}));
    CHECK(resume("--steps=5 --allow-new-data --data @/b.bin --val-data=") == (std::vector<double>{1024, 1024, 1280}));
}

// The options of a resume that has no step to do are not the run's from then on.
PROGRAM_TEST(run_resumed_behind_its_end_leaves_run_json) {
    const std::string json = out + "/run.json";
    REQUIRE_GOOD(run("small --steps=4 --save-every=2"));
    remove_tree(out + "/step_00000004");
    const std::string before = read_file(json);
    for (const std::string steps : {"1", "2", "0"}) {
        REQUIRE_GOOD(run("--resume @/run --lr=0.5 --steps=" + steps));
        CHECK(read_file(json) == before);
    }
    REQUIRE_GOOD(run("--resume @/run"));
    CHECK(file_exists(out + "/step_00000004"));
    CHECK(std::remove(json.c_str()) == 0);
    REQUIRE_GOOD(run("--resume @/run --steps=1"));
    CHECK(!file_exists(json));
}

// Names with escape sequences do not reach a terminal, whoever prints them. $ is the odd folder.
PROGRAM_TEST(names_on_stdout_hold_no_escapes) {
    const std::string odd = file("a\x1b[31m\nb");
    make_folders(odd);
    write_file(odd + "/t.txt", std::string(3000, 'a') + " and b, and c");
    write_file(odd + "/h", "{\"ctx\": \"a\", \"endings\": [\"b\", \"c\"], \"label\": 1}\n");
    const std::string data = " --data=$/s_train_*.bin --val-data=$/s_val_*.bin ";
    for (const std::string& command :
         Words{"vocabulary --in $/t.txt --size 260 --out $/v",
               "tokenize --in $/t.txt --tokenizer bytes --val-fraction 0.1 --out $/s",
               "small --out=$/run --hellaswag=$/h" + data, "small --out=$/run" + data,
               "--resume $/run --steps=3 --val-data x=$/s_val_*.bin,y=$/s_val_*.bin",
               "--resume $/run --steps=4 --allow-new-data --data $/s_val_*.bin --val-data=",
               "--init-from $/run --out $/second --steps=0" + data, "--config $/run/run.json --out $/third --steps=0",
               "eval --from $/run --val-data $/s_val_*.bin --text $/t.txt --hellaswag $/h",
               "inspect --from $/run --text $/t.txt --html $/i.html --json $/i.json", "report --from $/run",
               "report --from $/run $/second", "report --from $/run --html $/r.html", "export --from $/run --out $/hf",
               "import --from $/hf --out $/back"}) {
        Words words = arguments(command);
        for (std::string& word : words)
            for (size_t at; (at = word.find('$')) != std::string::npos;) word.replace(at, 1, odd);
        const Result r = program::run(words);
        CHECK_EQUAL(command + std::to_string(r.status) + (r.status ? r.err : ""), command + "0");
        CHECK(!holds(r.out, '\x1b') && !holds(r.err, '\x1b') && !holds(r.out, "\nb/"));
    }
}

// A path may have any bytes: it is found again by a resume and by the verbs, and what shows it is UTF-8.
PROGRAM_TEST(run_takes_paths_that_are_no_utf8) {
    const std::string odd = file("d\xe9t \xff'\x1b"), run_folder = odd + "/run", name = "d\xe9t \xff'\x1b/x.bin";
    make_folders(odd);
    write_small_corpus(folder, name, 1), write_small_corpus(folder, "b.bin", 2);
    REQUIRE_GOOD(train({{"data", odd + "/x*.bin"}, {"val-data", file("b.bin")}, {"out", run_folder}}));
    REQUIRE_GOOD(run({"--resume", run_folder, "--steps=3"}));
    REQUIRE(std::remove((run_folder + "/run.json").c_str()) == 0);  // the manifest has it too
    const std::string resumed = printed({"--resume", run_folder, "--steps=4", "--sample-tokens=1"});
    const std::string options = read_file(run_folder + "/run.json"),
                      manifest = read_file(run_folder + "/step_00000004/manifest.json");
    for (const std::string& text : {options, manifest, resumed}) CHECK(!holds(text, "\xe9") && !holds(text, "\x1b"));
    CHECK(parse_own_json(options, "").string("data", "") == odd + "/x*.bin");
    REQUIRE_GOOD(run({"eval", "--from", run_folder, "--val-data", "@/b.bin", "--json", odd + "/e.json"}));
    CHECK(parse_own_json(read_file(odd + "/e.json"), "").string("checkpoint", "") == run_folder + "/step_00000004");
    CHECK(parse_own_json(manifest, "").get("state", "").array("shards", "")[0].text == odd + "/x.bin");
    CHECK_REFUSED(run({"--data", odd + "/*.bin", "--config", "@/none"}), 1, "none");
    REQUIRE_GOOD(run({"report", "--from", run_folder, "--html", "@/page.html"}));
    const std::string page = read_file(file("page.html"));
    uint32_t code;
    for (size_t i = 0; i < page.size();) {
        const int length = utf8_decode(page.data() + i, page.size() - i, &code);
        REQUIRE(length > 0 && (code >= ' ' || code == '\n' || code == '\t'));
        i += size_t(length);
    }
    // The command that it prints works as it stands, in bash.
    CHECK_EQUAL(execute({"/bin/bash", "-c", behind(resumed, "next:   ")}).status, 0);
    REQUIRE_GOOD(run({"export", "--from", run_folder, "--out", odd + "/hf"}));
    CHECK(!holds(read_file(odd + "/hf/README.md"), "\xe9"));
}

// --init-from brings the weights and the model's shape; only what was given can contradict it.
PROGRAM_TEST(run_begins_with_the_shape_of_the_weights) {
    REQUIRE_GOOD(run("small --out=@/first"));
    REQUIRE_GOOD(run("small --init-from=@/first --steps=0 --eval-every=1"));
    CHECK_EQUAL(logged(out, "val_loss").at(0), logged(file("first"), "val_loss").back());
    const std::string second = "--init-from=@/first --out=@/second --steps=0 ", begun = printed(second);
    CHECK(holds(begun, "7712 parameters (1 layer, width 16", "samples of 64 tokens",
                "weights: those of " + file("first") + "/step_00000002"));
    CHECK(!holds(begun, "next:"));  // no checkpoint is there to sample from
    CHECK_EQUAL(run(second + "--seq-len=128").status, 0);
    CHECK_REFUSED(run(second + "--dim=32"), 1, "cannot begin from", "dim is 16 there and 32", "leave");
    // RoPE's base is no shape: the same weights begin with another one, which is the new run's, and eval's.
    REQUIRE_GOOD(
        run("--init-from=@/first --out=@/longer --steps=1 --warmup=0 --lr=1e-30 --weight-decay=0 "
            "--seq-len=128 --rope-base=3000000 --eval-batches=1 --threads=1"));
    CHECK(weights_of(file("longer"), 1) == weights_of(file("first"), 2));
    CHECK_REFUSED(run("--resume @/longer --rope-base=10000"), 1, "cannot resume from",
                  "rope_base is 3000000 there and 10000 in this run", "--init-from");
    const std::string eval = "eval --val-data=synthetic --threads=1 --seq-len=128 --from ",
                      loss = format_text("loss %.4f", logged(file("longer"), "val_loss").back());
    CHECK(holds(printed(eval + "@/longer"), loss) && !holds(printed(eval + "@/first"), loss));
}

// ---------------------------------------------------------------------------------------------------------------------
// Errors that end a run.

// A shard that is cut off or damaged in the middle of a run without --save-every: what was learnt is saved, on one rank
// and on two, and the run goes on from there.
PROGRAM_TEST(run_bad_data_in_the_middle_keeps_what_was_learnt) {
    const std::string data = file("train.bin"), whole = shard(random_tokens(64 * 4000 + 1, 1));
    const bool has_ranks = find_ranks("bad data on two ranks");
    for (const auto& [ranks, cut] : {std::pair(1, true), {1, false}, {2, false}}) {
        if (ranks == 2 && !has_ranks) continue;
        const std::string run_folder = file(format_text("run%d%d", ranks, cut));
        write_file(data, whole);
        std::thread damage([&, cut = cut] {
            const std::string log = run_folder + "/main.log";
            for (int i = 0; i < 3000 && (!file_exists(log) || !holds(read_file(log), "s:3 ")); i++) usleep(10000);
            const std::string bad = shard(std::vector<uint16_t>(64 * 4000 + 1, 300));
            if (cut) std::filesystem::resize_file(data, 1024);
            else std::fstream(data, std::ios::in | std::ios::out).write(bad.data(), bad.size());
        });
        const Result r =
            run_on(ranks, "small --data=@/train.bin --steps=1000000 --batch=1 --eval-every=0 --out=" + run_folder);
        damage.join();
        const int64_t last = checkpoint_steps(run_folder).empty() ? 0 : checkpoint_steps(run_folder)[0];
        CHECK(last >= 3);
        const std::string saved = "the last good checkpoint is " + checkpoint_folder(run_folder, last);
        CHECK_EQUAL(int64_t(logged(run_folder, "loss").size()), last);
        if (cut) CHECK_REFUSED(r, 1, data, "was cut off", saved);
        else if (ranks == 1) CHECK_REFUSED(r, 1, data, "token 300 at byte", "vocabulary of 256", saved);
        else CHECK(r.status != 0 && holds(r.err, "token 300 at byte", saved));
        write_file(data, whole);
        const std::string resume = "--resume " + run_folder + format_text(" --steps=%d", last + 2);
        Result again = run(resume);
        for (int i = 0; i < 50 && holds(again.err, "another run is at work"); i++) {
            usleep(100000);  // mpirun may end before its ranks have let go of the folder
            again = run(resume);
        }
        REQUIRE_GOOD(again);
        CHECK(file_exists(checkpoint_folder(run_folder, last + 2)));
    }
}

// A token that was outside the vocabulary from the beginning is found when its sample is read, to train on it or to
// validate, with its byte; what was learnt until then is saved.
PROGRAM_TEST(run_bad_token_is_found_with_its_sample) {
    std::vector<uint16_t> tokens = random_tokens(64 * 20 + 1, 1);
    write("good.bin", shard(tokens));
    tokens[650] = 256;
    write("bad.bin", shard(tokens));
    for (const char* data :
         {"--data=@/bad.bin --eval-every=0", "--data=@/good.bin --val-data=@/bad.bin --eval-every=5"}) {
        remove_tree(out);
        const Result r = run(std::string("small --batch=1 --total-batch=64 --eval-batches=20 --steps=20 ") + data);
        const std::vector<int64_t> saved = checkpoint_steps(out);
        CHECK_REFUSED(r, 1, file("bad.bin"), "token 256 at byte 2324 ", "vocabulary of 256",
                      saved.empty() ? "" : "the last good checkpoint is " + checkpoint_folder(out, saved[0]));
        CHECK_EQUAL(int64_t(logged(out, "loss").size()), saved.empty() ? 0 : saved[0]);
    }
}

// Weights that grow without bounds: each step multiplies them by 1 - lr * decay = -99, until products overflow. The
// last ones that were good are kept, and nothing is removed for them.
PROGRAM_TEST(run_bad_numbers_keep_what_was_learnt) {
    const Result r = run("small --steps=100 --lr=10 --weight-decay=10 --schedule=constant --keep=1");
    CHECK_EQUAL(r.status, 1);
    REQUIRE(checkpoint_steps(out).size() == 1);
    const std::string saved = checkpoint_folder(out, checkpoint_steps(out)[0]);
    CHECK(holds(r.err, "3 in a row", "the last good checkpoint is " + saved));
    const SafeTensors model(saved + "/model.safetensors");
    for (const TensorView& t : model.tensors)
        for (const float x : values_of<float>(t)) CHECK(std::isfinite(x));
}

// A sample that cannot be made, here one of more than a terabyte of keys and values, is a warning and not the end.
PROGRAM_TEST(run_goes_on_without_a_sample) {
    const Result r =
        run("small --layers=100 --heads=1 --head-dim=512 --batch=1 --total-batch=64 --steps=1 "
            "--sample-tokens=1000000");
    CHECK_EQUAL(r.status, 0);
    CHECK(holds(r.err, "warning: no sample: a sample of 1000000 tokens"));
}
