// refusal_tests.h: what the built ./train_nsa refuses: a row a command, with its exit status and what the one line on
// stderr must name so that its reader knows what to do.
#pragma once
#include "../data/tokenize_tests.h"  // GZIP_TEXT
#include "program.h"

PROGRAM_TEST(refusals_of_usage) {
    for (const char* name : {"a.bin", "b.bin", "a.txt", "a.png"}) write(name, "words");
    check({
        {"--qwertyuiop 2", 2, {"--qwertyuiop", "--help"}},
        {"--seq_len 8", 2, {"--seq_len", "--help"}},
        {"fly", 2, {"'fly'", "verb"}},
        {"help fly", 2, {"'fly'", "help"}},
        {"train steps", 2, {"'steps'", "option"}},
        {"-s 1", 2, {"'-s'", "option"}},
        {"--steps 1 eval", 2, {"'eval'", "verb"}},
        {"sample", 2, {"--from"}},
        {"eval", 2, {"--from"}},
        {"tokenize --out x", 2, {"--in"}},
        {"tokenize --in x.txt", 2, {"--out"}},
        {"tokenize --in @/a.txt --out @/t", 2, {"--vocab-dir"}},
        {"tokenize --in @/a.txt --out @/t --tokenizer bytes --vocab-dir @/t", 2, {"--vocab-dir", "bytes"}},
        {"small --vocab-dir=@/a.txt", 2, {"--vocab-dir", "bytes"}},
        {"tokenize --in @/a.png --out @/t --tokenizer bytes", 2, {"--in", "a.png"}},
        {"tokenize --in @/nofile --out @/t", 1, {"@/nofile"}},
        {"small --out= --data=@/none", 2, {"--out"}},
        // A pattern without quotes, which the shell has turned into a list of files.
        {"--data @/a.bin @/b.bin", 2, {"'@/b.bin'", "quotes"}},
        {"eval --from x --val-data @/a.bin @/b.bin", 2, {"'@/b.bin'", "quotes"}},
        {"tokenize --in --a.txt", 2, {"--in=--a.txt"}},
        {"vocabulary --size 300 --out @/t", 2, {"--in"}},
    });
    // What the shell expands only without quotes, and not behind a =.
    for (const char* command : {"--data=~/a_*.bin", "--out=~/x", "--resume ~/x", "sample --prompt-file a ~/b",
                                "tokenize --in=~/a.txt --out x"})
        check({{command, 2, {"~/", "whole path"}}});
    check({{{""}, 2, {"''", "verb"}}, {{"sample", "--from=x", "--prompt", "--help me"}, 2, {"--prompt='--help me'"}}});
    CHECK(!file_exists("~") && glob_files(file("t*")).empty());
    // Nothing is suggested where it would make no sense.
    for (const char* command : {"--steps --resume", "--schedule --lr", "sample --prompt"})
        CHECK_EQUAL(run(command).err.find("="), std::string::npos);
}

