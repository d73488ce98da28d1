#!/usr/bin/env python3
"""Looking things up in a text of filler, near and far, in one step and in several.

    needle.py make --cache CACHE
    needle.py test --cache CACHE --work WORK [--program ./train_nsa] ARM_lrRATE...
    needle.py show

A document is filler with facts in it, "QT." and "TL.", and questions, "?QT", "??QL": the number of question marks is
the number of hops. A name stands right behind the one that it is asked by, so that with --smear looking up is all that
there is to learn. `make` writes shards for run.py --setting needle: samples of 1024 bytes which are one document, or
two, four or eight shorter ones, with questions anywhere behind their facts. And items for the test: one question at the
end, its facts in one eighth of the text, three other chains of as many hops anywhere, and four answers to choose from,
so that 25 % is guessing. `test` appends a line to the results for each seed of a mean in WORK and each length. `show`
adds up the seeds: % answered by length and eighth, and by hops.
"""
import array
import json
import os
import random
import subprocess

from corpus import tokenize
from run import SEEDS, Results, folders_of, parse
from table import print_table

HOPS = 3
CHOICES = 4
EIGHTHS = 8
LENGTHS = [256, 512, 1024, 2048, 4096]
TRAINED = 1024  # two and three hops are asked up to this length
TRIALS = 34  # for each length and eighth, half as many of more hops
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


def room_of(pieces):
    return sum(len(piece) + 2 for piece in pieces)


def join(pieces, length, generator):
    """The pieces in their order, filler between them, `length` bytes in all."""
    spare = length - room_of(pieces)
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
    room = 0.9 * length - room_of(text for _, text in facts)
    while room_of(text for _, text in questions) > room:
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
        fits = [part for part in parts if room_of(part + [fact]) <= body // EIGHTHS]
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
    for split, count, seed in (("train", a.samples, 1), ("held_out", 64, 2)):
        generator = random.Random(seed)
        documents = []
        for lengths, most_chains in (generator.choice(SAMPLES) for _ in range(count)):
            documents += [training_document(length, most_chains, generator) for length in lengths]
        names_and_texts = [(str(i), text) for i, text in enumerate(documents + [" "])]
        tokenize(a.program, names_and_texts, f"{a.cache}/{split}/needle", int(split == "held_out"))
    generator = random.Random(3)
    for length in LENGTHS:
        items = [item(length, eighth, hops, generator) for eighth in range(EIGHTHS)
                 for hops in range(1, HOPS + 1 if length <= TRAINED else 2)
                 for _ in range(TRIALS if hops == 1 else TRIALS // 2)]
        write_choices(f"{a.cache}/items_{length}.bin", items)  # the .jsonl says which cell each belongs to
        with open(f"{a.cache}/items_{length}.jsonl", "w") as file:
            file.writelines(json.dumps(one) + "\n" for one in items)


def test(a):
    """Each cell is [length, eighth, hops, answered, asked]."""
    results = Results(a.results)
    for folder, length in [(folder, length) for folder in folders_of(a.arms, a.work) for length in LENGTHS]:
        run, items, answers = os.path.basename(folder), f"{a.cache}/items_{length}", f"{folder}_{length}.json"
        if os.path.exists(answers):
            continue
        subprocess.run([a.program, "eval", "--from", folder, "--hellaswag", items + ".bin", "--json", answers,
                        "--seq-len", str(length + 8), "--threads", "1", "--device", "cpu", "--cpu-dtype", "bf16",
                        "--batch", "1"], stdout=subprocess.DEVNULL, check=True)
        cells = {}
        with open(items + ".jsonl") as asked, open(answers) as found:
            for one, answer in zip(map(json.loads, asked), map(json.loads, found)):
                cell = cells.setdefault((length, one["eighth"], one["hops"]), [0, 0])
                cell[0] += answer["by_loss"] == one["label"]
                cell[1] += 1
        results.add({"name": f"{run}_{length}", "run": run, "cells": [[*key, *cell] for key, cell in cells.items()]})


def percent(cells):
    answered, asked = (sum(cell[i] for cell in cells) for i in (3, 4))
    return f"{100 * answered / asked:.0f}" if asked else "-"


def show(a):
    of_arms = {}  # ARM_lrRATE -> seed -> cells
    for line in Results(a.results).lines.values():
        arm, _, seed = line.get("run", "").partition("_seed")
        if seed and int(seed[0]) in SEEDS:
            of_arms.setdefault(arm, {}).setdefault(seed, []).extend(line["cells"])
    head = ["length", *(f"{i + 1}/8" for i in range(EIGHTHS)), "1 hop", "2 hops", "3 hops"]
    for arm, seeds in of_arms.items():
        together, rows = sum(seeds.values(), []), []
        for length in sorted({cell[0] for cell in together}):
            row = [percent([c for c in together if c[:3] == [length, eighth, 1]]) for eighth in range(EIGHTHS)]
            for hops in range(1, HOPS + 1):
                all_of_them, *each = [percent([c for c in cells if c[0] == length and c[2] == hops])
                                      for cells in [together, *seeds.values()]]
                row.append(f"{all_of_them} ({', '.join(each)})" if all_of_them != "-" else "-")
            rows.append([str(length), *row])
        print(f"`{arm}`, seeds {SEEDS[0]}, {SEEDS[1]}, % answered\n")
        print_table(head, rows)


if __name__ == "__main__":
    options = parse(__doc__, ["words"], cache="", work="", setting="needle", results="", program="./train_nsa",
                    samples=8192)
    verb, *options.arms = options.words
    {"make": make, "test": test, "show": show}[verb](options)
