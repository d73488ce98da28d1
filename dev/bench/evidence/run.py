#!/usr/bin/env python3
"""Runs the comparisons of a setting, and appends a line for each run to its runs.jsonl.

    run.py --cache CACHE --work WORK [--setting small] [--results FOLDER] [--program ./train_nsa] [--jobs 2]

CACHE is where corpus.py has put the shards; WORK gets the runs and their checkpoints. The setting is a file, or a name
in settings.json; its results are in results/SETTING or FOLDER. A line of its plan is `sweep ARM RATE...`, `longer ARM
TOKENS RATE...` or `run ARM RATE|best|ARM SEEDS TOKENS`. A sweep runs each rate on seed 0 at a quarter of the tokens,
doubles or halves the rate beyond the range while the best one lies at its edge, tries the best one, its half and its
double with all tokens on seed 1, and beyond these likewise, and then runs seeds 2 and 3 at the best. `longer` does the
same without the quarter; `run` may take the best rate of its own arm or of another one. The seed that chose a rate is
the lucky one at that rate, so it is in no mean: these are of seeds 2 and 3. A run whose line is there is skipped; one
that was interrupted goes on from its last checkpoint, so start the same command again.

An arm is a name of ARMS and options of the trainer behind it: nsa, full+optimizer=muon, window+smear. The setting has
the model of NSA. An arm with fewer parameters gets a wider MLP, and the window alone reads as many keys for a query,
on average over a sequence, as NSA in its three branches together; alternating, where every fourth layer has full
attention and the others a window, on average over its layers too.
"""
import argparse
import glob
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections import Counter

HERE = os.path.dirname(os.path.abspath(__file__))
SEED_OF_SWEEP = 0
SEED_OF_RATE = 1  # chooses among rates with all tokens
SEEDS = [2, 3]    # those of a mean: they chose nothing
MOST_DOUBLINGS = 4  # of a rate beyond the range
CURVE_POINTS = 64
ARMS = {
    "nsa": {},
    "full": {"attention": "full"},
    "window": {"branches": "win"},
    "alternating": {"attention": "window,window,window,full"},
    "interleaved": {"attention": "window,nsa"},
    "window+selected": {"branches": "slc,win"},
    "window+compressed": {"branches": "cmp,win"},
}
# Refused where no layer is NSA's, and so is --window where none is a window either.
OF_NSA = ["cmp-block", "cmp-stride", "slc-block", "slc-count", "phi-hidden"]
VOCABULARY = {"bytes": 256, "gpt2": 50257}


def command_line(options):
    words = []
    for name, value in options.items():
        words += [f"--{name}"] if value is None else [f"--{name}", str(value)]
    return words


def kinds_of(o):
    """nsa, full or window, of each layer."""
    pattern = o.get("attention", "nsa").split(",")
    return [pattern[i % len(pattern)] for i in range(o["layers"])]


def branches_of(kind, o):
    return {"nsa": o.get("branches", "cmp,slc,win").split(","), "window": ["win"], "full": ["all"]}[kind]