PROGRAM_TEST(refusals_of_options_that_do_not_go_together) {
    write("notes.txt", "mine"), write("file", ""), make_folders(file("dir"));
    REQUIRE_GOOD(run("small --attention=full --steps=1 --out=@/full"));
    check({
        {"small --heads=3 --kv-groups=2", 2, {"--heads 3", "--kv-groups 2"}},
        {"small --heads=2 --kv-groups=4", 2, {"--heads 2", "--kv-groups 4"}},
        {"small --head-dim=9", 2, {"--head-dim 9"}},
        {"small --cmp-block=10", 2, {"--cmp-block 10", "--cmp-stride 4"}},
        {"small --cmp-block=4 --cmp-stride=8", 2, {"--cmp-block 4", "--cmp-stride 8"}},
        {"small --slc-block=10", 2, {"--slc-block 10", "--cmp-stride 4"}},
        {"small --slc-count=2", 2, {"--slc-count", "2"}},
        {"small --total-batch=100", 2, {"--total-batch 100", "--seq-len 64"}},
        {"small --total-batch=32", 2, {"--total-batch 32", "--seq-len 64"}},
        {"small --total-batch=192", 2, {"--total-batch 192", "--batch 2"}},
        {"small --stall-timeout=0.5", 2, {"--stall-timeout 0.5", "at least 1"}},
        {"small --batch=1 --dump-state=@/state", 2, {"--dump-state", "--total-batch 128", "--batch 1"}},
        {"small --dump-state=@/notes.txt", 1, {"--dump-state @/notes.txt"}},
        {"small --dump-state=@/dir", 1, {"--dump-state @/dir"}},
        {"small --dump-state=@/none/state", 1, {"@/none/state"}},
        {"small --out=@/file", 1, {"@/file"}},
        {"small --out=@/file/run", 1, {"@/file/run"}},
        {"small --allow-new-data=1", 2, {"--allow-new-data", "--resume"}},
        // A run.json has every option, whether or not its run used it.
        {"--config @/full/run.json --out @/refused --window 9", 2, {"--window", "--attention full"}},
        {"--attention window --slc-count 4 --out @/refused", 2, {"--slc-count", "window"}},
        {"--attention full,window --slc-count 4 --out @/refused", 2, {"--slc-count", "full,window"}},
        {"--attention window,window,full --out @/refused", 2, {"--layers is 2"}},
        {"--attention= --out @/refused", 2, {"--attention", "window,nsa"}},
        {"--attention ,nsa --out @/refused", 2, {"--attention", "window,nsa"}},
        {"--attention nsa,,full --out @/refused", 2, {"--attention", "window,nsa"}},
        {"--attention window,nsa,dense --out @/refused", 2, {"--attention", "window,nsa"}},
    });
    // Of NSA alone, or of a window.
    for (const std::string option : {"--window", "--cmp-block", "--slc-count", "--phi-hidden"})
        check({{"--attention full " + option + " 4 --out @/refused", 2, {option, "--attention full"}}});
    // Of a GPU, which these tests hide.
    for (const std::string command :
         {"small --device=cuda", "check --device cuda", "sample --from @/full --device cuda",
          "eval --from @/full --val-data synthetic --device cuda"})
        check({{command, 2, {"--device cuda"}}});
    CHECK_EQUAL(read_file(file("notes.txt")), "mine");
    CHECK(!file_exists(file("state")));
}

// Sizes that no machine holds are refused by name before the memory is asked for, not with std::bad_alloc or an
// overflow.
PROGRAM_TEST(refusals_of_sizes_beyond_any_machine) {
    write("train.bin", shard(random_tokens(1000, 1)));
    Start start;
    start.seconds = 20;
#if defined(__SANITIZE_ADDRESS__)  // which reserves terabytes of addresses for itself
    start.environment = {"ASAN_OPTIONS=allocator_may_return_null=1:detect_leaks=0"};
#else
    start.address_space = uint64_t(8) << 30;
#endif
    for (const auto& [command, named] : {
             std::pair("small --eval-batches=1000000000000", "--eval-batches"),
             {"small --eval-batches=1000000000000 --total-batch=64000000000", "--"},
             {"small --batch=64000 --seq-len=1000000 --total-batch=64000000000 --eval-batches=1", "--"},
             {"small --layers=1000 --dim=64000", "--"},
             {"small --batch=64 --total-batch=4096 --data=@/train.bin", "--total-batch"},
         }) {
        const Result r = run(command, start);
        CHECK(r.status == 1 || r.status == 2);
        CHECK_REFUSED(r, r.status, named);
    }
    CHECK(!file_exists(file("refused")));
}

