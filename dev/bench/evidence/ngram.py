#!/usr/bin/env python3
"""The floor of what counts as learning: an n-gram with interpolation (Witten-Bell) on the bytes of a run.

    ngram.py CACHE --train 'train/c_train_00000[12].bin' --held-out heldout/c_1024_val_000000.bin --out FILE

Prints and writes the held-out loss, nats per byte, for n = 1 .. 7 bytes (0 .. 6 bytes of context). The tokens are
those that a run of the trainer reads, its end-of-text among them.
"""
import argparse
import array
import glob
import json
import math
from collections import Counter

LONGEST = 7
HEADER = 1024


def tokens_of(pattern):
    """The tokens of all shards that match, as bytes: a vocabulary of 256 needs no more."""
    text = b""
    for path in sorted(glob.glob(pattern)):
        shard = array.array("H")
        with open(path, "rb") as file:
            shard.frombytes(file.read()[HEADER:])
        text += bytes(shard.tolist())
    return text


class Ngrams:
    """Counts of one order: of each n-gram, and, of each context, how many bytes follow it, all and distinct ones."""

    def __init__(self, counts):
        self.counts = counts
        self.all = Counter()
        self.distinct = Counter()
        for gram, count in counts.items():
            self.all[gram[:-1]] += count
            self.distinct[gram[:-1]] += 1

    def shorter(self):
        """Of the next lower order. The text's first bytes, which no longer n-gram ends with, hardly count."""
        counts = Counter()
        for gram, count in self.counts.items():
            counts[gram[1:]] += count
        return Ngrams(counts)

    def probability(self, gram, below):
        """Of gram's last byte behind its others; `below` is that of the order below."""
        seen = self.all[gram[:-1]]
        if not seen:
            return below
        new = self.distinct[gram[:-1]]
        return (self.counts[gram] + new * below) / (seen + new)


def orders(text):
    """From one byte to LONGEST."""
    longest = Ngrams(Counter(text[i:i + LONGEST] for i in range(len(text) - LONGEST + 1)))
    found = [longest]
    while len(found) < LONGEST:
        found.insert(0, found[0].shorter())
    return found


def losses(train, held_out, samples_of):
    """By order, over the targets of the samples that the trainer's evaluation reads, each without what stands before
    its sample."""
    models = orders(train)
    total = [0.0] * LONGEST
    samples = (len(held_out) - 1) // samples_of
    for sample in range(samples):
        text = held_out[sample * samples_of:(sample + 1) * samples_of + 1]
        for i in range(1, len(text)):
            p = 1 / 256
            for n, model in enumerate(models, 1):
                if n <= i + 1:
                    p = model.probability(text[i + 1 - n:i + 1], p)
                total[n - 1] -= math.log(p)
    return [loss / samples / samples_of for loss in total]


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("cache")
    arguments.add_argument("--train", required=True)
    arguments.add_argument("--held-out", required=True)
    arguments.add_argument("--seq-len", type=int, default=1024)
    arguments.add_argument("--out", required=True)
    a = arguments.parse_args()
    train = tokens_of(f"{a.cache}/{a.train}")
    held_out = tokens_of(f"{a.cache}/{a.held_out}")
    found = losses(train, held_out, a.seq_len)
    result = {"train": a.train, "tokens": len(train), "held_out": a.held_out, "seq_len": a.seq_len,
              "loss_by_order": {str(n): round(loss, 4) for n, loss in enumerate(found, 1)}}
    with open(a.out, "w") as file:
        file.write(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
