#!/usr/bin/env python3
"""The 125M model trained, and arms of attention at T = 8192 beside each other, for whoever has a GPU for some minutes.

    at_125m.py --shards SHARDS --out OUT --vocab-dir GPT2 [--choices FILE.jsonl] [--seconds 300] [--jobs 2] PART...
    at_125m.py --dry-run --out OUT      everything with a tiny model and text on the CPU, in some minutes

SHARDS are GPT-2's tokens of any text: train_nsa tokenize --in TEXT --out SHARDS/text --tokenizer gpt2 --vocab-dir GPT2.

    main    the model at T = 2048: one epoch, validation, a sample, choices, a report, ten more steps, an export
    dense   PyTorch's dense model on the same batches for as many steps
    floor   the best n-gram of the long documents; no GPU, minutes and 10 GB, so before the others
    a       parity of full attention with PyTorch on the same batches, then the setting's arms, as far as there is time
    b       the rest of the arms; then, of all that is there, the tables and what was decided before

--seconds interrupts what has not ended by then; the next call goes on there: what is done is a file in OUT.
"""
import glob
import json
import math
import os
import pathlib
import subprocess
import sys
import time
from statistics import fmean as mean
from statistics import median, stdev

from ngram import HEADER, WIDTH
from run import HERE, SEED_OF_RATE, SEEDS, Arm, Results, command_line, mean_of, parse, read_setting
from table import print_table, with_each

ROOT = os.path.abspath(f"{HERE}/../../..")
PARTS = ["main", "dense", "floor", "a", "b"]
ARMS = {"N": "nsa", "F": "full+kv-groups=12", "H": "alternating+kv-groups=12+window=512",
        "C": "nsa+slc-count=3+window=1384", "A": "interleaved", "W": "window"}
PARITY_TOKENS, PARITY = 15_000_000, 0.01  # nats, at every 100th step
TINY = {"dim": 24, "head-dim": 2, "mlp-hidden": 96, "layers": 4, "phi-hidden": 8, "tokenizer": "bytes", "seq-len": 256}