def pairs(branch, o):
    """Keys that the queries of one sequence read in a branch, as lib/model/shape.h counts."""
    tokens, size = range(o["seq-len"]), o["slc-block"]
    if branch == "all":
        return sum(t + 1 for t in tokens)
    if branch == "win":
        return sum(min(t + 1, o["window"]) for t in tokens)
    if branch == "cmp":
        return sum(max(0, (t + 1 - o["cmp-block"]) // o["cmp-stride"] + 1) for t in tokens)
    return sum(min(t // size, o["slc-count"] - 1) * size + t % size + 1 for t in tokens)


def keys_per_query(o):
    """The mean of the layers."""
    layers = Counter(kinds_of(o))
    found = sum(count * pairs(branch, o) for kind, count in layers.items() for branch in branches_of(kind, o))
    return found / o["layers"] / o["seq-len"]


def window_of_equal_keys(model, options):
    """The narrowest window, in steps of 8, that has no fewer keys than NSA; all tokens where none has."""
    wanted = keys_per_query(model)
    for window in range(8, model["seq-len"], 8):
        if keys_per_query({**options, "window": window}) >= wanted:
            return window
    return model["seq-len"]


def options_of(arm, model):
    """The arm's options, a dictionary from name to value; a flag's value is None."""
    base = max((name for name in ARMS if arm == name or arm.startswith(name + "+")), key=len)
    options = {**model, **ARMS[base]}
    for option in arm[len(base):].split("+")[1:]:
        name, equals, value = option.partition("=")
        options[name] = int(value) if value.isdigit() else value if equals else None
    if base in ("window", "alternating") and "+window=" not in arm:
        options["window"] = window_of_equal_keys(model, options)
    return options


def cost_of(o):
    """(parameters, FLOPs of a token), as lib/model counts them. A branch that is left out keeps its tensors in the
    file, but they do nothing; compression chooses the blocks of the selected branch, so its keys stay with that."""
    C, D, tokens, words = o["dim"], o["head-dim"], o["seq-len"], VOCABULARY[o["tokenizer"]]
    matrices = [(words * C, tokens)]  # size, rows that it multiplies in one sequence
    vectors = C + 2 * C * ("smear" in o)
    for kind in kinds_of(o):
        branches = branches_of(kind, o)
        compressed = ("cmp" in branches or "slc" in branches) + ("cmp" in branches)  # keys, values
        others = 2 * sum(branch != "cmp" for branch in branches)
        matrices += [(o["heads"] * D * C, tokens)] * 2 + [(o["mlp-hidden"] * C, tokens)] * 2
        matrices += [(o["kv-groups"] * D * C, tokens)] * (compressed + others)
        vectors += 2 * C + (4 if kind == "nsa" else 2) * D * (o.get("qk-norm", "off") != "off")
        if kind == "nsa":
            rows = o["kv-groups"] * max(0, (tokens - o["cmp-block"]) // o["cmp-stride"] + 1)
            matrices += [(3 * o["heads"] * C, tokens)]
            matrices += [(o["phi-hidden"] * o["cmp-block"] * D, rows), (o["phi-hidden"] * D, rows)] * compressed
            vectors += o["phi-hidden"] * compressed
    parameters = sum(size for size, _ in matrices) + vectors + words * C * (o.get("head") == "untied")
    flops = sum(6 * size * rows for size, rows in matrices) / tokens
    return parameters, flops + 12 * D * o["heads"] * o["layers"] * keys_per_query(o)


class Arm:
    """An arm with the MLP's width that gives it as many parameters as NSA has."""

    def __init__(self, name, setting):
        model = setting["model"]
        self.options = o = options_of(name, model)
        if setting.get("equal_parameters", True):
            missing = cost_of(model)[0] - cost_of(o)[0]
            o["mlp-hidden"] += round(missing / (2 * o["dim"] * o["layers"]) / 8) * 8
        self.parameters, self.flops = cost_of(o)
        self.keys = keys_per_query(o)
        kinds = kinds_of(o)
        for option in (OF_NSA if "nsa" not in kinds else []) + (["window"] if set(kinds) == {"full"} else []):
            del o[option]


class Run:
    def __init__(self, arm, rate, seed, tokens):
        self.arm, self.rate, self.seed, self.tokens = arm, rate, seed, tokens
        self.name = f"{arm}_lr{rate:g}_seed{seed}_tokens{tokens}"


class Results:
    """The lines of FOLDER/runs.jsonl, by name."""

    def __init__(self, folder):
        self.path, self.lines = f"{folder}/runs.jsonl", {}
        if os.path.exists(self.path):
            with open(self.path) as file:
                lines = sorted(map(json.loads, file), key=lambda line: line["name"])
            self.lines = {line["name"]: line for line in lines}

    def of_runs(self):
        return [line for line in self.lines.values() if "curve" in line]

    def loss(self, run):
        return self.lines[run.name]["held_out_loss"] if run.name in self.lines else None

    def add(self, line):
        self.lines[line["name"]] = line
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")


def read_setting(name):
    """Of a file, or the one of that name in settings.json, which has what they share."""
    if name.endswith(".json"):
        return json.loads(pathlib.Path(name).read_text())
    found = json.loads(pathlib.Path(f"{HERE}/settings.json").read_text())
    shared, own = found["shared"], found[name]
    return {**shared, **own, "model": {**shared["model"], **own["model"]}}


def best_rate(arm, rates, seed, tokens, results):
    """(best rate or None, runs to do before it is known): a best rate at the edge of the range asks for one more."""
    rates = sorted(map(float, rates))
    most = len(rates) + MOST_DOUBLINGS
    while True:
        runs = [Run(arm, rate, seed, tokens) for rate in rates]
        if any(results.loss(run) is None for run in runs):
            return None, runs
        best = min(runs, key=results.loss).rate
        if len(rates) == most or best not in (rates[0], rates[-1]):
            return best, runs
        if best == rates[0]:
            rates.insert(0, best / 2)
        else:
            rates.append(best * 2)


def queue(setting, results):
    """The runs of the plan that can be named by now, in order."""
    runs, best = [], {}
    for kind, arm, *words in [line.split() for line in setting["plan"] if line[0] != "#"]:
        if kind == "run":
            rate = float(words[0]) if words[0][0].isdigit() else best.get(arm if words[0] == "best" else words[0])
            if rate:
                runs += [Run(arm, rate, int(seed), int(words[2])) for seed in words[1].split(",")]
            continue
        tokens, rates = (setting["tokens"], words) if kind == "sweep" else (int(words[0]), words[1:])
        if kind == "sweep":
            rate, tried = best_rate(arm, rates, SEED_OF_SWEEP, tokens // 4, results)
            runs += tried
            rates = [rate / 2, rate, 2 * rate] if rate else []
        if not rates:
            continue
        best[arm], tried = best_rate(arm, rates, SEED_OF_RATE, tokens, results)
        runs += tried + [Run(arm, best[arm], seed, tokens) for seed in SEEDS if best[arm]]
    return runs


def folders_of(arms, work):
    """Of runs of arms at a rate, each a run's name up to _seed, with the seeds of a mean."""
    found = [path for arm in arms for seed in SEEDS for path in glob.glob(f"{work}/{arm}_seed{seed}_tokens*/")]
    return [path.rstrip("/") for path in found] or sys.exit(f"{work} has no runs of seeds {SEEDS} of {' '.join(arms)}")


def some_shards(cache, setting, tokens):
    """The shards that a run of so many tokens reads once, as a glob of a folder of links, so that an n-gram can read
    the same. All where the setting does not say how long a shard is."""
    shards, size = f"{cache}/{setting['train']}", setting.get("shard_tokens")
    if not size:
        return shards
    count = -(-tokens // size)
    found = sorted(glob.glob(shards))[:count]
    if len(found) < count:
        sys.exit(f"run.py: {cache} has {len(found)} training shards, but {count} are needed")
    folder = pathlib.Path(f"{cache}/first_{count}")
    folder.mkdir(exist_ok=True)
    for shard in found:
        link = folder / os.path.basename(shard)
        if not link.exists():
            link.symlink_to(os.path.abspath(shard))
    return f"{folder}/*.bin"


def mean_of(parts):
    """Of parts with a loss and tokens."""
    return round(sum(part["loss"] * part["tokens"] for part in parts) / sum(part["tokens"] for part in parts), 4)


def read_evaluation(path):
    """What `eval --json` writes: of all documents the loss, and the losses by the number of tokens in sight."""
    with open(path) as file:
        documents = [json.loads(line) for line in file]
    ranges = zip(*(document["by_tokens_in_sight"] for document in documents))
    return {"held_out_loss": mean_of(documents), "held_out_tokens": sum(document["tokens"] for document in documents),
            "by_position": [[parts[0]["first"], parts[0]["last"], mean_of(parts)] for parts in ranges],
            "by_document": [round(document["loss"], 4) for document in documents]}


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
        self.a, self.setting, self.results = a, read_setting(a.setting), Results(a.results)
        self.begun, self.running, self.stopped = set(), [], False  # names; (process, run, commands to come)

    def options(self, run):
        training = self.setting["training"]
        return {"sample-tokens": 0, "keep": 1, **Arm(run.arm, self.setting).options, **training,
                **self.setting["machine"], "data": some_shards(self.a.cache, self.setting, run.tokens),
                "lr": run.rate, "seed": run.seed, "steps": run.tokens // training["total-batch"]}

    def commands(self, run):
        """Training, and the losses of the held-out files, which go into a file beside the run's folder."""
        folder = f"{self.a.work}/{run.name}"
        begun = os.path.exists(f"{folder}/run.json")
        train = ["--resume", folder] if begun else ["--out", folder, *command_line(self.options(run))]
        pathlib.Path(f"{folder}.json").unlink(missing_ok=True)
        count = self.setting["held_out_documents"]["sweep" if run.seed == SEED_OF_SWEEP else "whole"]
        shards = enumerate(sorted(glob.glob(f"{self.a.cache}/{self.setting['held_out']}"))[:count])
        return [train, ["eval", "--from", folder, "--val-data", ",".join(f"{i}={path}" for i, path in shards),
                        "--batch", "1", "--json", f"{folder}.json", *command_line(self.setting["machine"])]]

    def start(self, run, commands):
        with open(f"{self.a.work}/{run.name}.txt", "a") as log:
            child = subprocess.Popen([self.a.program, *commands[0]], stdout=log, stderr=log)
        self.running.append((child, run, commands[1:]))

    def result(self, run):
        steps = {}
        with open(f"{self.a.work}/{run.name}/log.jsonl") as file:
            for entry in map(json.loads, file):
                if "start" in entry:
                    start = entry["start"]
                elif "ms" in entry:
                    steps[entry["step"]] = entry  # a step after a resume is there twice
        arm = Arm(run.arm, self.setting)
        return {
            "name": run.name, "arm": run.arm, "rate": run.rate, "seed": run.seed, "tokens": run.tokens,
            **read_evaluation(f"{self.a.work}/{run.name}.json"),
            "parameters": arm.parameters, "keys_per_query": round(arm.keys, 1), "flops": arm.flops * run.tokens,
            "seconds": round(sum(step["ms"] for step in steps.values()) / 1e3, 1), "jobs": self.a.jobs,
            "mib": max(step["peak_memory_mib"] for step in steps.values()),
            "version": start["version"], "device": start["device"],
            "options": {**arm.options, **self.setting["training"], **self.setting["machine"]},
            "curve": curve_of([steps[number] for number in sorted(steps)]),
        }

    def finish(self, child, run, commands):
        if child.returncode:
            print(f"{run.name}: status {child.returncode}, see {self.a.work}/{run.name}.txt", flush=True)
        elif commands:
            self.start(run, commands)
        else:
            self.results.add(self.result(run))
            print(f"{run.name}: {self.results.loss(run):.4f}", flush=True)

    def stop(self, *_):
        self.stopped = True
        for child, _, _ in self.running:
            child.terminate()

    def run_all(self):
        """What one run finds may name new ones."""
        os.makedirs(self.a.work, exist_ok=True)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.stop)
        while True:
            known = self.begun | self.results.lines.keys()
            runs = [run for run in queue(self.setting, self.results) if run.name not in known]
            if runs and len(self.running) < self.a.jobs and not self.stopped:
                self.begun.add(runs[0].name)
                self.start(runs[0], self.commands(runs[0]))
            elif not self.running:
                return self.stopped or not self.begun <= self.results.lines.keys()
            else:
                time.sleep(0.1)
            for entry in [entry for entry in self.running if entry[0].poll() is not None]:
                self.running.remove(entry)
                self.finish(*entry)


def parse(doc, words=(), **defaults):
    """The command line: words, and options with their defaults; those of None are required."""
    arguments = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for word in words:
        arguments.add_argument(word, nargs="*")
    for name, default in defaults.items():
        how = {"action": "store_true"} if default is False else {
            "default": default, "required": default is None, "type": str if default is None else type(default)}
        arguments.add_argument("--" + name.replace("_", "-"), **how)
    a = arguments.parse_intermixed_args()
    if "results" in a:
        a.results = a.results or f"{HERE}/results/{a.setting}"
    return a


if __name__ == "__main__":
    sys.exit(Runner(parse(__doc__, cache=None, work=None, setting="small", results="", program="./train_nsa",
                          jobs=2)).run_all())
