#!/usr/bin/env python3
"""Makes tables of the results.

    table.py [--setting small | --results FOLDER] [--tokens N] [--minus ARM]

Of each arm with N tokens, without it those of the longest run, the held-out loss over the seeds, mean and each, and
what it cost; the n-grams of the same text; the rates that were tried, on one seed; at the best rate the loss by the
number of tokens in sight, or that of --minus less the others'; what selection.py measured.
"""
import math
import sys
from statistics import fmean as mean

from run import SEED_OF_RATE, SEED_OF_SWEEP, SEEDS, Results, parse


def with_each(numbers, form):
    return f"{mean(numbers):{form}} ({', '.join(f'{number:{form}}' for number in numbers)})"


def print_table(head, rows):
    lines = ["| " + " | ".join(row) + " |" for row in [head, *rows]]
    print("\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]]) + "\n")


def by_arm(runs, tokens):
    """(arm, rate) -> its runs of so many tokens with the seeds that chose nothing, in the order of the mean loss."""
    arms = {}
    for run in runs:
        if run["seed"] in SEEDS and run["tokens"] == tokens:
            arms.setdefault((run["arm"], run["rate"]), []).append(run)
    return dict(sorted(arms.items(), key=lambda entry: mean([r["held_out_loss"] for r in entry[1]])))


def losses_that_chose(runs):
    """(arm, rate, tokens) -> loss of the seed that chooses among rates."""
    return {(run["arm"], run["rate"], run["tokens"]): run["held_out_loss"] for run in runs
            if run["seed"] == SEED_OF_RATE}


def print_arms(arms, runs):
    """The loss of the seed that chose the rate stands beside the mean, not in it; * marks uncommitted code."""
    rows, chose = [], losses_that_chose(runs)
    for (name, rate), whole in arms:
        losses, one = [r["held_out_loss"] for r in whole], whole[0]
        first = chose.get((name, rate, one["tokens"]))
        dirty = any(run["version"].endswith("-dirty") for run in whole)
        rows.append([f"`{name}`{'*' * dirty}", f"{one['tokens']:,}", f"{rate:g}", f"**{mean(losses):.4f}**",
                     ", ".join(f"{loss:.4f}" for loss in losses), f"{first:.4f}" if first else "",
                     f"{one['parameters']:,}", f"{one['keys_per_query']:.0f}", f"{one['flops'] / 1e12:.1f}"])
    print_table(["arm", "tokens", "rate", "held-out loss", f"seeds {SEEDS[0]}, {SEEDS[1]}", f"seed {SEED_OF_RATE}",
                 "parameters", "keys a query", "TFLOP"], rows)


def print_ngrams(lines):
    ngrams = sorted((line for line in lines if "loss_by_order" in line), key=lambda line: line["tokens"])
    if ngrams:
        print_table(["n-gram, tokens", *ngrams[0]["loss_by_order"]],
                    [[f"{n['tokens']:,}"] + [f"{loss:.3f}" for loss in n["loss_by_order"].values()] for n in ngrams])


def rates_of(runs, name):
    sweep = sorted((run for run in runs if run["arm"] == name), key=lambda run: run["rate"])
    best = min(sweep, key=lambda run: run["held_out_loss"], default=None)
    edge = len(sweep) > 1 and best in (sweep[0], sweep[-1])
    return ", ".join(f"{run['rate'] * 1000:g}: {run['held_out_loss']:.3f}" for run in sweep) + " (at the edge)" * edge


def print_sweeps(runs, tokens):
    """Each rate in thousandths: loss, on one seed."""
    quarter = [run for run in runs if run["seed"] == SEED_OF_SWEEP and run["tokens"] == tokens // 4]
    whole = [run for run in runs if run["seed"] == SEED_OF_RATE and run["tokens"] == tokens]
    head = ["arm; rates in thousandths: loss", "a quarter of the tokens, the first 64 files", "all tokens, seed 1"]
    print_table(head, [[f"`{name}`", rates_of(quarter, name), rates_of(whole, name)]
                       for name in sorted({run["arm"] for run in quarter + whole})])


def best_rates(arms, runs):
    """Of each arm the runs at the rate that was best on the seed that chooses, of those rates that have all seeds."""
    chose, best = losses_that_chose(runs), {}
    for (name, rate), whole in arms.items():
        loss = chose.get((name, rate, whole[0]["tokens"]), math.inf)
        if len(whole) == len(SEEDS) and (name not in best or loss < best[name][0]):
            best[name] = loss, rate, whole
    return {(name, rate): whole for name, (_, rate, whole) in best.items()}


def print_positions(arms, minus):
    """The loss by the number of tokens in sight; with `minus` its loss less the others', in the last column of each
    seed too."""
    ranges = [f"{first}..{last}" for first, last, _ in next(iter(arms.values()))[0]["by_position"]]
    losses = {key: [[loss for _, _, loss in run["by_position"]] for run in runs] for key, runs in arms.items()}
    base, rows = next((seeds for (name, _), seeds in losses.items() if name == minus), None), []
    for (name, rate), seeds in losses.items():
        cells = [f"{mean(column):.3f}" for column in zip(*seeds)]
        if base:
            columns = [[m - loss for m, loss in zip(*both)] for both in zip(zip(*base), zip(*seeds))]
            cells = [f"{mean(column):+.3f}" for column in columns[:-1]] + [with_each(columns[-1], "+.3f")]
        if name != minus:
            rows.append([f"`{name}`, {rate:g}", *cells])
    print_table([f"`{minus}` less" if base else "tokens in sight", *ranges], rows)


def print_selection(lines):
    """Of the models that selection.py measured: what their loss becomes if the selected branch reads other blocks, and
    what these hold of its attention that is open to choice; the mean of the seeds, and each."""
    arms, ways = {}, ["chosen", "random", "recent", "best", "forced"]
    for line in lines:
        arm, _, seed = line["name"].partition("_seed")
        if arm.startswith("selection_") and int(seed[0]) in SEEDS:
            arms.setdefault((arm.removeprefix("selection_"), seed.partition("_tokens")[2]), []).append(line)
    rows = []
    for (arm, tokens), runs in arms.items():
        more, held = [], []
        for run in runs:
            sums = {way: sum(layer[way] for layer in run["layers"]) for way in ["open", *ways[:-1]]}
            held.append([sums[way] / sums["open"] for way in ways[:-1]])
            more.append([run["losses"][way] - run["loss"] for way in ways])
        for what, found, form in (("loss, less the model's", more, "+.4f"), ("held, of what is open", held, ".3f")):
            rows.append([f"`{arm}`, {int(tokens):,}: {what}", *(with_each(column, form) for column in zip(*found))])
    if rows:
        print_table(["the selected branch reads", *ways], rows)


def main():
    a = parse(__doc__, setting="small", results="", tokens=0, minus="")
    results = Results(a.results)
    runs = results.of_runs() or sys.exit(f"table.py: {a.results} has no result of run.py")
    tokens = a.tokens or max(run["tokens"] for run in runs)
    arms = by_arm(runs, tokens)
    print_arms([entry for entry in arms.items() if len(entry[1]) == len(SEEDS)] or arms.items(), runs)
    print_ngrams(results.lines.values())
    print_sweeps(runs, tokens)
    best = best_rates(arms, runs)
    if best:
        print_positions(best, a.minus)
    print_selection(results.lines.values())


if __name__ == "__main__":
    main()
