#!/usr/bin/env python3
"""The floor of what counts as learning: an n-gram with interpolation (Witten-Bell) on the tokens of a run.

    ngram.py --cache CACHE [--setting small] [--tokens 1048576] [--longest 7]

Appends the held-out loss, nats per token, for n = 1 .. 7 tokens (0 .. 6 of context) to runs.jsonl. The tokens are those
that a run of so many reads, its end-of-text among them; without --tokens that of the setting. One order is counted at a
time, and only behind contexts that the held-out text has: 32 million of GPT-2's take 10 GB for n = 4.
"""
import glob
import math
from collections import Counter

from run import VOCABULARY, Results, parse, read_setting, some_shards

HEADER = 1024
WIDTH = 2  # bytes of a token


def shards_of(pattern):
    """The tokens of each shard, WIDTH bytes each."""
    for path in sorted(glob.glob(pattern)):
        with open(path, "rb") as file:
            yield file.read()[HEADER:]


def grams_of(text, n, first=0):
    """Each n-gram and its context, from token `first` on."""
    for at in range(first * WIDTH, len(text) - n * WIDTH + 1, WIDTH):
        yield text[at:at + n * WIDTH], text[at:at + (n - 1) * WIDTH]


def losses(train, held_out, samples_of, longest, vocabulary):
    """By order, over the targets of the samples that the trainer's evaluation reads, each without what stands before
    its sample."""
    samples = [text[i * samples_of * WIDTH:((i + 1) * samples_of + 1) * WIDTH] for text in held_out
               for i in range((len(text) // WIDTH - 1) // samples_of)]
    p = [[1 / vocabulary] * samples_of for _ in samples]
    for n in range(1, longest + 1):
        asked = [list(grams_of(sample, n)) for sample in samples]  # the last ones end with the targets
        wanted = {context for grams in asked for _, context in grams}
        # All orders count the same targets: those that have `longest` tokens.
        counts = Counter(gram for gram, context in grams_of(train, n, longest - n) if context in wanted)
        seen, distinct = Counter(), Counter()
        for gram, count in counts.items():
            seen[gram[:-WIDTH]] += count
            distinct[gram[:-WIDTH]] += 1
        for grams, of_sample in zip(asked, p):
            for i, (gram, context) in enumerate(grams[-samples_of:], max(0, n - 2)):
                if seen[context]:
                    more = distinct[context]
                    of_sample[i] = (counts[gram] + more * of_sample[i]) / (seen[context] + more)
        yield -sum(math.log(one) for of_sample in p for one in of_sample) / len(p) / samples_of


def main():
    a = parse(__doc__, cache=None, setting="small", results="", tokens=0, longest=7)
    setting = read_setting(a.setting)
    tokens, T = a.tokens or setting["tokens"], setting["model"]["seq-len"]
    train = b"".join(shards_of(some_shards(a.cache, setting, tokens)))
    held_out = list(shards_of(f"{a.cache}/{setting['held_out']}"))
    found = enumerate(losses(train, held_out, T, a.longest, VOCABULARY[setting["model"]["tokenizer"]]), 1)
    Results(a.results).add({"name": f"ngram_tokens{tokens}", "tokens": len(train) // WIDTH, "seq_len": T,
                            "loss_by_order": {str(n): round(loss, 4) for n, loss in found}})


if __name__ == "__main__":
    main()
