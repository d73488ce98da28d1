#!/usr/bin/env python3
"""The 125M model trained, and arms of attention at T = 8192 beside each other, for whoever has a GPU for some minutes.

    at_125m.py --shards SHARDS --out OUT --vocab-dir GPT2 [--choices FILE.jsonl] [--seconds 300] [--jobs 2] PART...
    at_125m.py --dry-run --out OUT      everything with a tiny model and text on the CPU, in a minute or two

SHARDS are GPT-2's tokens of any text: train_nsa tokenize --in TEXT --out SHARDS/text --tokenizer gpt2 --vocab-dir GPT2.

    main    the model at T = 2048: one epoch, validation, choices, samples, a report, ten more steps, an export
    dense   PyTorch's dense model on the same batches for as many steps
    floor   the best n-gram of the long documents; no GPU, minutes and 10 GB, so before the others
    a       parity of full attention with PyTorch on the same batches, then the rates of NSA and of full attention
    b       the other seeds and arms of the setting; then, of all that is there, the tables and what was decided before

Each call goes on where the last one ended; --seconds starts nothing that would not end within them. What is done is a
file in OUT, which is to be kept (OUT/results and the .txt at least). Losses count, not times, where --jobs share a GPU.
"""
import argparse
import glob
import json
import os
import re
import signal
import subprocess
import sys
import time

from ngram import HEADER, WIDTH
from run import HERE, SEED_OF_RATE, SEEDS, Results, mean_of, read_setting
from table import interval, mean, print_rows

ROOT = os.path.abspath(f"{HERE}/../../..")
NSA, FULL, MIXED, NEAREST, ALTERNATE, WINDOW = "NFHCAW"
ARMS = {NSA: "nsa", FULL: "full+kv-groups=12", MIXED: "alternating+kv-groups=12+window=512",
        NEAREST: "nsa+slc-count=3+window=1384", ALTERNATE: "interleaved", WINDOW: "window"}
PARITY_TOKENS, PARITY = 15_000_000, 0.01  # nats, at every 100th step
TINY = {"layers": 4, "dim": 16, "heads": 4, "kv-groups": 2, "head-dim": 4, "mlp-hidden": 64, "cmp-block": 8,
        "cmp-stride": 4, "slc-block": 8, "slc-count": 6, "window": 16, "phi-hidden": 8, "tokenizer": "bytes",
        "seq-len": 256}
IN_TINY = {"kv-groups=12": "kv-groups=4", "window=512": "window=16", "window=1384": "window=40",
           "0.001 0.002 0.004": "0.016 0.032 0.064"}


