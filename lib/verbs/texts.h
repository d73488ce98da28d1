// texts.h: the verbs `vocabulary` and `tokenize`, which need no model.
#pragma once
#include "../data/bpe_trainer.h"
#include "../data/tokenize.h"
#include "../run/options.h"

// vocabulary or tokenize.
inline void run_on_texts(const Config& c, Verb verb) {
    TokenizeOptions o;
    static_cast<TokenizeConfig&>(o) = c;
    o.out = c.out;
    o.seed = uint64_t(c.seed);
    o.vocab_dir = c.vocab_dir;
    o.threads = int(c.threads ? c.threads : usable_processors());
    if (!c.tokenizer.empty()) o.tokenizer = c.tokenizer;
    if (verb == VOCABULARY) train_vocabulary(o);
    else tokenize_files(o);
}
