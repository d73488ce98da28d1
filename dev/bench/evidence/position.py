#!/usr/bin/env python3
"""What an arm's reach buys: the loss of one arm minus another's, by the number of tokens in sight, with a bootstrap.

    position.py --cache CACHE --work FOLDER --minus 'window+optimizer=muon' ARM... [--out FILE]

Reads the checkpoints of the whole runs that run.py has left in FOLDER and evaluates each held-out file by itself. A
difference is the mean over files and seeds; the interval holds 95 % of 2000 draws of as many files with repetition, and
says nothing about other seeds. A positive number says that ARM is better. With up to --near tokens in sight both read
all of them, so what they differ by there is no matter of reach; the last line subtracts it.
"""
import argparse
import json
import os
import random
import re
import subprocess

from arms import command_line, read_setting
from run import HERE, SEEDS

DRAWS = 2000


def write_files(cache, length, folder):
    """Each held-out document as a file of text; returns their paths."""
    os.makedirs(folder, exist_ok=True)
    paths = []
    with open(f"{cache}/heldout_{length}.jsonl") as documents:
        for number, document in enumerate(map(json.loads, documents)):
            if len(document["text"]) < length - 1:
                continue  # the last one, which only ends the shard
            paths.append(f"{folder}/{number:04d}.txt")
            with open(paths[-1], "w") as file:
                file.write(document["text"])
    return paths


def losses_by_file(text):
    """What `eval --text` prints: of each file {(first, last): loss}."""
    files = []
    for line in text.splitlines():
        row = re.match(r" +(\d+)\.\.(\d+) +([0-9.]+) +\d+", line)
        if row:
            first, last, loss = row.groups()
            files[-1][int(first), int(last)] = float(loss)
        elif " on " in line and ": loss " in line:
            files.append({})
    return files


def evaluate(program, machine, run_folder, paths, length):
    done = subprocess.run([program, "eval", "--from", run_folder, "--seq-len", str(length)] + machine + ["--text"]
                          + paths, stdout=subprocess.PIPE, check=True)
    return losses_by_file(done.stdout.decode())


def runs_of(arm, results, tokens):
    """Its whole runs at the rate that has all seeds and, of several, the lowest mean loss."""
    of_rate = {}
    for path in sorted(os.listdir(results)):
        if path.startswith(f"{arm}_lr") and path.endswith(f"_tokens{tokens}.json"):
            with open(f"{results}/{path}") as file:
                result = json.load(file)
            if result["seed"] in SEEDS:
                of_rate.setdefault(result["rate"], []).append(result)
    most = max(map(len, of_rate.values()), default=0)
    full = [runs for runs in of_rate.values() if len(runs) == most]
    runs = min(full, key=lambda runs: sum(r["held_out_loss"] for r in runs), default=[])
    return [run["name"] for run in runs]


def mean_of_seeds(runs):
    """[file][range] -> loss, from the same of each run."""
    return [{key: sum(run[i][key] for run in runs) / len(runs) for key in runs[0][i]} for i in range(len(runs[0]))]


def interval(values, generator):
    """(mean, low, high)."""
    draws = sorted(sum(generator.choices(values, k=len(values))) / len(values) for _ in range(DRAWS))
    return sum(values) / len(values), draws[int(DRAWS * 0.025)], draws[int(DRAWS * 0.975)]


def compare(minus, arm, near):
    """Rows (name of the range, mean, low, high)."""
    generator = random.Random(1)
    by_file = [{key: m[key] - a[key] for key in m} for m, a in zip(minus, arm)]
    keys = sorted(by_file[0])
    rows = [(f"{key[0]}..{key[1]}", *interval([file[key] for file in by_file], generator)) for key in keys]
    within = max(key for key in keys if key[1] <= near)
    grown = [file[keys[-1]] - file[within] for file in by_file]
    return rows + [(f"{rows[-1][0]} less {within[0]}..{within[1]}", *interval(grown, generator))]


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("arms", nargs="+")
    arguments.add_argument("--minus", required=True, help="the arm whose loss stands first in the difference")
    arguments.add_argument("--cache", required=True)
    arguments.add_argument("--work", required=True)
    arguments.add_argument("--results", default=f"{HERE}/results")
    arguments.add_argument("--setting", default=f"{HERE}/small.json", help="run.py's, which says the machine")
    arguments.add_argument("--program", default="./train_nsa")
    arguments.add_argument("--tokens", type=int, default=1 << 20)
    arguments.add_argument("--seq-len", type=int, default=1024, help="of the held-out documents, one of corpus.py's")
    arguments.add_argument("--near", type=int, default=256, help="tokens that both arms see whole")
    arguments.add_argument("--out")
    a = arguments.parse_args()
    paths = write_files(a.cache, a.seq_len, f"{a.work}/heldout_{a.seq_len}")
    machine = command_line(read_setting(a.setting)["machine"])
    losses, seeds = {}, {}
    for arm in [a.minus] + a.arms:
        names = runs_of(arm, a.results, a.tokens)
        if not names:
            raise SystemExit(f"position.py: {a.results} has no whole run of {arm} with {a.tokens} tokens: see run.py")
        runs = [evaluate(a.program, machine, f"{a.work}/{name}", paths, a.seq_len) for name in names]
        losses[arm] = mean_of_seeds(runs)
        seeds[arm] = len(names)
    print(f"| tokens in sight, {len(paths)} files | `{a.minus}` less | mean | 95 % |\n|---|---|---|---|")
    found = {"minus": a.minus, "seeds": seeds, "files": len(paths), "seq_len": a.seq_len, "differences": {}}
    for arm in a.arms:
        rows = compare(losses[a.minus], losses[arm], a.near)
        found["differences"][arm] = [[name] + [round(x, 4) for x in numbers] for name, *numbers in rows]
        for name, mean, low, high in rows:
            print(f"| {name} | `{arm}` | {mean:+.4f} | {low:+.4f} to {high:+.4f} |")
    if a.out:
        with open(a.out, "w") as file:
            file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
