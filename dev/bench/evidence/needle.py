#!/usr/bin/env python3
"""Looking things up in a text of filler, near and far, in one step and in several.

    needle.py make CACHE [--samples N] [--trials 34] [--lengths 256 512 1024 2048 4096]
    needle.py test --cache CACHE --work FOLDER [--answers results/needle] [--program ./train_nsa] RUN...
    needle.py show [--answers results/needle] ARM...

A document is filler with facts in it, "QT." and "TL.", and questions, "?QT", "??QL": the number of question marks is
the number of hops. A name stands right behind the one that it is asked by, so that with --smear looking up is all that
there is to learn. `make` writes shards for run.py (--setting needle): samples of 1024 bytes
which are one document, or two, four or eight shorter ones, with chains of one to three hops; a question stands
anywhere behind its facts. And items for the test: one question at the end, its facts in one eighth of the text, three
other chains of as many hops anywhere, and four answers to choose from, so that 25 % is guessing. Two and three hops
are asked up to the trained length. `test` appends a line to the answers' runs.jsonl for each run in FOLDER and length,
where none is; RUN may be an arm with its rate, as in a run's name up to _seed, and then is all its seeds. `show` adds
up the seeds: % answered by length and eighth, and by hops.
"""
import argparse
import array
import json
import os
import random
import subprocess
import sys
import tempfile

from corpus import tokenize, write_documents
from run import HERE, Results, folders_of
from table import table_of

HOPS = 3
CHOICES = 4
EIGHTHS = 8
TRAINED = 1024
# Bytes of the documents of a sample, each behind an end-of-text, and how many chains one has at most.
SAMPLES = [([1023], 8), ([511] * 2, 8), ([255] * 4, 4), ([127] * 8, 4)]
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
# RULER's noise (arXiv 2404.06654), which is soon learnt, so that what is left to learn is to look up.
FILLER = "the grass is green. the sky is blue. the sun is yellow. here we go. there and back again. "


