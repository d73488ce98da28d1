#!/usr/bin/env python3
"""The 125M model trained, and arms of attention at T = 8192 beside each other, for whoever has a GPU for some minutes.

    at_125m.py --shards SHARDS --out OUT --vocab-dir GPT2 [--choices FILE.jsonl] [--seconds 300] [--jobs 2] PART...
    at_125m.py --dry-run --out OUT      everything with a tiny model and text on the CPU, in some minutes

SHARDS are GPT-2's tokens of any text: train_nsa tokenize --in TEXT --out SHARDS/text --tokenizer gpt2 --vocab-dir GPT2.

    main    the model at T = 2048: one epoch, validation, samples, choices, a report
    floor   the best n-gram of the long documents; no GPU, minutes and 10 GB, so before the others
    a       parity of full attention with PyTorch on the same batches, then the setting's arms, as far as there is time
    b       the rest of the arms; then, of all that is there, the tables and what was decided before

--seconds interrupts what has not ended by then; the next call goes on there: what is done is a file in OUT.
"""
import glob
import json
import os
import pathlib
import subprocess
import sys
import time

from ngram import HEADER, WIDTH
from run import HERE, SEED_OF_RATE, SEEDS, Arm, Results, command_line, parse, read_setting
from table import with_each

ROOT = os.path.abspath(f"{HERE}/../../..")
PARTS = ["main", "floor", "a", "b"]
ARMS = {"N": "nsa", "F": "full+kv-groups=12", "H": "alternating+kv-groups=12+window=512",
        "C": "nsa+slc-count=3+window=1384", "W": "window"}
PARITY_TOKENS = 15_000_000
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
        parity = pathlib.Path(f"{self.a.out}/parity_torch.txt")
        print(parity.read_text().splitlines()[-1] if parity.exists() else "Parity with PyTorch was not tried.")
        print("Where that is not at most 0.01, nothing here is to be reported.")
        self.judge()

    def judge(self):
        """Beside each figure what it was decided to mean before any of it was run."""
        def compare(one, other, figure, meaning):
            found = [[figure(run) for run in runs if run["arm"] == ARMS[name]] for name in (one, other)]
            less = [a - b for a, b in zip(*found)]
            if less:
                print(f"{one} - {other}: {with_each(less, '+.4f')}: {meaning}")

        runs = [run for run in Results(f"{self.a.out}/results").of_runs() if run["seed"] in SEEDS]
        loss, last = lambda run: run["held_out_loss"], lambda run: run["curve"][-1][1]
        compare("N", "F", loss, "NSA learns less if above +0.02 with both seeds")
        compare("N", "F", last, "the last training loss: NSA has reached full attention's if not above 0")
        compare("N", "C", loss, "choosing buys no more than as many near keys if within 0.005")
        compare("H", "N", loss, "windows and full attention are as good if not above 0")
        for window in "HW":
            compare(window, "F", lambda run: run["by_position"][-1][2], "beyond half of the length: the data says "
                    "nothing about reach if neither H nor W has three times what seeds differ by")


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
