#!/usr/bin/env python3
"""Makes the corpus of the comparisons: C source of the Linux kernel, as bytes.

    corpus.py CACHE [--program ./train_nsa]
    corpus.py CACHE --text FILE [--program ./train_nsa]      of a text of one's own instead; its last tenth is held out

CACHE gets Debian's package, the text and the shards; nothing is written elsewhere. Files of at least 8 KB, held out by
directory (fs/ext4, net/ipv4): training and held-out files never share one. The order of the files is that of a hash
of their paths, so the first N bytes are a fair sample of the whole.

    train/c_train_000001.bin ...   2^18 + 1 tokens each, so that each holds 256 samples of 1024
    heldout/c_T_000_val_000000.bin ...   T = 1024, 4096, ...: T tokens from the middle of a held-out file, one a shard

A text is one document: train/text_train_000001.bin and heldout/text_val_000000.bin.
"""
import argparse
import hashlib
import json
import lzma
import os
import subprocess
import sys
import tarfile

PACKAGE = "linux-source-6.1"
VERSION = "6.1.176-1"
SHA256 = "9305d1a151b8e83dcb88aa11361e7b9513f0c252bdf7f5647e4542762d99c094"
FOLDERS = "block fs io_uring ipc kernel lib mm net security virt".split()
TABLES_OF_NUMBERS = ["fs/nls", "lib/crypto"]
SMALLEST = 8192
SHARD = 1 << 18
HELD_OUT_ONE_IN = 8
LENGTHS = {1024: 256, 4096: 256, 8192: 128, 32768: 32}  # how many files at most


def fetch(cache):
    """The package's file, which apt fetches where it is not there yet."""
    path = f"{cache}/{PACKAGE}_{VERSION}_all.deb"
    if not os.path.exists(path):
        done = subprocess.run(["apt-get", "download", f"{PACKAGE}={VERSION}"], cwd=cache)
        if done.returncode:
            sys.exit(f"corpus.py: apt has no {PACKAGE}={VERSION} here. It is part of Debian 12; where Debian has moved "
                     f"on, snapshot.debian.org keeps it: put that file at {path} and start again.")
    with open(path, "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != SHA256:
            sys.exit(f"corpus.py: {path} is not the package of these results (expected sha256 {SHA256}): remove it")
    return path


def number_of(text):
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def directory_of(path):
    return "/".join(path.split("/")[:-1][:2])


def is_held_out(path):
    return number_of(directory_of(path)) % HELD_OUT_ONE_IN == 0


def is_wanted(path, size):
    if not path.endswith(".c") or size < SMALLEST:
        return False
    return path.split("/")[0] in FOLDERS and directory_of(path) not in TABLES_OF_NUMBERS


def source_files(package):
    """(path, text) of the C files, in the order of the package."""
    unpack = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE)
    with tarfile.open(fileobj=unpack.stdout, mode="r|") as outer:
        for entry in outer:
            if not entry.name.endswith(".tar.xz"):
                continue
            with tarfile.open(fileobj=lzma.open(outer.extractfile(entry)), mode="r|") as inner:
                for file in inner:
                    path = file.name.partition("/")[2]
                    if not is_wanted(path, file.size):
                        continue
                    text = inner.extractfile(file).read()
                    if text.isascii() and b"\0" not in text:
                        yield path, text.decode()


def write_documents(path, documents):
    with open(path, "w") as file:
        for name, text in documents:
            file.write(json.dumps({"file": name, "text": text}) + "\n")


def tokenize(program, text, prefix, options):
    subprocess.run([program, "tokenize", "--in", text, "--out", prefix, "--tokenizer", "bytes"] + options, check=True)


def slices(files, tokens, count):
    """The middle of each of the first `count` files that are long enough: end-of-text makes a document T tokens."""
    size = tokens - 1
    long_enough = [(path, text) for path, text in files if len(text) >= 2 * tokens][:count]
    return [(path, text[(len(text) - size) // 2:][:size]) for path, text in long_enough]


def split_sources(cache, program):
    """Writes the shards of the kernel's source; returns what corpus.json says of them."""
    files = sorted(source_files(fetch(cache)), key=lambda file: number_of(file[0]))
    held_out = [file for file in files if is_held_out(file[0])]
    train = [file for file in files if not is_held_out(file[0])]
    write_documents(f"{cache}/train.jsonl", train)
    tokenize(program, f"{cache}/train.jsonl", f"{cache}/train/c",
             ["--val-fraction", "0", "--shard-tokens", str(SHARD + 1)])
    for tokens, count in LENGTHS.items():
        for number, document in enumerate(slices(held_out, tokens, count)):
            # One more document, so that the sample has a last target.
            write_documents(f"{cache}/heldout.jsonl", [document, ("end", " ")])
            tokenize(program, f"{cache}/heldout.jsonl", f"{cache}/heldout/c_{tokens}_{number:03d}",
                     ["--val-fraction", "1"])
    return {
        "package": f"{PACKAGE}={VERSION}",
        "train_files": len(train),
        "train_bytes": sum(len(text) for _, text in train),
        "held_out_files": len(held_out),
        "held_out_directories": sorted({directory_of(path) for path, _ in held_out}),
    }


def split_text(path, cache, program):
    """Writes both parts as shards; returns what corpus.json says of them."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    cut = len(text) * 9 // 10
    facts = {"text": os.path.basename(path)}
    for part, words, fraction in (("train", text[:cut], 0), ("heldout", text[cut:], 1)):
        write_documents(f"{cache}/{part}.jsonl", [(path, words)])
        tokenize(program, f"{cache}/{part}.jsonl", f"{cache}/{part}/text", ["--val-fraction", str(fraction)])
        facts[f"{part}_bytes"] = len(words.encode())
    return facts


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("cache")
    arguments.add_argument("--program", default="./train_nsa")
    arguments.add_argument("--text", metavar="FILE", help="UTF-8")
    a = arguments.parse_args()
    os.makedirs(a.cache, exist_ok=True)
    if os.path.exists(f"{a.cache}/corpus.json"):
        return
    facts = split_text(a.text, a.cache, a.program) if a.text else split_sources(a.cache, a.program)
    with open(f"{a.cache}/corpus.json", "w") as file:
        json.dump(facts, file, indent=1)
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