class Job:
    def __init__(self, a):
        self.a, self.end = a, time.monotonic() + a.seconds
        self.setting = read_setting("at_125m")
        self.arms = dict(ARMS)
        self.common, self.device = ["--model", "125m"], ["--device", a.device]
        self.vocabulary = ["--vocab-dir", a.vocab_dir]
        self.T, self.batch, self.total = 2048, 16, 65536
        if a.dry_run:
            self.make_tiny()
        self.results = Results(f"{a.out}/results")

    def make_tiny(self):
        words = "the a king queen ship sea storm house road finds sees of and with old new".split()
        os.makedirs(self.a.shards, exist_ok=True)
        with open(f"{self.a.out}/text.txt", "w") as file:
            for i in range(40):
                file.write(" ".join(words[(i * 7 + j * j) % len(words)] for j in range(300)) + "\n\n\n")
        with open(self.a.choices, "w") as file:
            item = {"ind": 0, "ctx": "the king", "endings": ["sees", "storm", "of", "a"], "label": 0}
            file.write((json.dumps(item) + "\n") * 4)
        self.step("tokenize", [self.a.program, "tokenize", "--in", f"{self.a.out}/text.txt", "--out",
                               f"{self.a.shards}/t", "--tokenizer", "bytes", "--val-fraction", "0.1",
                               "--split-documents", "\n\n\n"])
        both = json.dumps([self.setting, self.arms])
        for old, new in IN_TINY.items():
            both = both.replace(old, new)
        self.setting, self.arms = json.loads(both)
        self.setting["model"].update(TINY)
        self.setting["training"].update({"batch": 2, "total-batch": 2048, "warmup": 2})
        self.setting["machine"] = {"device": "cpu", "threads": 1}
        self.common, self.device, self.vocabulary = ["--tokenizer", "bytes", "--threads", 1], ["--device", "cpu"], []
        self.T, self.batch, self.total = 64, 4, 1024

    def step(self, name, command, least=10):
        """True once its output is OUT/NAME.txt; one that is there is not made again, one that ends badly is said."""
        path = f"{self.a.out}/{name}.txt"
        if os.path.exists(path):
            return True
        left = self.end - time.monotonic()
        if left < least:
            print(f"{name}: left out, {left:.0f} of the {least} s that it takes are left: call this again", flush=True)
            return False
        begin = time.monotonic()
        with open(path + ".part", "w") as file:
            child = subprocess.Popen(list(map(str, command)), stdout=file, stderr=subprocess.STDOUT)
            try:
                status = child.wait(left)
            except subprocess.TimeoutExpired:
                child.send_signal(signal.SIGTERM)  # a run saves, and goes on next time
                status = child.wait() or 1
        if not status:
            os.rename(path + ".part", path)
        says = f"status {status}, see {path}.part" if status else "done"
        print(f"{name}: {says} after {time.monotonic() - begin:.0f} s", flush=True)
        return not status

    def train(self, name, options, least):
        run = f"{self.a.out}/{name}"
        begun = os.path.exists(f"{run}/run.json")
        return self.step(name, [self.a.program, *(["--resume", run] if begun else ["--out", run, *options])], least)

    def part_main(self):
        run, shards = f"{self.a.out}/main", f"{self.a.shards}/*_train_*.bin"
        steps = tokens_of(shards) // self.total
        options = [*self.common, *self.device, *self.vocabulary, "--data", shards,
                   "--val-data", f"{self.a.shards}/*_val_*.bin", "--seq-len", self.T, "--batch", self.batch,
                   "--total-batch", self.total, "--steps", steps,
                   "--warmup", max(1, min(40, steps // 10)), "--lr", "1e-3", "--seed", SEED_OF_RATE, "--save-every", 0,
                   "--eval-every", 20, "--eval-batches", 6, "--sample-tokens", 0]
        if not self.train("main", options, 60):
            return
        there = ["--from", run, *self.device, *self.vocabulary]
        self.verb("sample", [*there, "--tokens", 160, "--prompt", "The history of the city begins"])
        if self.a.choices:
            self.verb("eval", [*there, "--hellaswag", self.a.choices])
        self.verb("report", ["--from", run, "--html", f"{self.a.out}/main.html"])
        self.verb("export", ["--from", run, "--out", f"{self.a.out}/main_export"])
        self.step("resume", [self.a.program, "--resume", run, "--steps", steps + 10])

    def verb(self, verb, options):
        self.step(verb, [self.a.program, verb, *options])

    def part_dense(self):
        self.torch("dense", f"{self.a.out}/main", "none")

    def torch(self, name, run, first):
        compiled = [] if self.a.dry_run else ["--compile"]
        self.step(name, [self.a.python, f"{ROOT}/dev/bench/torch_train.py", run, first, *compiled], 60)

    def long_shards(self):
        """The setting with the long documents' tokens, in OUT/at_125m.json."""
        T, total = self.setting["model"]["seq-len"], self.setting["training"]["total-batch"]
        done = self.step("long", [sys.executable, f"{ROOT}/data/long_documents.py", self.a.shards, f"{self.a.out}/long",
                           "--seq-len", T, "--held-out", 256 * T], 0)
        if not done:
            sys.exit("at_125m.py: there are no shards of long documents")
        self.tokens = tokens_of(f"{self.a.out}/long/long_train_*.bin") // total * total
        if not self.a.dry_run:
            self.setting["machine"].update({"device": self.a.device, "vocab-dir": self.a.vocab_dir})
        self.write_setting("at_125m", self.setting["plan"])

    def write_setting(self, name, plan):
        text = json.dumps({**self.setting, "tokens": self.tokens, "plan": plan})
        with open(f"{self.a.out}/{name}.json", "w") as file:
            file.write(text.replace("EPOCH", str(self.tokens)))

    def of_results(self, script, setting, *more):
        return [sys.executable, f"{HERE}/{script}", "--setting", f"{self.a.out}/{setting}.json", "--results",
                f"{self.a.out}/results", "--cache", f"{self.a.out}/long", *more]

    def part_floor(self):
        self.long_shards()
        self.step("floor", self.of_results("ngram.py", "at_125m", "--longest", "4"), 0)

    def run_arms(self, setting):
        left = int(self.end - time.monotonic())
        if left > 0:
            subprocess.run(self.of_results("run.py", setting, "--work", f"{self.a.out}/work", "--seconds", str(left),
                                           "--jobs", str(self.a.jobs), "--program", self.a.program))

    def part_a(self):
        self.long_shards()
        model, training = self.setting["model"], self.setting["training"]
        options = ["--attention", "full", "--kv-groups", model["heads"], "--optimizer", "adamw"]
        for name in ("layers", "dim", "heads", "head-dim", "mlp-hidden", "init", "tokenizer"):
            options += [f"--{name}", model[name]]
        options += [*self.device, *self.vocabulary, "--seed", SEED_OF_RATE, "--save-every", 0, "--sample-tokens", 0,
                    "--data", f"{self.a.out}/long/long_train_*.bin"]
        T, total = model["seq-len"], training["total-batch"]
        steps = min(PARITY_TOKENS, self.tokens) // total
        first = ["--seq-len", 64, "--batch", 1, "--total-batch", 64, "--steps", 1, "--lr", 0, "--warmup", 0]
        same = ["--seq-len", T, "--batch", training["batch"], "--total-batch", total, "--steps", steps, "--warmup",
                training["warmup"], "--lr", "6e-4"]
        if self.train("parity_first", options + first, 20) and self.train("parity", options + same, 40):
            self.torch("parity_torch", f"{self.a.out}/parity", f"{self.a.out}/parity_first/step_00000001")
        self.write_setting("rates", [line for line in self.setting["plan"] if line.startswith("rates")])
        self.run_arms("rates")

    def part_b(self):
        self.long_shards()
        self.run_arms("at_125m")
        self.judge()

    def parity(self):
        """The largest difference at a 100th step, or None where one side has not run; prints PyTorch's tokens/s."""
        theirs, self.torch_rate = f"{self.a.out}/parity_torch.txt", None
        if not os.path.exists(theirs):
            return None
        with open(f"{self.a.out}/parity/main.log") as ours, open(theirs) as file:
            losses = dict(re.findall(r"^s:(\d+) trl:([\d.]+)", ours.read(), re.MULTILINE))
            steps = re.findall(r"^step (\d+) loss ([\d.]+) seconds ([\d.]+)", file.read(), re.MULTILINE)
        seconds = sorted(float(seconds) for _, _, seconds in steps)[len(steps) // 2]
        self.torch_rate = self.setting["training"]["total-batch"] / seconds
        print(f"PyTorch's dense model: {self.torch_rate:.0f} tokens/s, the median of {len(steps)} steps")
        every = min(100, len(steps))
        return max(abs(float(losses[step]) - float(loss)) for step, loss, _ in steps if int(step) % every == 0)

    def judge(self):
        worst = self.parity()
        if worst is None:
            print("Parity with PyTorch was not tried: nothing below is to be reported.\n")
        else:
            says(f"full attention and PyTorch differ by at most {PARITY} nats at every 100th step", worst <= PARITY,
                 f"{worst:.4f}")
            if worst > PARITY and not self.a.dry_run:
                return print("So nothing else is reported.")
        arms = {name: [run for run in self.results.of_runs() if run["arm"] == arm and run["seed"] in SEEDS]
                for name, arm in self.arms.items()}
        arms = {name: runs for name, runs in arms.items() if runs}
        self.print_arms(arms)
        for one, other in (NSA + FULL, NSA + NEAREST, MIXED + NSA, ALTERNATE + NSA):
            if one in arms and other in arms:
                print(f"{one} - {other}, paired by document and seed: {interval(paired(arms[one], arms[other]))}")
        self.decide(arms)

    def print_arms(self, arms):
        T = self.setting["model"]["seq-len"]
        ranges, rows = [(0, T // 16), (T // 16, T // 4), (T // 4, T // 2), (T // 2, T)], []
        for name, runs in arms.items():
            one, losses = runs[0], [run["held_out_loss"] for run in runs]
            rate = mean([run["tokens"] / max(run["seconds"], 0.1) for run in runs])
            rows.append([
                f"{name}: `{self.arms[name]}`, {one['rate']:g}", f"{one['parameters']:,}",
                f"{one['keys_per_query']:.0f}", f"{one['flops'] / 1e12:.0f}",
                f"{mean([run['seconds'] for run in runs]):.0f}",
                f"{rate:.0f}, {one['jobs']} at a time", f"{max(run['mib'] for run in runs) / 1024:.1f}",
                f"{mean(losses):.4f} ({', '.join(f'{loss:.4f}' for loss in losses)})",
                *(f"{mean([between(run, *of_range) for run in runs]):.3f}" for of_range in ranges)])
        print_rows(["arm, rate", "parameters", "keys", "TFLOP", "seconds", "tokens/s", "GiB", "loss (seeds)"]
                   + [f"{low + 1}..{high}" for low, high in ranges], rows)
        for line in self.results.beginning("ngram_"):
            print(f"The best n-gram of the same tokens: {min(line['loss_by_order'].values()):.3f}\n")

    def decide(self, arms):
        """What was decided before any of it was run."""
        T, far = self.setting["model"]["seq-len"], {}
        for name, runs in arms.items():
            far[name] = [between(run, T // 2, T) for run in runs]
        windows = [far[name] for name in (MIXED, WINDOW) if name in far]
        if FULL in far and windows:
            spread = max(max(losses) - min(losses) for losses in far.values())
            ahead = max(mean(losses) - mean(far[FULL]) for losses in windows)
            says("F beats H or W beyond half of the length by three times what seeds differ by", ahead > 3 * spread,
                 f"{ahead:+.4f}, {spread:.4f}; where it does not, the data says nothing about reach")
        less = {}
        for one, other in (NSA + FULL, NSA + NEAREST, MIXED + NSA):
            less[one + other] = [a["held_out_loss"] - b["held_out_loss"]
                                 for a, b in zip(arms.get(one, []), arms.get(other, []))]
        if less[NSA + FULL]:
            says("N - F is above +0.02 with both seeds", min(less[NSA + FULL]) > 0.02, seeds_of(less[NSA + FULL]))
            self.clock(arms[NSA][0], arms[FULL][0])
        if less[NSA + NEAREST]:
            says("|N - C| is below 0.005, so choosing buys no more than as many near keys",
                 abs(mean(less[NSA + NEAREST])) < 0.005, seeds_of(less[NSA + NEAREST]))
        if less[MIXED + NSA]:
            says("H is at or below N", mean(less[MIXED + NSA]) <= 0, seeds_of(less[MIXED + NSA]))

    def clock(self, nsa, full):
        """When N's training loss reaches the one that F ends with, in seconds of each."""
        reached = [tokens for tokens, loss in nsa["curve"] if loss <= full["curve"][-1][1]]
        figures = [f"after {reached[0] / nsa['tokens'] * nsa['seconds']:.0f} s"] if reached else []
        figures += [f"F took {full['seconds']:.0f} s"]
        figures += [f"at PyTorch's rate {full['tokens'] / self.torch_rate:.0f} s"] if self.torch_rate else []
        says("N reaches the training loss that F ends with", bool(reached), ", ".join(figures))


def tokens_of(pattern):
    """All of the shards' together."""
    return sum(os.path.getsize(path) - HEADER for path in glob.glob(pattern)) // WIDTH


def between(run, low, high):
    """The loss with more than `low` and up to `high` tokens in sight."""
    return mean_of([(loss, last - first + 1) for first, last, loss in run["by_position"] if low < last <= high])


def paired(one, other):
    """Of each document the difference of its losses, the mean of the seeds that both have."""
    of_seeds = [[m[0] - n[0] for m, n in zip(a["by_document"], b["by_document"])] for a, b in zip(one, other)]
    return [mean(column) for column in zip(*of_seeds)]


def seeds_of(numbers):
    return f"{mean(numbers):+.4f}; by seed {', '.join(f'{x:+.4f}' for x in numbers)}"


def says(sentence, holds, figures):
    print(f"{'Yes' if holds else 'No'}: {sentence}. ({figures})")


def main():
    parts = ["main", "dense", "floor", "a", "b"]
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("parts", nargs="*", metavar="PART", help=", ".join(parts))
    arguments.add_argument("--out", required=True, type=os.path.abspath)
    for name in ("shards", "vocab-dir", "choices"):
        arguments.add_argument(f"--{name}", type=os.path.abspath)
    arguments.add_argument("--program", default="./train_nsa")
    arguments.add_argument("--python", default=sys.executable, help="with PyTorch")
    arguments.add_argument("--device", default="cuda")
    arguments.add_argument("--seconds", type=int, default=300)
    arguments.add_argument("--jobs", type=int, default=2, help="arms at a time")
    arguments.add_argument("--dry-run", action="store_true")
    a = arguments.parse_args()
    if a.dry_run:
        a.shards, a.choices, a.parts = f"{a.out}/shards", f"{a.out}/choices.jsonl", a.parts or parts
    if not set(a.parts) <= set(parts) or not a.parts or not (a.dry_run or (a.shards and a.vocab_dir)):
        arguments.error(f"expected --shards, --vocab-dir and one or more of {', '.join(parts)}")
    os.makedirs(a.out, exist_ok=True)
    job = Job(a)
    for part in a.parts:
        getattr(job, f"part_{part}")()


if __name__ == "__main__":
    main()
