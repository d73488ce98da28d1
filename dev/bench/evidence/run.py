#!/usr/bin/env python3
"""Runs the comparisons of a setting, and appends a line for each run to its runs.jsonl.

    run.py --cache CACHE --work FOLDER [--setting small] [--program ./train_nsa] [--jobs 2] [--seconds 300]
    run.py --list ...             prints the queue, one line a run, and starts nothing

A line of the setting's plan is `sweep ARM RATE...`, `longer ARM TOKENS RATE...`, `rates` with the same words or
`run ARM RATE|best|ARM SEED TOKENS`. A sweep runs each rate on seed 0 at a quarter of the setting's tokens, doubles or
halves the rate beyond the range while the best one lies at its edge, tries the best one, its half and its double with
all tokens on seed 1, and beyond these likewise, and then runs seeds 2 and 3 at the best. `longer` does the same without
the quarter, `rates` without the other seeds; `run` may take the best rate of its own arm or of another one. The seed
that chose a rate is the lucky one at that rate, so it is in no mean: these are of seeds 2 and 3.
ARM_lrRATE_tokensN and options behind it are the model of that run, which goes on with them, on bytes that it has not
seen; for 0 tokens it is measured as it is. A run whose line is there is skipped; one that was interrupted goes on from
its last checkpoint, so start the same command again. Several runners can share a folder. --seconds starts nothing that
would not end within them, by the longest run so far, and interrupts what has not ended by then.
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

from arms import Arm, command_line, options_of

HERE = os.path.dirname(os.path.abspath(__file__))
SEED_OF_SWEEP = 0
SEED_OF_RATE = 1  # chooses among rates with all tokens
SEEDS = [2, 3]    # those of a mean: they chose nothing
MOST_DOUBLINGS = 4  # of a rate beyond the range
CURVE_POINTS = 64
WORDS = {"sweep": "ARM RATE...", "longer": "ARM TOKENS RATE...", "rates": "ARM TOKENS RATE...",
         "run": "ARM RATE|best|ARM SEED TOKENS"}


class Run:
    def __init__(self, arm, rate, seed, tokens):
        self.arm, self.rate, self.seed, self.tokens = arm, rate, seed, tokens
        self.name = f"{arm}_lr{rate:g}_seed{seed}_tokens{tokens}"
        self.first, self.seen, self.more = None, 0, ""  # the run that it goes on from, its tokens, options
        goes_on = re.fullmatch(r"(.*_lr[^_]*)_tokens(\d+)(.*)", arm)
        if goes_on:
            self.first, self.more = f"{goes_on[1]}_seed{seed}_tokens{goes_on[2]}", goes_on[3]
            self.seen = int(goes_on[2])


class Results:
    """The lines of FOLDER/runs.jsonl, by name. They are appended under a lock, so several processes can share the file;
    a last line that was broken off does not count."""

    def __init__(self, folder):
        self.path, self.lines, self.size = f"{folder}/runs.jsonl", {}, 0

    def all(self):
        size = os.path.getsize(self.path) if os.path.exists(self.path) else 0
        if size != self.size:
            with open(self.path, "rb") as file:
                text = file.read()
            found = map(json.loads, text[:text.rfind(b"\n") + 1].splitlines())
            self.lines = {line["name"]: line for line in sorted(found, key=lambda line: line["name"])}
            self.size = size
        return self.lines

    def beginning(self, words):
        return [line for name, line in self.all().items() if name.startswith(words)]

    def of_runs(self):
        return [line for line in self.all().values() if "curve" in line]

    def loss(self, run):
        line = self.all().get(run.name)
        return line["held_out_loss"] if line else None

    def add(self, line):
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        with open(self.path, "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
            file.write(json.dumps(line).encode() + b"\n")


def read_setting(name):
    """Of a file, or the one of that name in settings.json, whose `model` is what they share."""
    of_all = not name.endswith(".json")
    with open(f"{HERE}/settings.json" if of_all else name) as file:
        found = json.load(file)
    return {**found[name], "model": {**found["model"], **found[name]["model"]}} if of_all else found


def plain(arm):
    """Without the rate and the tokens of the run that it goes on from."""
    return re.sub(r"_lr[^_]*_tokens\d+", "", arm)


def read_plan(setting):
    """(first word, arm, other words) of each line."""
    lines = []
    for line in setting["plan"]:
        words = line.partition("#")[0].split()
        if not words:
            continue
        fits = {"sweep": len(words) >= 3, "longer": len(words) >= 4, "rates": len(words) >= 4, "run": len(words) == 5}
        if not fits.get(words[0]):
            sys.exit(f"run.py: the plan says '{line}': expected "
                     + " or ".join(f"'{kind} {more}'" for kind, more in WORDS.items()))
        options_of(plain(words[1]), setting["model"])
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
    runs, best = [], {}
    for kind, arm, words in plan:
        if kind == "run":
            same, another = words[0] == "best", words[0][0].isalpha()
            rate = best.get(arm if same else words[0]) if another else float(words[0])
            runs += [Run(arm, rate, int(words[1]), int(words[2]))] if rate else []
            continue
        rates, whole = (words, tokens) if kind == "sweep" else (words[1:], int(words[0]))
        if kind == "sweep":
            rate, tried = best_rate(arm, rates, SEED_OF_SWEEP, whole // 4, results)
            runs += tried
            rates = [rate / 2, rate, 2 * rate] if rate else []
        if rates:
            rate, tried = best_rate(arm, rates, SEED_OF_RATE, whole, results)
            runs += tried
            if rate and kind != "longer":
                best[arm] = rate
            if rate and kind != "rates":
                runs += [Run(arm, rate, seed, whole) for seed in SEEDS]
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
    """The shards that a run of so many tokens reads once, behind those of the first `seen`, as a glob of a folder of
    links, so that an n-gram can read the same. All where the setting does not say how long a shard is."""
    if "shard_tokens" not in setting:
        return f"{cache}/{setting['train']}"
    count, seen = -(-tokens // setting["shard_tokens"]), -(-seen // setting["shard_tokens"])
    shards = sorted(glob.glob(f"{cache}/{setting['train']}"))[seen:]
    if len(shards) < count:
        sys.exit(f"run.py: {cache} has {len(shards)} training shards behind the first {seen}, {count} are needed: run "
                 "corpus.py")
    folder = f"{cache}/from_{seen}_on_{count}" if seen else f"{cache}/first_{count}"
    os.makedirs(folder, exist_ok=True)
    for shard in shards[:count]:
        with contextlib.suppress(FileExistsError):
            os.symlink(shard, f"{folder}/{os.path.basename(shard)}")
    return f"{folder}/*.bin"


def mean_of(parts):
    """Of (loss, tokens)."""
    return round(sum(loss * tokens for loss, tokens in parts) / sum(tokens for _, tokens in parts), 4)


def read_evaluation(path):
    """What `eval --json` writes: the loss, and the losses by the number of tokens in sight, of all documents and of
    each: [loss, losses by range]."""
    with open(path) as file:
        sets = [json.loads(line) for line in file]
    rows = [one["by_tokens_in_sight"] for one in sets]
    return {"held_out_loss": mean_of([(one["loss"], one["tokens"]) for one in sets]),
            "held_out_tokens": sum(one["tokens"] for one in sets),
            "by_position": [[parts[0]["first"], parts[0]["last"], mean_of([(p["loss"], p["tokens"]) for p in parts])]
                            for parts in zip(*rows)],
            "by_document": [[round(one["loss"], 4), [round(part["loss"], 4) for part in row]]
                            for one, row in zip(sets, rows)]}


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
        self.plan = read_plan(self.setting)
        self.end = time.monotonic() + a.seconds if a.seconds else None
        self.stopped = False
        self.children, self.failed, self.arms = set(), set(), {}
        self.mutex = threading.Lock()

    def arm(self, name):
        if name not in self.arms:
            self.arms[name] = Arm(plain(name), self.setting)
        return self.arms[name]

    def options(self, run):
        training = self.setting["training"]
        model = self.arm(run.arm).options
        if run.first:
            given = {"seq-len", *re.findall(r"\+([^+=]*)", run.more)}
            model = {"init-from": f"{self.a.work}/{run.first}", **{name: model[name] for name in given}}
        return {"sample-tokens": 0, "keep": 1, "stall-timeout": 100000, **model, **training, **self.setting["machine"],
                "data": some_shards(self.a.cache, self.setting, run.tokens, run.seen), "lr": run.rate,
                "seed": run.seed, "steps": run.tokens // training["total-batch"]}

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
        out = f"{self.a.work}/{run.name}"
        with contextlib.suppress(FileNotFoundError):
            os.remove(f"{out}.json")
        count = self.setting["held_out_documents"]["sweep" if run.seed == SEED_OF_SWEEP else "whole"]
        shards = enumerate(sorted(glob.glob(f"{self.a.cache}/{self.setting['held_out']}"))[:count])
        held_out = ",".join(f"{i}={path}" for i, path in shards)
        command = [self.a.program, "eval", "--from", folder, "--val-data", held_out, "--batch", "1",
                   "--seq-len", str(self.setting["model"]["seq-len"]), "--json", f"{out}.json"]
        command += command_line(self.setting["machine"])
        return self.execute(run, command, f"{out}.eval", "w")[0] == 0

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
        arm = self.arm(run.arm)
        steps = [steps[number] for number in sorted(steps)]
        result = {
            "name": run.name, "arm": run.arm, "rate": run.rate, "seed": run.seed, "tokens": run.tokens,
            **read_evaluation(f"{self.a.work}/{run.name}.json"),
            "parameters": arm.parameters, "keys_per_query": round(arm.keys, 1),
            "flops": arm.flops * run.tokens, "processor_seconds": round(seconds, 1),
            "seconds": round(sum(step["ms"] for step in steps) / 1e3, 1), "jobs": self.a.jobs,
            "mib": max((step["peak_memory_mib"] for step in steps), default=0),
            "version": starts[-1]["version"], "device": starts[-1]["device"],
            "options": {**arm.options, **self.setting["training"], **self.setting["machine"]},
            "curve": curve_of(steps),
        }
        self.results.add(result)
        print(f"{run.name}: {result['held_out_loss']:.4f}", flush=True)

    def fits(self, run):
        """Does it end within --seconds, by the longest run so far?"""
        known = [line.get("seconds", 0) / line["tokens"] for line in self.results.of_runs() if line["tokens"]]
        return not self.end or time.monotonic() + 1.1 * max(known, default=0) * run.tokens < self.end

    def next_run(self):
        """The first run without a result that nobody works on, and its lock; None where all are done or taken."""
        with self.mutex:
            for run in queue(self.plan, self.setting["tokens"], self.results):
                if self.results.loss(run) is not None or run.name in self.failed or not self.fits(run):
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
            folder = f"{self.a.work}/{run.name if run.tokens else run.first}"
            with lock:
                try:
                    trained = self.results.loss(run) is None and (not run.tokens or self.train(run, folder))
                    if trained and self.evaluate(run, folder):
                        self.write_result(run, folder)
                except SystemExit as error:  # a thread would end without a word
                    self.failed.add(run.name)
                    print(error, file=sys.stderr, flush=True)

    def stop(self, *_):
        self.stopped = True
        for child in list(self.children):
            child.send_signal(signal.SIGTERM)

    def run_all(self):
        for folder in (self.a.work, self.a.results):
            os.makedirs(folder, exist_ok=True)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, self.stop)
        signal.alarm(self.a.seconds)
        threads = [threading.Thread(target=self.work) for _ in range(self.a.jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return 1 if self.failed else 0

    def list_runs(self):
        for run in queue(self.plan, self.setting["tokens"], self.results):
            loss = self.results.loss(run)
            print(f"{run.name} {run.arm} {run.rate:g} {run.seed} {run.tokens} {'-' if loss is None else loss}")


FOLDERS = {"cache": "where corpus.py has put the shards", "work": "of the runs and their checkpoints"}


def arguments_of(doc, folders=FOLDERS):
    """Those that all scripts have which read or write results."""
    arguments = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--setting", default="small", help="a file, or a name in settings.json")
    arguments.add_argument("--results", help="folder with runs.jsonl; without it results/SETTING beside this script")
    for name in folders:
        arguments.add_argument(f"--{name}", required=True, metavar="FOLDER", type=os.path.abspath, help=FOLDERS[name])
    return arguments


def parse(arguments):
    a = arguments.parse_args()
    a.results = a.results or f"{HERE}/results/{os.path.basename(a.setting).removesuffix('.json')}"
    return a


def main():
    arguments = arguments_of(__doc__)
    arguments.add_argument("--program", default="./train_nsa")
    arguments.add_argument("--jobs", type=int, default=2, help="runs at a time")
    arguments.add_argument("--seconds", type=int, default=0, help="0: as long as it takes")
    arguments.add_argument("--list", action="store_true")
    a = parse(arguments)
    runner = Runner(a)
    return runner.list_runs() if a.list else runner.run_all()


if __name__ == "__main__":
    sys.exit(main())