class Job:
    def __init__(self, a):
        self.a, self.end = a, time.monotonic() + a.seconds
        self.setting = read_setting("at_125m")
        self.machine = {"device": "cuda", "vocab-dir": a.vocab_dir}
        self.main = {"model": "125m", "seq-len": 2048, "batch": 16, "total-batch": 65536}
        if a.dry_run:
            self.make_tiny()

    def make_tiny(self):
        self.machine = {"device": "cpu", "threads": 1}
        self.main = {"tokenizer": "bytes", "seq-len": 64, "batch": 4, "total-batch": 1024}
        self.setting["model"].update(TINY)
        self.setting["training"].update({"batch": 2, "total-batch": 2048, "warmup": 2})
        item = {"ind": 0, "ctx": "the king", "endings": ["sees", "storm", "of", "a"], "label": 0}
        pathlib.Path(self.a.choices).write_text((json.dumps(item) + "\n") * 4)
        os.makedirs(self.a.shards, exist_ok=True)
        self.step("tokenize", "tokenize", "--in", f"{ROOT}/dev/LOG.md", "--out", f"{self.a.shards}/t",
                  "--tokenizer", "bytes", "--val-fraction", "0.1", "--split-documents", "\n## ")

    def step(self, name, *words):
        """Of the program, or a script of Python. True once its output is OUT/NAME.txt; one that is there is not made
        again, one that ends badly is said."""
        path, begin = f"{self.a.out}/{name}.txt", time.monotonic()
        if os.path.exists(path):
            return True
        if begin > self.end:
            return print(f"{name}: left out, no time is left: call this again", flush=True)
        command = [sys.executable, f"{ROOT}/{words[0]}", *words[1:]] if words[0].endswith(".py") else [
            self.a.program, *words]
        with open(path + ".part", "w") as file:
            child = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
            try:
                status = child.wait(self.end - begin)
            except subprocess.TimeoutExpired:
                child.terminate()  # a run saves, and goes on next time
                status = child.wait() or 1
        if not status:
            os.rename(path + ".part", path)
        says = f"status {status}, see {path}.part" if status else "done"
        print(f"{name}: {says} after {time.monotonic() - begin:.0f} s", flush=True)
        return not status

    def train(self, name, options):
        run = f"{self.a.out}/{name}"
        if os.path.exists(f"{run}/run.json"):
            return self.step(name, "--resume", run)
        more = {"seed": SEED_OF_RATE, "save-every": 0, "sample-tokens": 0, **self.machine}
        return self.step(name, "--out", run, *command_line({**options, **more}))

    def part_main(self):
        run, shards = f"{self.a.out}/main", f"{self.a.shards}/*_train_*.bin"
        steps = tokens_of(shards) // self.main["total-batch"]
        options = {**self.main, "steps": steps, "warmup": max(1, min(40, steps // 10)), "lr": 1e-3, "data": shards,
                   "val-data": f"{self.a.shards}/*_val_*.bin", "eval-every": 20, "eval-batches": 6}
        if not self.train("main", options):
            return
        there = ["--from", run, *command_line(self.machine)]
        self.step("sample", "sample", *there, "--tokens", "160", "--prompt", "The history of the city begins")
        if self.a.choices:
            self.step("eval", "eval", *there, "--hellaswag", self.a.choices)
        self.step("report", "report", "--from", run, "--html", f"{self.a.out}/main.html")
        self.step("export", "export", "--from", run, "--out", f"{self.a.out}/main_export")
        self.step("resume", "--resume", run, "--steps", str(steps + 10))

    def part_dense(self):
        self.step("dense", "dev/bench/torch_train.py", f"{self.a.out}/main", "none")

    def make_long_documents(self):
        T = self.setting["model"]["seq-len"]
        self.step("long", "data/long_documents.py", self.a.shards, f"{self.a.out}/long", "--seq-len", str(T),
                  "--held-out", str(256 * T))

    def evidence(self, name, script, *words):
        """A script of the comparisons on the long documents."""
        self.make_long_documents()
        text = json.dumps({**self.setting, "machine": self.machine, "tokens": self.epoch()})
        setting = pathlib.Path(f"{self.a.out}/at_125m.json")
        setting.write_text(text.replace("EPOCH", str(self.epoch())))
        self.step(name, f"dev/bench/evidence/{script}", "--setting", str(setting), "--results",
                  f"{self.a.out}/results", "--cache", f"{self.a.out}/long", *words)

    def epoch(self):
        total = self.setting["training"]["total-batch"]
        return tokens_of(f"{self.a.out}/long/long_train_*.bin") // total * total

    def part_floor(self):
        self.evidence("floor", "ngram.py", "--longest", "4")

    def run_arms(self):
        self.evidence("arms", "run.py", "--work", f"{self.a.out}/work", "--jobs", str(self.a.jobs), "--program",
                      self.a.program)

    def part_a(self):
        self.make_long_documents()
        training = self.setting["training"]
        total = training["total-batch"]
        options = {**Arm(ARMS["F"], self.setting).options, "optimizer": "adamw", "qk-norm": "off",
                   "data": f"{self.a.out}/long/long_train_*.bin"}
        first = {"seq-len": 64, "batch": 1, "total-batch": 64, "steps": 1, "lr": 0, "warmup": 0}
        same = {"batch": training["batch"], "total-batch": total, "warmup": training["warmup"], "lr": 6e-4,
                "steps": min(PARITY_TOKENS, self.epoch()) // total}
        if self.train("parity_first", {**options, **first}) and self.train("parity", {**options, **same}):
            self.step("parity_torch", "dev/bench/torch_train.py", f"{self.a.out}/parity",
                      f"{self.a.out}/parity_first/step_00000001")
        self.run_arms()

    def part_b(self):
        self.run_arms()
        subprocess.run([sys.executable, f"{HERE}/table.py", "--results", f"{self.a.out}/results"])
        self.judge()

    def judge(self):
        """What was decided before any of it was run, beside the figures."""
        path, self.torch_rate = pathlib.Path(f"{self.a.out}/parity_torch.txt"), None
        if not path.exists():
            print("Parity with PyTorch was not tried: nothing of this is to be reported.\n")
        else:
            *lines, last = path.read_text().splitlines()
            seconds = median(float(line.split()[-1]) for line in lines if line.startswith("step "))
            self.torch_rate = self.setting["training"]["total-batch"] / seconds
            print(f"PyTorch's dense model: {self.torch_rate:.0f} tokens/s; {last}")
            if float(last.split()[-1]) > PARITY and not self.a.dry_run:
                return print(f"That is more than {PARITY}, so nothing else is reported.")
        runs = [run for run in Results(f"{self.a.out}/results").of_runs() if run["seed"] in SEEDS]
        arms = {name: [run for run in runs if run["arm"] == arm] for name, arm in ARMS.items()}
        self.print_costs({name: found for name, found in arms.items() if found})
        less = {one + other: self.print_difference(one, other, arms) for one, other in ["NF", "NC", "HN", "AN"]}
        if less["NF"]:
            says("N - F is above +0.02 with both seeds", min(less["NF"]) > 0.02)
            self.print_clock(arms["N"][0], arms["F"][0])
        if less["NC"]:
            says("|N - C| is below 0.005: choosing buys no more than as many near keys", abs(mean(less["NC"])) < 0.005)
        if less["HN"]:
            says("H is at or below N", mean(less["HN"]) <= 0)
        far = {name: [between(run, self.ranges()[-1]) for run in found] for name, found in arms.items() if found}
        if "F" in far and {"H", "W"} & far.keys():
            spread = max(max(losses) - min(losses) for losses in far.values())
            ahead = max(mean(far[name]) - mean(far["F"]) for name in "HW" if name in far)
            says(f"F beats H or W beyond half of the length, by {ahead:+.4f}, by three times what seeds differ by, "
                 f"{spread:.4f}; where it does not, the data says nothing about reach", ahead > 3 * spread)

    def ranges(self):
        T = self.setting["model"]["seq-len"]
        return [(0, T // 16), (T // 16, T // 4), (T // 4, T // 2), (T // 2, T)]

    def print_costs(self, arms):
        print_table(["arm, rate", "seconds", "tokens/s", "GiB"] + [f"{low + 1}..{high}" for low, high in self.ranges()],
                    [[f"{name}: `{ARMS[name]}`, {runs[0]['rate']:g}", f"{mean(run['seconds'] for run in runs):.0f}",
                      f"{mean(run['tokens'] / max(run['seconds'], 0.1) for run in runs):.0f}, "
                      f"{runs[0]['jobs']} at a time", f"{max(run['mib'] for run in runs) / 1024:.1f}",
                      *(f"{mean(between(run, part) for run in runs):.3f}" for part in self.ranges())]
                     for name, runs in arms.items()])

    def print_difference(self, one, other, arms):
        """Of each seed that both have; and paired by document, with 1.96 times its standard error."""
        both = list(zip(arms[one], arms[other]))
        less = [a["held_out_loss"] - b["held_out_loss"] for a, b in both]
        if both:
            documents = [mean(parts) for parts in zip(*(
                [x - y for x, y in zip(a["by_document"], b["by_document"])] for a, b in both))]
            error = 1.96 * stdev(documents) / len(documents) ** 0.5 if len(documents) > 1 else math.nan
            print(f"{one} - {other}: {with_each(less, '+.4f')}; by document {mean(documents):+.4f} +- {error:.4f}")
        return less

    def print_clock(self, nsa, full):
        """When N's training loss reaches the one that F ends with, in seconds of each."""
        reached = [tokens for tokens, loss in nsa["curve"] if loss <= full["curve"][-1][1]]
        when = f"after {reached[0] / nsa['tokens'] * nsa['seconds']:.0f} s" if reached else "never"
        theirs = f", at PyTorch's rate {full['tokens'] / self.torch_rate:.0f} s" if self.torch_rate else ""
        print(f"N reaches the training loss that F ends with {when}; F took {full['seconds']:.0f} s{theirs}.")


def between(run, part):
    """The loss with more than part[0] and up to part[1] tokens in sight."""
    return mean_of([{"loss": loss, "tokens": last - first + 1} for first, last, loss in run["by_position"]
                    if part[0] < last <= part[1]])


def says(sentence, holds):
    print(f"{'Yes' if holds else 'No'}: {sentence}.")


def tokens_of(pattern):
    """All of the shards' together."""
    return sum(os.path.getsize(path) - HEADER for path in glob.glob(pattern)) // WIDTH


def main():
    a = parse(__doc__, ["parts"], shards="", out=None, vocab_dir="", choices="", program="./train_nsa", seconds=300,
              jobs=2, dry_run=False)
    if a.dry_run:
        a.shards, a.choices, a.parts = f"{a.out}/shards", f"{a.out}/choices.jsonl", a.parts or PARTS
    if not a.parts or not set(a.parts) <= set(PARTS) or not (a.dry_run or (a.shards and a.vocab_dir)):
        sys.exit(f"at_125m.py: expected --shards, --vocab-dir and one or more of {', '.join(PARTS)}")
    os.makedirs(a.out, exist_ok=True)
    job = Job(a)
    for part in a.parts:
        getattr(job, f"part_{part}")()


if __name__ == "__main__":
    main()
