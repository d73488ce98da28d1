#!/usr/bin/env python3
"""Lengthens the context of trained models: what another base of RoPE is worth, by the number of tokens in sight.

    extend.py --cache CACHE --work FOLDER [--length 4096] [--tokens 262144] [--files 64] [--out FILE] RUN...

RUN is a run that run.py has left in FOLDER, or an arm with its rate, as in a result's name up to _seed: then all its
seeds. Each goes on with --tokens bytes that it has not seen, in sequences of --length, for each base of BASES; and, so
that more training is not taken for longer context, in sequences as long as before with the base that it had. Rates are
tried on the first run, doubled or halved until the best one lies inside, for each of these ways by itself; the others
go on at the best, and means are theirs. Losses are those of the held-out files at --length, before and after. It goes on where it was
interrupted when it is started again; a run that was under way begins anew.
"""
import argparse
import fcntl
import glob
import json
import os
import shutil
import subprocess
import sys

from arms import HERE, command_line, read_setting
from run import SEED_OF_RATE, best_rate, folders_of, read_evaluation, some_shards
from table import mean, print_rows

BASES = [10000, 40000, 160000]
RATES = [0.001, 0.002, 0.004]
TOTAL_BATCH = 4096  # or one sequence, where that is longer


def command(words):
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"extend.py: {' '.join(words)}\n{done.stderr}")
    return done.stdout


class Extension:
    def __init__(self, a):
        self.a = a
        self.setting = read_setting(a.setting)
        self.machine = command_line(self.setting["machine"])

    def at_length(self, folder):
        return f"{folder}.at_{self.a.length}_of_{self.a.files}.json"

    def alone(self, folder):
        """A lock, to be closed: several extend.py, of one length or of several, share what they make in a folder."""
        lock = open(f"{folder}.lock", "w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        return lock

    def evaluate(self, folder):
        """The run's losses at --length, kept beside it."""
        path = self.at_length(folder)
        with self.alone(folder):
            if not os.path.exists(path):
                trained = self.setting["model"]["seq-len"]
                held_out = f"{self.a.cache}/{self.setting['held_out']}".replace(f"_{trained}_", f"_{self.a.length}_")
                text = command([self.a.program, "eval", "--from", folder, "--val-data", held_out, "--batch", "1",
                                "--eval-batches", str(self.a.files), "--seq-len", str(self.a.length)] + self.machine)
                with open(path + ".new", "w") as file:
                    json.dump(read_evaluation(text), file)
                os.rename(path + ".new", path)
        with open(path) as file:
            return json.load(file)

    def unseen(self, run):
        """The shards behind those that the run was trained on."""
        with open(f"{run}/run.json") as file:
            seen = len(glob.glob(json.load(file)["data"]))
        return some_shards(self.a.cache, self.setting, self.a.tokens, seen)

    def lengthen(self, run, length, base, rate):
        """The held-out losses of the run that goes on so."""
        os.makedirs(f"{self.a.work}/extended", exist_ok=True)
        way = f"T{length}_base{base}_lr{rate:g}_tokens{self.a.tokens}"
        folder = f"{self.a.work}/extended/{os.path.basename(run)}_{way}"
        total = max(TOTAL_BATCH, length)
        steps = self.a.tokens // total
        with self.alone(folder):
            if not os.path.exists(f"{folder}/step_{steps:08d}"):  # its last checkpoint
                options = {"init-from": run, "out": folder, "seq-len": length, "rope-base": base, "batch": 1,
                           "data": self.unseen(run), "total-batch": total, "steps": steps,
                           "warmup": 5, "lr": rate, "optimizer": "muon", "sample-tokens": 0, "keep": 1}
                shutil.rmtree(folder, ignore_errors=True)
                command([self.a.program] + command_line(options) + self.machine)
        return self.evaluate(folder)


class Way:
    """The losses at other rates of one run that goes on in one way, as best_rate() asks for them."""

    def __init__(self, extension, run, length, base):
        self.name = f"T = {length}, base {base}"
        self.lengthen = lambda rate: extension.lengthen(run, length, base, rate)["held_out_loss"]

    def loss(self, run):
        return self.lengthen(run.rate)

    def sweep(self, tokens):
        """The best rate, and the loss at each that was tried."""
        best, runs = best_rate(self.name, RATES, SEED_OF_RATE, tokens, self)
        losses = {run.rate: self.loss(run) for run in runs}
        print(f"{self.name}: " + ", ".join(f"{rate:g}: {losses[rate]:.4f}" for rate in sorted(losses)), flush=True)
        return best, losses


def row(name, rate, evaluations):
    evaluations = evaluations[1:] or evaluations  # the first one chose the rate
    losses = [e["held_out_loss"] for e in evaluations]
    by_position = zip(*([loss for _, _, loss in e["by_position"]] for e in evaluations))
    return [name, f"{rate:g}" if rate else "", f"**{mean(losses):.4f}**",
            ", ".join(f"{loss:.4f}" for loss in losses)] + [f"{mean(l):.3f}" for l in by_position]


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--cache", required=True, help="corpus.py's folder")
    arguments.add_argument("--work", required=True, help="run.py's folder of runs")
    arguments.add_argument("--setting", default=f"{HERE}/small.json")
    arguments.add_argument("--program", default="./train_nsa")
    arguments.add_argument("--length", type=int, default=4096)
    arguments.add_argument("--tokens", type=int, default=262144)
    arguments.add_argument("--files", type=int, default=64, help="held out; the first so many")
    arguments.add_argument("--out", help="a JSON of all losses")
    arguments.add_argument("runs", nargs="+", metavar="RUN")
    a = arguments.parse_args()
    a.cache, a.work = os.path.abspath(a.cache), os.path.abspath(a.work)
    runs = [folder for name in a.runs for folder in folders_of(name, a.work)]
    extension = Extension(a)
    trained = extension.setting["model"]["seq-len"]
    results = {"before": {"runs": [extension.evaluate(run) for run in runs]}}
    for length, base in [(trained, BASES[0])] + [(a.length, base) for base in BASES]:
        way = Way(extension, runs[0], length, base)
        rate, losses = way.sweep(a.tokens)
        results[way.name] = {
            "rate": rate, "rates": {f"{r:g}": loss for r, loss in losses.items()},
            "runs": [extension.lengthen(run, length, base, rate) for run in runs]}
    ranges = [f"{first}..{last}" for first, last, _ in results["before"]["runs"][0]["by_position"]]
    print_rows(["way", "rate", "loss", "each run"] + ranges,
               [row(name, result.get("rate"), result["runs"]) for name, result in results.items()])
    if a.out:
        with open(a.out, "w") as file:
            file.write(json.dumps({"runs": a.runs, "length": a.length, "tokens": a.tokens, **results}) + "\n")


if __name__ == "__main__":
    main()
