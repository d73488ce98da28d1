#!/usr/bin/env python3
"""Runs the comparisons of a plan, and writes a small JSON for each run.

    run.py --cache CACHE --work FOLDER [--plan plan.txt] [--setting small.json] [--program ./train_nsa] [--jobs 2]
    run.py --list ...             prints the queue, one line a run, and starts nothing
    run.py --predict TFLOPS ...   prints what the plan costs at so many TFLOP/s

A line of the plan is `sweep ARM RATE...`, `longer ARM TOKENS RATE...` or `run ARM RATE|best SEED TOKENS`. A sweep runs
each rate on seed 0 at a quarter of the setting's tokens, doubles or halves the rate beyond the range while the best one
lies at its edge, tries the best one, its half and its double with all tokens on seed 1, and beyond these likewise, and
then runs seeds 2 and 3 at the best. `longer` does the same without the quarter. The seed that chose a rate is the lucky
one at that rate, so it is in no mean: these are of seeds 2 and 3. A run whose result is there is skipped; one that was
interrupted goes on from its last checkpoint, so start the same command again. Several runners can share a folder.
"""
import argparse
import contextlib
import fcntl
import glob
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

from arms import HERE, REFERENCE, Arm, command_line, options_of, read_setting

SEED_OF_SWEEP = 0
SEED_OF_RATE = 1  # chooses among rates with all tokens
SEEDS = [2, 3]    # those of a mean: they chose nothing
MOST_DOUBLINGS = 4  # of a rate beyond the range
CURVE_POINTS = 64


class Run:
    def __init__(self, arm, rate, seed, tokens):
        self.arm, self.rate, self.seed, self.tokens = arm, rate, seed, tokens
        self.name = f"{arm}_lr{rate:g}_seed{seed}_tokens{tokens}"


class Results:
    """Those in the folder; one that was broken off leaves none."""

    def __init__(self, folder):
        self.folder = folder

    def path(self, run):
        return f"{self.folder}/{run.name}.json"

    def find(self, run):
        if not os.path.exists(self.path(run)):
            return None
        with open(self.path(run)) as file:
            return json.load(file)

    def loss(self, run):
        result = self.find(run)
        return result["held_out_loss"] if result else None


