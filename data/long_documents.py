#!/usr/bin/env python3
"""Shards of the long documents alone, for trials of attention that reaches far.

    data/long_documents.py SHARDS OUT [--seq-len 8192] [--held-out 2097152]

SHARDS has *_train_*.bin and *_val_*.bin as `train_nsa tokenize` writes them of any text. OUT gets the documents of more
than --seq-len tokens: long_train_000001.bin and, one a shard, long_0000_val_000000.bin and so on, each cut to whole
samples. Held out are all of SHARDS' validation documents, then its first training ones until they have so many tokens,
half of them at most; no document is on both sides.
"""
import argparse
import array
import glob
import os
import sys


def read_documents(pattern):
    """(header, documents of all shards that match; each begins with the token that the first one begins with)."""
    header, tokens = None, array.array("H")
    for path in sorted(glob.glob(pattern)):
        with open(path, "rb") as file:
            header = array.array("i", file.read(1024))
            tokens.frombytes(file.read())
    if not tokens:
        sys.exit(f"long_documents.py: {pattern} has no tokens: expected shards that train_nsa tokenize wrote")
    starts = [0]
    while True:
        try:
            starts.append(tokens.index(tokens[0], starts[-1] + 1))
        except ValueError:
            return header, [tokens[a:b] for a, b in zip(starts, starts[1:] + [len(tokens)])]


def write_shard(path, header, tokens):
    header[2] = len(tokens)
    with open(path, "wb") as file:
        file.write(header.tobytes() + tokens.tobytes())


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("shards")
    arguments.add_argument("out")
    arguments.add_argument("--seq-len", type=int, default=8192)
    arguments.add_argument("--held-out", type=int, default=1 << 21, help="tokens")
    a = arguments.parse_args()
    (header, train), (_, held_out) = (read_documents(f"{a.shards}/*_{split}_*.bin") for split in ("train", "val"))
    train, held_out = ([d for d in documents if len(d) > a.seq_len] for documents in (train, held_out))
    taken = 0
    while taken < len(train) // 2 and sum(map(len, held_out)) < a.held_out:
        held_out.append(train[taken])
        taken += 1
    os.makedirs(a.out, exist_ok=True)
    for i, document in enumerate(held_out):
        whole = (len(document) - 1) // a.seq_len * a.seq_len + 1
        write_shard(f"{a.out}/long_{i:04d}_val_000000.bin", header, document[:whole])
    tokens = array.array("H", b"".join(document.tobytes() for document in train[taken:]))
    write_shard(f"{a.out}/long_train_000001.bin", header, tokens)
    print(f"{len(train) - taken} documents of {len(tokens)} tokens to train on, {len(held_out)} held out")


if __name__ == "__main__":
    main()
