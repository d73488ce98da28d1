#!/usr/bin/env python3
"""test_choices.py: `train_nsa eval --hellaswag` item by item against an evaluation of the exported model in PyTorch.

    python3 dev/test_choices.py [--program ./train_nsa] [--file FILE.jsonl] [--vocab-dir DIR] [--items N] [--keep DIR]

Trains small models for some steps, exports them, and lets transformers answer the same questions: every ending alone
behind its context, tokenised by the exported tokenizer, in fp32, with sums in fp64. Compares the loss of every ending,
and the ending chosen, by loss and by loss per token; where two endings are so close that rounding decides, the choice
is a tie and is counted as such. Prints a line for each comparison; exit status 1 if one fails. Without --file the
questions are made from the documents in dev/: which of four texts goes on. --vocab-dir: GPT-2's vocabulary, for which
an invented one of the same size stands in otherwise. --keep: leaves the runs and exports in this folder.

Needs transformers, torch, safetensors and numpy (pip install them). Three minutes on two cores.
"""

import argparse
import json
import os
import random
import sys
import tempfile

import test_export
from test_export import HERE, MODELS, AutoTokenizer, Program, invent_vocabulary, load, logging, report, torch

# Relative, of an ending's loss: 24 bits a number, sums of up to a thousand of them, some fifty layers' worth of arrays.
LIMIT = 1e-4
CHOSEN = ("nsa, trained", "nsa, one head a group", "full", "nsa, gpt2")
SEQ_LEN = 256  # of those that are trained here; longer questions lose their beginning


def make_questions(path, count):
    """Words of the documents as contexts, what follows and three other places as endings; some longer than SEQ_LEN."""
    words = []
    for name in ("LOG.md", "MODEL.md"):
        words += open(os.path.join(HERE, name), encoding="utf-8").read().split()
    draw = random.Random(3)
    with open(path, "w", encoding="utf-8") as file:
        for i in range(count):
            length = draw.choice((1, 8, 20, 40) if i % 10 else (200,))
            at = draw.randrange(len(words) - 400)
            ends = [at + length] + [draw.randrange(len(words) - 20) for _ in range(3)]
            endings = [" ".join(words[end:end + draw.randint(1, 12)]) for end in ends]
            label = draw.randrange(4)
            endings[0], endings[label] = endings[label], endings[0]
            if i == 7:  # the first of equals counts
                endings[3] = endings[2]
            context = " ".join(words[at:at + length]) + (" \u4f60\u597d" if i % 7 == 3 else "")
            item = {"ind": i, "ctx": context, "endings": endings, "label": label}
            file.write(json.dumps(item, ensure_ascii=i % 2 == 0) + "\n")


def answer(model, tokenizer, question, seq_len):
    """-> losses and numbers of tokens of the endings, each in a pass of its own."""
    losses, tokens = [], []
    context = tokenizer(question["ctx"]).input_ids
    for ending in question["endings"]:
        ids = tokenizer(" " + ending).input_ids
        row = (context + ids)[-seq_len:]
        count = min(len(ids), len(row) - 1)
        with torch.no_grad():
            logits = model(torch.tensor([row[:-1]])).logits[0, -count:].double()
        target = torch.tensor(row[-count:])
        losses.append(-logits.log_softmax(-1).gather(1, target[:, None]).sum().item())
        tokens.append(count)
    return losses, tokens


def compare(name, program, run, export, file, seq_len):
    model = load(program.file(export))
    tokenizer = AutoTokenizer.from_pretrained(program.file(export), trust_remote_code=True)
    items = program.file(export + ".items")
    out = program("eval", "--from", run, "--hellaswag", file, "--json", items).decode().strip()
    ours = [json.loads(line) for line in open(items)]
    questions = [json.loads(line) for line in open(file, encoding="utf-8") if line.strip()]
    worst, close, ties, differ, right = 0.0, True, {}, {}, {"by_loss": 0, "by_loss_per_token": 0}
    same_items = len(ours) == len(questions)
    for question, item in zip(questions, ours):
        losses, tokens = answer(model, tokenizer, question, seq_len)
        same_items = same_items and tokens == item["tokens"] and int(question["label"]) == item["label"]
        errors = [abs(a - b) / max(1, b) for a, b in zip(item["losses"], losses)]
        worst, close = max(worst, *errors), close and all(error < LIMIT for error in errors)  # max passes over NaN
        for kind, score in (("by_loss", losses), ("by_loss_per_token", [x / n for x, n in zip(losses, tokens)])):
            best = min(range(len(score)), key=score.__getitem__)
            right[kind] += best == int(question["label"])
            if item[kind] == best:
                continue
            tie = score[item[kind]] - score[best] <= 2 * LIMIT * max(1, score[best])
            (ties if tie else differ).setdefault(kind, []).append(item["item"])
    report(same_items, f"{name}: {len(ours)} items, the same tokens in every ending")
    report(close, f"{name}: losses of the endings differ by at most {worst:.1e} of themselves")
    for kind in right:
        report(kind not in differ, f"{name}: {kind}: the same ending in {len(ours) - len(ties.get(kind, []))} items of "
               f"{len(ours)}, ties {ties.get(kind, [])}, others {differ.get(kind, [])}; PyTorch has"
               f" {right[kind] / len(ours):.4f}")
    said = "hellaswag {:.4f} by loss per token, {:.4f} by loss".format(
        right["by_loss_per_token"] / len(ours), right["by_loss"] / len(ours))
    report(said in out or ties, f"{name}: the program says: {out.split(': ', 1)[-1]}")


def test(program, file, vocab_dir, count):
    if not vocab_dir:
        vocab_dir = program.file("vocabulary")
        invent_vocabulary(vocab_dir)
    if not file:
        file = program.file("questions.jsonl")
        make_questions(file, count)
    text = "".join(open(os.path.join(HERE, name), encoding="utf-8").read() for name in ("MODEL.md", "GUIDE.md"))
    with open(program.file("text.txt"), "w", encoding="utf-8") as out:
        out.write(text)
    for name in CHOSEN:
        options = MODELS[name].replace("--steps 800", "--steps 300").replace("--seq-len 64", f"--seq-len {SEQ_LEN}")
        run, export = (kind + "/" + name.replace(", ", "_").replace(" ", "_") for kind in ("runs", "exports"))
        kind = "gpt2" if "gpt2" in options else "bytes"
        vocabulary = ["--tokenizer", kind] + (["--vocab-dir", vocab_dir] if kind == "gpt2" else [])
        if not os.path.exists(program.file(kind + "_train_000001.bin")):
            program("tokenize", "--in", "text.txt", "--out", kind, "--val-fraction", "0", *vocabulary)
        program(*options.split(), "--out", run, "--eval-every", "0", "--sample-tokens", "0", "--data",
                kind + "_train_*.bin", *vocabulary[2:])
        program("export", "--from", run, "--out", export)
        compare(name, program, run, export, file, SEQ_LEN)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--program", default="./train_nsa")
    parser.add_argument("--file")
    parser.add_argument("--vocab-dir")
    parser.add_argument("--items", type=int, default=200)
    parser.add_argument("--keep")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    paths = [os.path.abspath(path) if path else None for path in (arguments.file, arguments.vocab_dir)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or temporary
        os.makedirs(folder, exist_ok=True)
        test(Program(arguments.program, folder), *paths, arguments.items)
    print(f"{test_export.failures} failed" if test_export.failures else "all is the same")
    sys.exit(test_export.failures > 0)


if __name__ == "__main__":
    main()
