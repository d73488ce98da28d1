#!/usr/bin/env python3
"""Makes the corpus of the comparisons: C source of the Linux kernel, as bytes.

    corpus.py CACHE [--program ./train_nsa]

CACHE gets Debian's package, by apt, the text and the shards. Files of at least 8 KB, held out by directory (fs/ext4,
net/ipv4): training and held-out files never share one. The order of the files is that of a hash of their paths, so the
first N bytes are a fair sample of the whole.

    train/c_train_000001.bin ...   2^18 + 1 tokens each, so that each holds 256 samples of 1024
    heldout/c_T_000_val_000000.bin ...   T = 1024, 4096, ...: T tokens from the middle of a held-out file, one a shard
"""
import hashlib
import json
import lzma
import os
import subprocess
import tarfile

from run import parse

# Debian 12's; where Debian has moved on, snapshot.debian.org keeps it, and it may lie in CACHE already.
PACKAGE, VERSION = "linux-source-6.1", "6.1.176-1"
FOLDERS = "block fs io_uring ipc kernel lib mm net security virt".split()
TABLES_OF_NUMBERS = ["fs/nls", "lib/crypto"]
SMALLEST = 8192
SHARD = 1 << 18
HELD_OUT_ONE_IN = 8
LENGTHS = {1024: 256, 4096: 256, 8192: 128, 32768: 32}  # how many files at most


def number_of(text):
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def directory_of(path):
    return "/".join(path.split("/")[:-1][:2])


def is_wanted(path, size):
    if not path.endswith(".c") or size < SMALLEST:
        return False
    return path.split("/")[0] in FOLDERS and directory_of(path) not in TABLES_OF_NUMBERS


def source_files(package):
    """(path, text) of the C files, in the order of the package."""
    unpack = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE)
    with tarfile.open(fileobj=unpack.stdout, mode="r|") as outer:
        sources = next(entry for entry in outer if entry.name.endswith(".tar.xz"))
        with tarfile.open(fileobj=lzma.open(outer.extractfile(sources)), mode="r|") as inner:
            for file in inner:
                path = file.name.partition("/")[2]
                text = inner.extractfile(file).read() if is_wanted(path, file.size) else b""
                if text and text.isascii() and b"\0" not in text:
                    yield path, text.decode()


def tokenize(program, documents, prefix, val_fraction, *options):
    """Writes (name, text) of documents as a file beside the shards' folder, and the shards PREFIX_*.bin."""
    path = f"{os.path.dirname(prefix)}.jsonl"
    os.makedirs(os.path.dirname(prefix), exist_ok=True)
    with open(path, "w") as file:
        for name, text in documents:
            file.write(json.dumps({"file": name, "text": text}) + "\n")
    subprocess.run([program, "tokenize", "--in", path, "--out", prefix, "--tokenizer", "bytes", "--val-fraction",
                    str(val_fraction), *options], check=True)


def keep_first(shard, tokens):
    """Cuts a shard, of which `eval` measures every token but the first."""
    with open(shard, "r+b") as file:
        file.seek(8)
        file.write(tokens.to_bytes(4, "little"))
        file.truncate(1024 + 2 * tokens)


def make_corpus(cache, program):
    os.makedirs(cache, exist_ok=True)
    package = f"{cache}/{PACKAGE}_{VERSION}_all.deb"
    if not os.path.exists(package):
        subprocess.run(["apt-get", "download", f"{PACKAGE}={VERSION}"], cwd=cache, check=True)
    train, held_out = [], []
    for path, text in sorted(source_files(package), key=lambda file: number_of(file[0])):
        (train if number_of(directory_of(path)) % HELD_OUT_ONE_IN else held_out).append((path, text))
    tokenize(program, train, f"{cache}/train/c", 0, "--shard-tokens", str(SHARD + 1))
    for tokens, count in LENGTHS.items():
        size = tokens - 1  # end-of-text makes a document T tokens
        long_enough = [(path, text) for path, text in held_out if len(text) >= 2 * tokens]
        for number, (path, text) in enumerate(long_enough[:count]):
            middle = text[(len(text) - size) // 2:][:size]
            # The beginning of one more document, so that the sample has a last target.
            prefix = f"{cache}/heldout/c_{tokens}_{number:03d}"
            tokenize(program, [(path, middle), ("end", " ")], prefix, 1)
            keep_first(f"{prefix}_val_000000.bin", tokens + 1)


if __name__ == "__main__":
    arguments = parse(__doc__, ["cache"], program="./train_nsa")
    make_corpus(arguments.cache[0], arguments.program)