def make_chains(count, hops, generator):
    """As many lists of hops + 1 names, fewer where there are not enough letters."""
    count = min(count, len(LETTERS) // (hops + 1))
    names = generator.sample(LETTERS, count * (hops + 1))
    return [names[i::count] for i in range(count)]


def facts_of(chain):
    return [f"{key}{value}." for key, value in zip(chain, chain[1:])]


def filler(size, generator):
    """From the beginning of a sentence on, and round."""
    text = generator.choice([FILLER[i:] + FILLER[:i] for i in range(len(FILLER)) if FILLER[i - 2] == "."])
    return (text * (size // len(text) + 1))[:size]


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


def training_document(length, most_chains, generator):
    """Facts in a random order, and each question twice, as far as there is room, somewhere behind its facts."""
    facts, questions = [], []
    for chain in make_chains(most_chains, generator.randint(1, HOPS), generator):
        at = [generator.random() for _ in chain[1:]]  # of its facts
        facts += zip(at, facts_of(chain))
        for start in range(len(chain) - 1):
            for end in range(start + 1, len(chain)):
                text = f"{'?' * (end - start)}{chain[start]}{chain[end]}"
                questions += [(generator.uniform(max(at[start:end]), 1.2), text) for _ in range(2)]
    generator.shuffle(questions)
    room = 0.9 * length - sum(room_of(text) for _, text in facts)
    while sum(room_of(text) for _, text in questions) > room:
        questions.pop()
    return join([text for _, text in sorted(facts + questions)], length, generator)


def item(length, eighth, hops, generator):
    """A question whose facts lie in one eighth of the text, and four answers."""
    asked, *others = make_chains(CHOICES, hops, generator)
    question = f"{'?' * hops}{asked[0]}"
    body = length - len(question) - 2
    parts = [[] for _ in range(EIGHTHS)]
    parts[eighth] = facts_of(asked)
    for fact in [fact for chain in others for fact in facts_of(chain)]:
        fits = [part for part in parts if sum(map(room_of, part + [fact])) <= body // EIGHTHS]
        generator.choice(fits).append(fact)
    text = ""
    for i, part in enumerate(parts):
        generator.shuffle(part)
        text += join(part, body * (i + 1) // EIGHTHS - len(text), generator)
    endings = [asked[-1]] + [chain[-1] for chain in others]
    generator.shuffle(endings)
    return {"text": text + " " + question, "endings": endings, "label": endings.index(asked[-1]), "eighth": eighth,
            "hops": hops}


def write_choices(path, items):
    """As the header of lib/data/multiple_choice.h describes llm.c's form, in which no blank precedes an ending."""
    rows = []
    for number, one in enumerate(items):
        row = array.array("H", [number, one["label"], len(one["endings"])])
        for text in ["\0" + one["text"]] + one["endings"]:  # token 0, end-of-text, stands before every document
            row.extend([len(text), *text.encode()])
        rows.append(array.array("H", [65535, 2 * (len(row) + 2)]) + row)
    header = [20240522, 1, len(rows), 2 * max(map(len, rows))]
    with open(path, "wb") as file:
        array.array("i", header + [0] * (256 - len(header))).tofile(file)
        for row in rows:
            row.tofile(file)


def make(a):
    os.makedirs(a.cache, exist_ok=True)
    for split, count, seed in (("train", a.samples, 1), ("held_out", 64, 2)):
        generator = random.Random(seed)
        documents = []
        for lengths, most_chains in (generator.choice(SAMPLES) for _ in range(count)):
            documents += [training_document(length, most_chains, generator) for length in lengths]
        write_documents(f"{a.cache}/{split}.jsonl", [(str(i), text) for i, text in enumerate(documents + [" "])])
        tokenize(a.program, f"{a.cache}/{split}.jsonl", f"{a.cache}/{split}/needle",
                 ["--val-fraction", "0" if split == "train" else "1"])
    generator = random.Random(3)
    for length in a.lengths:
        items = []
        for eighth in range(EIGHTHS):
            for hops in range(1, HOPS + 1 if length <= TRAINED else 2):
                trials = a.trials if hops == 1 else a.trials // 2
                items += [item(length, eighth, hops, generator) for _ in range(trials)]
        write_choices(f"{a.cache}/items_{length}.bin", items)  # the .jsonl says which cell each belongs to
        with open(f"{a.cache}/items_{length}.jsonl", "w") as file:
            file.writelines(json.dumps(one) + "\n" for one in items)


def count_answers(a, folder, path, length):
    """(length, eighth, hops) -> [answered, asked]."""
    cells = {}
    with tempfile.TemporaryDirectory() as temporary:
        out = f"{temporary}/choices"
        command = [a.program, "eval", "--from", folder, "--hellaswag", path + ".bin", "--json", out, "--seq-len",
                   str(length + 8), "--threads", "1", "--device", "cpu", "--cpu-dtype", "bf16", "--batch", "1"]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        with open(path + ".jsonl") as items, open(out) as found:
            for one, answer in zip(map(json.loads, items), map(json.loads, found)):
                cell = cells.setdefault((length, one["eighth"], one["hops"]), [0, 0])
                cell[0] += answer["by_loss"] == one["label"]
                cell[1] += 1
    return cells


def test(a):
    lengths = sorted(int(name[6:-4]) for name in os.listdir(a.cache) if name.endswith(".bin"))
    if not lengths:
        sys.exit(f"needle.py: {a.cache} has no items_*.jsonl: run needle.py make {a.cache}")
    answers = Results(a.answers)
    folders = [folder for run in a.runs for folder in folders_of(run, a.work)]
    for length, folder in [(length, folder) for length in lengths for folder in folders]:
        name = os.path.basename(folder)
        if f"{name}_{length}" in answers.all():
            continue
        cells = count_answers(a, folder, f"{a.cache}/items_{length}", length)
        answers.add({"name": f"{name}_{length}", "run": name,
                     "cells": [[*key, *cell] for key, cell in cells.items()]})
        print(f"{name}, {length} bytes: {percent(cells.items())} % answered", flush=True)


def percent(cells):
    """Of (key, [answered, asked]); - of none."""
    cells = list(cells)
    asked = sum(cell[1] for _, cell in cells)
    return f"{100 * sum(cell[0] for _, cell in cells) / asked:.0f}" if asked else "-"


def load(answers, arm):
    """(the cells of each run, those of all together)."""
    of_run = {}
    for found in Results(answers).beginning(arm):
        if "cells" not in found:
            continue
        of_run.setdefault(found["run"], {}).update({tuple(cell[:3]): cell[3:] for cell in found["cells"]})
    if not of_run:
        sys.exit(f"needle.py: {answers} has no {arm}: run needle.py test")
    least = min(len(run) for run in of_run.values())  # the lengths that all runs have
    runs = [{key: run[key] for key in sorted(run)[:least]} for run in of_run.values()]
    return runs, {key: [sum(run[key][i] for run in runs) for i in range(2)] for key in runs[0]}


def print_tables(name, runs, cells):
    asked = max(cell[1] for cell in cells.values())
    rows = []
    for length in sorted({key[0] for key in cells}):
        of_length = {key: cell for key, cell in cells.items() if key[0] == length}
        row = [percent((k, v) for k, v in of_length.items() if k[1:] == (i, 1)) for i in range(EIGHTHS)]
        for hops in range(1, HOPS + 1):
            row.append(percent((k, v) for k, v in of_length.items() if k[2] == hops))
            seeds = [percent((k, v) for k, v in run.items() if k[0] == length and k[2] == hops) for run in runs]
            if len(runs) > 1 and row[-1] != "-":
                row[-1] += f" ({min(seeds, key=int)} to {max(seeds, key=int)})"
        rows.append([str(length), *row])
    head = ["length", *(f"{i + 1}/8" for i in range(EIGHTHS)), "1 hop", "2 hops", "3 hops"]
    print(f"\n`{name}`, {len(runs)} seeds, up to {asked} trials a cell, % answered\n\n{table_of(head, rows)}")


def show(a):
    for arm in a.runs:
        print_tables(arm, *load(a.answers, arm))


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = arguments.add_subparsers(required=True)
    of_make, of_test, of_show = verbs.add_parser("make"), verbs.add_parser("test"), verbs.add_parser("show")
    of_make.add_argument("cache")
    of_make.add_argument("--samples", type=int, default=8192)
    of_make.add_argument("--trials", type=int, default=34, help="for each length and eighth; three seeds have 102")
    of_make.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096])
    of_make.set_defaults(do=make)
    of_test.add_argument("--cache", required=True)
    of_test.add_argument("--work", required=True)
    of_test.set_defaults(do=test)
    of_show.set_defaults(do=show)
    for verb in (of_make, of_test):
        verb.add_argument("--program", default="./train_nsa")
    for verb in (of_test, of_show):
        verb.add_argument("runs", nargs="+")
        verb.add_argument("--answers", default=f"{HERE}/results/needle")
    a = arguments.parse_args()
    a.do(a)


if __name__ == "__main__":
    main()