PROGRAM_TEST(refusals_of_bad_training_data) {
    const std::string good = shard(random_tokens(1000, 1));
    make_folders(file("dir"));
    write("good.bin", good);
    write("cut.bin", good.substr(0, good.size() - 1));
    write("text.bin", "It was a dark and stormy night."), write("packed.gz", GZIP_TEXT);
    write("gpt2.bin", shard(random_tokens(1000, 1), 50257));
    write("left_1.bin", good), write("left_2.bin.tmp", good);  // by a tokenize that was killed
    for (const int n : {30, 64, 128}) write(format_text("%d.bin", n), shard(random_tokens(size_t(n), 3)));
    check({
        {"small --data=@/none_*.bin", 1, {"--data", "@/none_*.bin"}},
        {"small --data=", 2, {"--data"}},
        {"small --data=@/good.bin --val-data=@/none_*.bin", 1, {"--val-data", "@/none_*.bin"}},
        {"small --data=@/cut.bin", 1, {"@/cut.bin", "byte 8"}},
        {"small --data=@/text.bin", 1, {"@/text.bin", "tokenize"}},
        {"small --data=@/dir", 1, {"@/dir", "folder", "/*_train_*.bin'"}},
        {"small --data=@/packed.gz", 1, {"packed.gz", "gzip"}},
        {"small --data=@/left_*.bin", 1, {"--data", "left_2.bin.tmp", "tokenize"}},
        {"small --data=@/good.bin --val-data=@/left_*.bin", 1, {"--val-data", "left_2.bin.tmp"}},
        {"small --data=@/good.bin --val-data=@/gpt2.bin", 1, {"@/gpt2.bin", "50257", "256"}},
        {"small --data=@/64.bin", 1, {"--data", "64", "--seq-len"}},
        {"small --data=@/128.bin", 1, {"--data", "128", "--total-batch"}},  // one sample, the step needs two
        {"small --data=@/good.bin --val-data=@/30.bin", 1, {"--val-data"}},
        // The same file for both, under whatever name.
        {"small --data=@/good.bin --val-data=@/good.bin", 2, {"@/good.bin", "training"}},
        {"small --data=@/goo*.bin --val-data=@/good.bin", 2, {"@/good.bin"}},
        // The built-in corpus is bytes; a model of GPT-2's tokens would take them as other words.
        {"small --data=@/good.bin --val-data=synthetic --tokenizer=gpt2", 2, {"--val-data synthetic", "gpt2"}},
    });
    // One sample is enough to validate with: the rest of the micro-batch is not counted.
    REQUIRE_GOOD(run("small --data=@/good.bin --val-data=@/128.bin --steps=1 --out=@/one"));
    CHECK_EQUAL(logged(file("one"), "val_tokens")[0], 64.0);
}

PROGRAM_TEST(refusals_of_bad_input_of_tokenize) {
    write("empty.txt", ""), write("words.txt", "words"), make_folders(file("dir"));
    write("key.jsonl", "{\"text\": \"one\"}\n\n{\"txt\": \"three\"}\n");
    write("utf16.txt", std::string("\xFF\xFEw\0", 4));
    write("utf16.jsonl", std::string("\xFE\xFF\0{", 4));
    write("utf32.txt", std::string("w\0\0\0o\0\0\0", 8));
    write("little.txt", std::string("w\0o\0r\0d\0s\0", 10));
    write("big.txt", std::string("\0w\0o\0r\0d\0s", 10));
    write("list.json", "[{}]"), write("pdf.txt", "%PDF-1.7"), write("x.bin", shard({1}));
    write("shard.txt", shard({1})), write("llama3.txt", std::string("\xa1\xd9\x34\1", 4));
    const std::string tokenize = "tokenize --tokenizer bytes --threads 1 --out @/shards --in ";
    check({
        {tokenize + "@/empty.txt", 1, {"--in", "empty.txt"}},
        {tokenize + "@/key.jsonl", 1, {"key.jsonl", "line 3", "text"}},
        {tokenize + "@/utf16.txt", 1, {"utf16.txt", "UTF-16", "iconv"}},
        {tokenize + "@/utf16.jsonl", 1, {"utf16.jsonl", "UTF-16", "iconv"}},
        {tokenize + "@/utf32.txt", 1, {"utf32.txt", "UTF-32", "iconv"}},
        {tokenize + "@/little.txt", 1, {"UTF-16LE", "iconv"}},
        {tokenize + "@/big.txt", 1, {"UTF-16BE", "iconv"}},
        {tokenize + "@/words.txt --split-documents \\q", 2, {"--split-documents"}},
        {tokenize + "@/none.txt", 1, {"none.txt"}},
        {tokenize + "@/list.json", 1, {"list.json", "jq", "rename", ".jsonl"}},
        {tokenize + "@/pdf.txt", 1, {"pdf.txt", "pdftotext"}},
        {tokenize + "@/x.bin", 1, {"x.bin", "shard", "--data"}},
        {tokenize + "@/shard.txt", 1, {"shard.txt", "--data"}},
        {tokenize + "@/llama3.txt", 1, {"llama3.txt", "shard"}},
        {tokenize + "@/words.txt --shard-tokens 1023", 2, {"--shard-tokens", "1024"}},
        {"tokenize --in @/words.txt --out @/shards --vocab-dir @/none", 1, {"@/none"}},
        {"tokenize --in @/words.txt --out @/shards --vocab-dir @/dir", 1, {"@/dir"}},
    });
    CHECK_REFUSED(in_shell("\"$@\" <&-", tokenize + "-"), 1, "stdin", "closed");
    CHECK(glob_files(file("shards*")).empty());
    CHECK_EQUAL(run(tokenize + "@/words.txt").status, 0);
    check({{tokenize + "@/words.txt", 1, {"--out", "@/shards_train_000001.bin"}}});
}