def read_plan(path, model):
    """(first word, arm, other words) of each line."""
    lines = []
    with open(path) as file:
        for number, line in enumerate(file, 1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            fits = {"sweep": len(words) >= 3, "longer": len(words) >= 4, "run": len(words) == 5}
            if not fits.get(words[0]):
                sys.exit(f"run.py: {path}:{number}: expected 'sweep ARM RATE...', 'longer ARM TOKENS RATE...' or 'run "
                         "ARM RATE SEED TOKENS'")
            options_of(words[1], model)
            lines.append((words[0], words[1], words[2:]))
    return lines


def best_rate(arm, rates, seed, tokens, results):
    """(best rate or None, runs to do before it is known): a best rate at the edge of the range asks for one more."""
    rates = sorted(map(float, rates))
    most = len(rates) + MOST_DOUBLINGS
    while True:
        runs = [Run(arm, rate, seed, tokens) for rate in rates]
        if any(results.loss(run) is None for run in runs):
            return None, runs
        best = min(runs, key=results.loss).rate
        if len(rates) == most:
            return best, runs
        if best == rates[0]:
            rates.insert(0, best / 2)
        elif best == rates[-1]:
            rates.append(best * 2)
        else:
            return best, runs


def queue(plan, tokens, results):
    """The runs of the plan that can be named by now, in order."""
    runs = []
    best = {}
    for kind, arm, words in plan:
        if kind == "sweep":
            rate, sweep = best_rate(arm, words, SEED_OF_SWEEP, tokens // 4, results)
            runs += sweep
            if rate:
                best[arm], whole = best_rate(arm, [rate / 2, rate, 2 * rate], SEED_OF_RATE, tokens, results)
                runs += whole
            if best.get(arm):
                runs += [Run(arm, best[arm], seed, tokens) for seed in SEEDS]
        elif kind == "longer":
            rate, tried = best_rate(arm, words[1:], SEED_OF_RATE, int(words[0]), results)
            runs += tried
            if rate:
                runs += [Run(arm, rate, seed, int(words[0])) for seed in SEEDS]
        else:
            rate = best.get(arm) if words[0] == "best" else float(words[0])
            if rate:
                runs.append(Run(arm, rate, int(words[1]), int(words[2])))
    return runs


def folders_of(name, work):
    """The folder of a run; of an arm with its rate, which is a run's name up to _seed, those of the whole runs."""
    if os.path.isdir(f"{work}/{name}"):
        return [f"{work}/{name}"]
    found = [path for path in sorted(glob.glob(f"{glob.escape(f'{work}/{name}')}_seed*")) if os.path.isdir(path)]
    found = [path for path in found if f"_seed{SEED_OF_SWEEP}_" not in path]
    if not found:
        sys.exit(f"run.py: {work} has no run {name}: expected a run's name, or one up to its _seed")
    return found


def some_shards(cache, setting, tokens, seen=0):
    """The shards that a run of so many tokens reads once, behind the first `seen`, as a glob of a folder of links, so
    that an n-gram can read the same. All where the setting does not say how long a shard is."""
    if "shard_samples" not in setting:
        return f"{cache}/{setting['train']}"
    count = -(-tokens // setting["shard_samples"] // setting["model"]["seq-len"])
    shards = sorted(glob.glob(f"{cache}/{setting['train']}"))[seen:]
    if len(shards) < count:
        sys.exit(f"run.py: {cache} has {len(shards)} training shards behind the first {seen}, {count} are needed: run "
                 "corpus.py")
    shards = shards[:count]
    folder = f"{cache}/from_{seen}_on_{count}" if seen else f"{cache}/first_{count}"
    os.makedirs(folder, exist_ok=True)
    for shard in shards:
        link = f"{folder}/{os.path.basename(shard)}"
        with contextlib.suppress(FileExistsError):
            os.symlink(shard, link)
    return f"{folder}/*.bin"


def read_evaluation(text):
    """What `eval` prints: the loss, and the losses by the number of tokens in sight."""
    tokens, loss = re.search(r"(\d+) tokens \(.*: loss ([0-9.]+)", text).groups()
    ranges = re.findall(r"^ +(\d+)\.\.(\d+) +([0-9.]+) +\d+", text, re.MULTILINE)
    return {"held_out_loss": float(loss), "held_out_tokens": int(tokens),
            "by_position": [[int(first), int(last), float(loss)] for first, last, loss in ranges]}


def curve_of(steps):
    """[[tokens, mean training loss since the point before]]."""
    points = []
    for i in range(CURVE_POINTS):
        part = steps[len(steps) * i // CURVE_POINTS:len(steps) * (i + 1) // CURVE_POINTS]
        if part:
            points.append([part[-1]["tokens"], round(sum(s["loss"] for s in part) / len(part), 4)])
    return points


class Runner:
    def __init__(self, a):
        self.a = a
        self.results = Results(a.results)
        self.setting = read_setting(a.setting)
        self.plan = read_plan(a.plan, self.setting["model"])
        self.stopped = False
        self.children = set()
        self.failed = set()
        self.arms = {}
        self.mutex = threading.Lock()

    def arm(self, name):
        for needed in (REFERENCE, name):
            if needed not in self.arms:
                self.arms[needed] = Arm(needed, self.setting["model"], self.a.program, self.arms.get(REFERENCE))
        return self.arms[name]

    def options(self, run):
        with self.mutex:
            arm = self.arm(run.arm)
        training = self.setting["training"]
        data = some_shards(self.a.cache, self.setting, run.tokens)
        return {**arm.options, **training, **self.setting["machine"], "data": data, "lr": run.rate, "seed": run.seed,
                "steps": run.tokens // training["total-batch"], "sample-tokens": 0, "keep": 1, "stall-timeout": 100000}

    def train(self, run, folder):
        """True once the run has ended by itself."""
        if os.path.exists(f"{folder}/run.json"):
            command = [self.a.program, "--resume", folder, "--stall-timeout", "100000"]
        else:
            command = [self.a.program, "--out", folder] + command_line(self.options(run))
        status, usage = self.execute(run, command, f"{folder}.txt", "a")
        with open(f"{folder}.seconds", "a") as file:
            file.write(f"{usage.ru_utime + usage.ru_stime:.1f}\n")
        return status == 0

    def evaluate(self, run, folder):
        """True once the losses of the held-out files are in a file beside the run."""
        samples = self.setting["held_out_samples"]["sweep" if run.seed == SEED_OF_SWEEP else "whole"]
        command = [self.a.program, "eval", "--from", folder, "--val-data",
                   f"{self.a.cache}/{self.setting['held_out']}", "--batch", "1", "--eval-batches", str(samples)]
        return self.execute(run, command + command_line(self.setting["machine"]), f"{folder}.eval", "w")[0] == 0

    def execute(self, run, command, output, mode):
        with open(output, mode) as log:
            child = subprocess.Popen(command, stdout=log, stderr=log)
            self.children.add(child)
            _, status, usage = os.wait4(child.pid, 0)
            self.children.discard(child)
        if status and not self.stopped:
            self.failed.add(run.name)
            print(f"run.py: {run.name} failed, see {output}", file=sys.stderr, flush=True)
        return status, usage

    def write_result(self, run, folder):
        steps, starts = {}, []
        with open(f"{folder}/log.jsonl") as file:
            for entry in map(json.loads, file):
                if "start" in entry:
                    starts.append(entry["start"])
                elif "ms" in entry:
                    steps[entry["step"]] = entry  # a step after a resume is there twice
        with open(f"{folder}.seconds") as file:
            seconds = sum(map(float, file))
        with open(f"{folder}.eval") as file:
            held_out = read_evaluation(file.read())
        arm = self.arm(run.arm)
        steps = [steps[number] for number in sorted(steps)]
        result = {
            "name": run.name, "arm": run.arm, "rate": run.rate, "seed": run.seed, "tokens": run.tokens,
            **held_out,
            "parameters": arm.parameters, "keys_per_query": round(arm.keys, 1),
            "flops": arm.flops * run.tokens, "processor_seconds": round(seconds, 1),
            "version": starts[-1]["version"], "device": starts[-1]["device"],
            "options": {**arm.options, **self.setting["training"], **self.setting["machine"]},
            "curve": curve_of(steps),
        }
        with open(self.results.path(run) + ".new", "w") as file:
            file.write(json.dumps(result) + "\n")
        os.rename(self.results.path(run) + ".new", self.results.path(run))
        print(f"{run.name}: {result['held_out_loss']:.4f}", flush=True)

    def next_run(self):
        """The first run without a result that nobody works on, and its lock; None where all are done or taken."""
        with self.mutex:
            for run in queue(self.plan, self.setting["tokens"], self.results):
                if self.results.find(run) or run.name in self.failed:
                    continue
                lock = open(f"{self.a.work}/{run.name}.lock", "w")
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return run, lock
                except BlockingIOError:
                    lock.close()
        return None

    def work(self):
        while not self.stopped:
            found = self.next_run()
            if not found:
                # What another one works on may name new runs.
                if not self.children:
                    return
                time.sleep(1)
                continue
            run, lock = found
            folder = f"{self.a.work}/{run.name}"
            with lock:
                try:
                    if self.train(run, folder) and self.evaluate(run, folder):
                        self.write_result(run, folder)
                except SystemExit as error:  # a thread would end without a word
                    self.failed.add(run.name)
                    print(error, file=sys.stderr, flush=True)

    def stop(self, *_):
        self.stopped = True
        for child in list(self.children):
            child.send_signal(signal.SIGTERM)


def tokens_of(kind, words, whole):
    """Tokens that a line of the plan trains on; rates beyond its range come on top."""
    if kind == "sweep":
        return whole * (len(words) / 4 + 3 + len(SEEDS))
    if kind == "longer":
        return int(words[0]) * (len(words) - 1 + len(SEEDS))
    return int(words[2])


def predict(runner, tflops):
    total = 0
    for kind, name, words in runner.plan:
        arm = runner.arm(name)
        tokens = tokens_of(kind, words, runner.setting["tokens"])
        hours = arm.flops * tokens / tflops / 1e12 / 3600
        total += hours
        print(f"{kind} {name}: {arm.parameters} parameters, {tokens / 1e9:.3g} G tokens, {hours:.3g} hours")
    print(f"predicted at {tflops:g} TFLOP/s, not measured: {total:.3g} hours; evaluations and rates beyond the range "
          "come on top")


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--cache", required=True, help="where corpus.py has put the shards")
    arguments.add_argument("--work", required=True, help="folder of the runs and their checkpoints")
    arguments.add_argument("--plan", default=f"{HERE}/plan.txt")
    arguments.add_argument("--setting", default=f"{HERE}/small.json")
    arguments.add_argument("--results", default=f"{HERE}/results")
    arguments.add_argument("--program", default="./train_nsa")
    arguments.add_argument("--jobs", type=int, default=2, help="runs at a time")
    arguments.add_argument("--list", action="store_true")
    arguments.add_argument("--predict", type=float, metavar="TFLOPS")
    a = arguments.parse_args()
    a.cache, a.work = os.path.abspath(a.cache), os.path.abspath(a.work)
    runner = Runner(a)
    if a.predict:
        return predict(runner, a.predict)
    if a.list:
        for run in queue(runner.plan, runner.setting["tokens"], runner.results):
            loss = runner.results.loss(run)
            print(f"{run.name} {run.arm} {run.rate:g} {run.seed} {run.tokens} {'-' if loss is None else loss}")
        return 0
    for folder in (a.work, a.results):
        os.makedirs(folder, exist_ok=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, runner.stop)
    threads = [threading.Thread(target=runner.work) for _ in range(a.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 1 if runner.failed else 0


if __name__ == "__main__":
    sys.exit(main())
