#!/usr/bin/env python3
"""Looking things up in a text of filler, near and far, in one step and in several.

    needle.py make CACHE [--documents N] [--trials 100] [--lengths 256 512 1024 2048 4096]
    needle.py test --cache CACHE --work FOLDER [--program ./train_nsa] RUN...

A document is words of filler with facts among them, "QX: TB." and "TB: LM.", and questions, "QX? TB", "QX?? LM": the
number of question marks is the number of hops. `make` writes shards for run.py (--setting needle.json --plan
needle.txt), one document of 1024 bytes after the other, and items for the test: one question at the end, its facts in
one eighth of the text, three other chains anywhere, and four answers to choose from, so 25 % is guessing. `test` prints
for each run in FOLDER how many of them it answers, by length, by eighth, and by hops.
"""
import argparse
import json
import os
import random
import subprocess
import sys
import tempfile

from corpus import tokenize, write_documents

HOPS = 3
CHAINS = 4
EIGHTHS = 8
QUESTIONS = 10  # in a document of 1024
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
WORDS = "the a king child lamp boat sees finds likes takes red old day and then with under over house field".split()


def names(count, generator):
    found = set()
    while len(found) < count:
        found.add("".join(generator.choices(LETTERS, k=2)))
    return generator.sample(sorted(found), count)


def chains(generator):
    """CHAINS lists of HOPS + 1 names."""
    all_names = names(CHAINS * (HOPS + 1), generator)
    return [all_names[i::CHAINS] for i in range(CHAINS)]


def facts_of(chain):
    return [f"{key}: {value}." for key, value in zip(chain, chain[1:])]


def filler(size, generator):
    text = ""
    while len(text) < size:
        text += generator.choice(WORDS) + " "
    return text[:size]


def room_of(piece):
    return len(piece) + 2


def join(pieces, length, generator):
    """The pieces in their order, filler between them, `length` bytes in all."""
    spare = length - sum(room_of(piece) for piece in pieces)
    cuts = sorted(generator.randrange(spare + 1) for _ in pieces)
    text, at = "", 0
    for piece, cut in zip(pieces, cuts):
        text += filler(cut - at, generator) + f" {piece} "
        at = cut
    return text + filler(spare - at, generator)


def training_document(length, generator):
    """Facts come before the questions that need them."""
    all_chains = chains(generator)
    pieces = [fact for chain in all_chains for fact in facts_of(chain)]
    generator.shuffle(pieces)
    for _ in range(QUESTIONS):
        chain, hops = generator.choice(all_chains), generator.randint(1, HOPS)
        start = generator.randrange(HOPS + 1 - hops)
        pieces.append(f"{chain[start]}{'?' * hops} {chain[start + hops]}")
    return join(pieces, length, generator)


def item(length, eighth, hops, generator):
    """An item in HellaSwag's form; its own fields say which cell it belongs to."""
    asked, *others = chains(generator)
    question = f"{asked[0]}{'?' * hops}"
    body = length - len(question) - 4
    parts = [[] for _ in range(EIGHTHS)]
    parts[eighth] = facts_of(asked)
    for fact in [fact for chain in others for fact in facts_of(chain)]:
        fits = [part for part in parts if sum(map(room_of, part + [fact])) <= body // EIGHTHS]
        generator.choice(fits).append(fact)
    text = ""
    for i, part in enumerate(parts):
        generator.shuffle(part)
        text += join(part, body * (i + 1) // EIGHTHS - len(text), generator)
    endings = [asked[hops]] + [chain[hops] for chain in others]
    generator.shuffle(endings)
    return {"ctx": text + question, "endings": endings, "label": endings.index(asked[hops]), "length": length,
            "eighth": eighth, "hops": hops}


def make(a):
    os.makedirs(a.cache, exist_ok=True)
    for split, count, seed in (("train", a.documents, 1), ("held_out", 64, 2)):
        generator = random.Random(seed)
        documents = [(str(i), training_document(1023, generator)) for i in range(count)] + [("end", " ")]
        write_documents(f"{a.cache}/{split}.jsonl", documents)
        tokenize(a.program, f"{a.cache}/{split}.jsonl", f"{a.cache}/{split}/needle",
                 ["--val-fraction", "0" if split == "train" else "1"])
    generator = random.Random(3)
    for length in a.lengths:
        with open(f"{a.cache}/items_{length}.jsonl", "w") as file:
            for eighth in range(EIGHTHS):
                for trial in range(a.trials):
                    file.write(json.dumps(item(length, eighth, 1 + trial % HOPS, generator)) + "\n")


def answers(a, run, path, length):
    """(item, whether it was answered) of each item."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/choices"
        command = [a.program, "eval", "--from", f"{a.work}/{run}", "--hellaswag", path, "--json", out, "--seq-len",
                   str(length + 8), "--threads", "1", "--device", "cpu", "--batch", "1"]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        with open(path) as items, open(out) as found:
            return [(one, answer["by_loss"] == one["label"])
                    for one, answer in zip(map(json.loads, items), map(json.loads, found))]


def share(results):
    return f"{100 * sum(right for _, right in results) / len(results):.0f}" if results else "-"


def test(a):
    lengths = sorted(int(name[6:-6]) for name in os.listdir(a.cache) if name.startswith("items_"))
    if not lengths:
        sys.exit(f"needle.py: {a.cache} has no items_*.jsonl: run needle.py make {a.cache}")
    for run in a.runs:
        print(f"\n`{run}`, % answered\n\n| length | " + " | ".join(f"{i + 1}/8" for i in range(EIGHTHS)) + " | "
              + " | ".join(f"{hops + 1} hops" for hops in range(HOPS)) + " |\n" + "|---" * (1 + EIGHTHS + HOPS) + "|")
        for length in lengths:
            found = answers(a, run, f"{a.cache}/items_{length}.jsonl", length)
            cells = [share([x for x in found if x[0]["eighth"] == i]) for i in range(EIGHTHS)]
            cells += [share([x for x in found if x[0]["hops"] == hops + 1]) for hops in range(HOPS)]
            print(f"| {length} | " + " | ".join(cells) + " |", flush=True)


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = arguments.add_subparsers(required=True)
    of_make, of_test = verbs.add_parser("make"), verbs.add_parser("test")
    of_make.add_argument("cache")
    of_make.add_argument("--documents", type=int, default=8192)
    of_make.add_argument("--trials", type=int, default=100, help="for each length and eighth")
    of_make.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096])
    of_make.set_defaults(do=make)
    of_test.add_argument("runs", nargs="+")
    of_test.add_argument("--cache", required=True)
    of_test.add_argument("--work", required=True)
    of_test.set_defaults(do=test)
    for verb in (of_make, of_test):
        verb.add_argument("--program", default="./train_nsa")
    a = arguments.parse_args()
    a.do(a)


if __name__ == "__main__":
    main()