// Another model or other data than the checkpoint's, and runs that are none.
PROGRAM_TEST(refusals_of_resumes_and_beginnings) {
    write("train.bin", shard(random_tokens(64 * 15 + 1, 1, 64)));
    write("other.bin", shard(random_tokens(64 * 15 + 1, 2, 64)));  // as many tokens, but others
    write("longer.bin", shard(random_tokens(64 * 20, 3, 64)));
    write("empty.txt", ""), write("number.jsonl", "{\"text\": \"one\"}\n{\"text\": 2}\n");
    REQUIRE_GOOD(run("small --data=@/train.bin --out=@/run"));
    REQUIRE_GOOD(run("small --tokenizer=gpt2 --steps=1 --out=@/gpt2"));
    const std::string options = read_file(file("run/run.json")),
                      resume = "small --data=@/train.bin --out=@/run --resume=on --steps=3 ",
                      begin = "small --init-from=@/run ";
    for (const std::string other :
         {"layers=2", "dim=32", "heads=4", "head_dim=16", "cmp_block=12", "cmp_stride=8", "slc_block=16", "slc_count=5",
          "window=17", "phi_hidden=9", "mlp_hidden=33", "attention=full", "smear=on", "head=untied"}) {
        const size_t equals = other.find('=');
        const std::string option = "--" + std::regex_replace(other, std::regex("_"), "-");
        check({{resume + option, 1, {"@/run", other.substr(0, equals), other.substr(equals + 1)}}});
    }
    check({
        {resume + "--heads=4 --kv-groups=2", 1, {"@/run"}},
        {resume + "--seq-len=32", 1, {"seq_len", "64", "32"}},
        {resume + "--data=@/longer.bin", 1, {"--data", "corpus"}},
        {resume + "--data=synthetic", 1, {"--data", "corpus"}},
        {resume + "--data=@/other.bin", 1, {"--data"}},
        {begin + "--layers=3", 1, {"@/run", "layers", "3"}},
        {"small --init-from=@/none", 1, {"none"}},
        {"small --init-from=@/run/run.json", 1, {"--init-from", "file"}},
        {"sample @/run --from @/run", 2, {"--from", "twice"}},
        {"sample --from @/run @/run", 2, {"option"}},
        {"sample @/train.bin", 2, {"option"}},
        {"sample @/none", 1, {"--from @/none"}},
        {"--steps 3 @/run", 2, {"option"}},
        {"eval --from @/run --val-data @/none*", 1, {"--val-data", "@/none*"}},
        {"eval --from @/run --text @/number.jsonl", 1, {"number.jsonl", "line 2", "tokenize", "--skip-bad"}},
        {"inspect --from @/run --text @/empty.txt --html @/i.html", 1, {"--text @/empty.txt"}},
        {"eval --from @/gpt2 --val-data synthetic", 2, {"--val-data synthetic", "gpt2"}},
        {"sample --from @/gpt2", 2, {"--vocab-dir"}},
        {"export --from @/gpt2 --out @/hf", 2, {"export", "--vocab-dir is missing"}},
        {"sample --from @/gpt2 --vocab-dir @/none", 1, {"@/none"}},
        {"sample --from @/run --prompt x --prompt-file @/train.bin", 2, {"--prompt", "--prompt-file"}},
        {"sample --from @/run --prompt-file @/none", 1, {"@/none"}},
        {"sample --from @/run --prompt-file @/gpt2", 1, {"@/gpt2", "folder"}},
        {"sample --from @/run --interactive --prompt x", 2, {"--interactive", "--prompt"}},
    });
    // What is refused leaves everything as it was.
    CHECK_EQUAL(read_file(file("run/run.json")), options);
    CHECK(!file_exists(file("run/step_00000003")) && !file_exists(file("run.1")));
    REQUIRE_GOOD(run(resume));
}
