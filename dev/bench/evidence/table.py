#!/usr/bin/env python3
"""Makes a table and a figure of the results.

    table.py [--setting small | --results FOLDER] [--tokens N] [--minus ARM] [--svg FILE [--drawn ARM...]]

The tables: of each arm at its best rate the held-out loss over the seeds, mean and range, and what it cost, with all
tokens and, where there are such runs, with fewer, down to half of them; the n-grams of the same text; the rates that
were tried, on one seed; the loss by the number of tokens in sight. The figure has the training loss over the tokens,
the mean of the seeds, and the held-out loss behind each name. Each byte is seen once, but other parts of the same file
were seen before, so the training loss is the lower one.
"""
import math
import random
import sys

from run import SEED_OF_RATE, SEED_OF_SWEEP, SEEDS, Results, arguments_of, parse

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 800, 400, 50, 40, 16, 270
WORDS = {
    "nsa": "NSA", "full": "full attention", "window": "window alone", "window+selected": "selected and window",
    "window+compressed": "compressed and window", "alternating": "window and full, 3:1",
    "interleaved": "window and NSA in turn", "optimizer=muon": "Muon", "init=narrow": "narrow init",
    "qk-norm": "QK norm", "activation=relu2": "ReLU\u00b2", "head=untied": "untied head",
}
LETTERS = {"cmp-block": "l", "cmp-stride": "d", "slc-block": "l'", "slc-count": "n", "window": "w"}
COLORS = ["#d9534f", "#3a8fd9", "#2fa36b", "#b8860b", "#9a6fd0", "#e07bb0", "#5aa9a9", "#8a8a8a"]


def words_of(arm):
    """["NSA", "Muon", "smear"] of nsa+optimizer=muon+init=narrow+smear, whose init is what smear needs."""
    base = max((name for name in WORDS if arm == name or arm.startswith(name + "+")), key=len)
    options = arm[len(base):].split("+")[1:]
    if "smear" in options and "init=narrow" in options:
        options.remove("init=narrow")
    if "optimizer=muon" not in options:
        options.insert(0, "AdamW")
    named = [LETTERS[name] + " = " + value if name in LETTERS else name + equals + value
             for name, equals, value in (option.partition("=") for option in options)]
    return [WORDS.get(word, word) for word in [base] + named]


def titles_of(arms):
    """(the words of each arm less those that all have, the words that all have)."""
    words = [words_of(arm) for arm in arms]
    shared = [word for word in words[0][1:] if len(words) > 1 and all(word in arm for arm in words)]
    return [", ".join(word for word in arm if word not in shared) for arm in words], ", ".join(shared)


def round_ticks(low, high):
    """Four to nine round numbers from low to high, and how many decimals they have."""
    power = math.floor(math.log10((high - low) / 4))
    step = max(factor for factor in (1, 2, 5) if factor * 10 ** power <= (high - low) / 4) * 10 ** power
    ticks = [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return ticks, max(0, -power)


def mean(numbers):
    return sum(numbers) / len(numbers)


def by_arm(runs, tokens):
    """(arm, rate) -> its runs of so many tokens with the seeds that chose nothing, in the order of the mean loss."""
    arms = {}
    for run in runs:
        if run["seed"] in SEEDS and run["tokens"] == tokens:
            arms.setdefault((run["arm"], run["rate"]), []).append(run)
    return dict(sorted(arms.items(), key=lambda entry: mean([r["held_out_loss"] for r in entry[1]])))


def table_of(head, rows):
    lines = ["| " + " | ".join(row) + " |" for row in [head, *rows]]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def print_rows(head, rows):
    print(table_of(head, rows) + "\n")


def print_tables(arms, shorter, ngrams, runs):
    """The loss of the seed that chose the rate stands beside the mean, not in it; * marks uncommitted code."""
    rows, chose = [], {(run["arm"], run["rate"], run["tokens"]): run for run in runs if run["seed"] == SEED_OF_RATE}
    entries = [entry for runs in [arms] + shorter for entry in runs.items()]
    for (name, rate), whole in [e for e in entries if len(e[1]) == len(SEEDS)] or entries:
        losses = [r["held_out_loss"] for r in whole]
        seconds = mean([r["processor_seconds"] for r in whole])
        first = chose.get((name, rate, whole[0]["tokens"]))
        dirty = any(run["version"].endswith("-dirty") for run in whole)
        rows.append([f"`{name}`{'*' * dirty}", f"{whole[0]['tokens']:,}", f"{rate:g}", f"**{mean(losses):.4f}**",
                     ", ".join(f"{loss:.4f}" for loss in losses), f"{first['held_out_loss']:.4f}" if first else "",
                     f"{whole[0]['parameters']:,}",
                     f"{whole[0]['keys_per_query']:.0f}", f"{whole[0]['flops'] / 1e12:.1f}", f"{seconds:.0f} s"])
    print_rows(["arm", "tokens", "rate", "held-out loss", f"seeds {SEEDS[0]}, {SEEDS[1]}", f"seed {SEED_OF_RATE}",
                "parameters", "keys a query", "TFLOP", "processor"], rows)
    if ngrams:
        orders = list(ngrams[0]["loss_by_order"])
        print_rows(["n-gram, tokens"] + orders,
                   [[f"{n['tokens']:,}"] + [f"{n['loss_by_order'][order]:.3f}" for order in orders]
                    for n in sorted(ngrams, key=lambda n: n["tokens"])])


def rates_of(runs, name):
    sweep = sorted((run for run in runs if run["arm"] == name), key=lambda run: run["rate"])
    best = min(sweep, key=lambda run: run["held_out_loss"], default=None)
    edge = len(sweep) > 1 and best in (sweep[0], sweep[-1])
    return ", ".join(f"{run['rate'] * 1000:g}: {run['held_out_loss']:.3f}" for run in sweep) + " (at the edge)" * edge


def print_sweeps(runs, tokens):
    """Each rate in thousandths: loss, on one seed."""
    quarter = [run for run in runs if run["seed"] == SEED_OF_SWEEP and run["tokens"] == tokens // 4]
    whole = [run for run in runs if run["seed"] == SEED_OF_RATE and run["tokens"] == tokens]
    print_rows(["arm; rates in thousandths: loss", "a quarter of the tokens, the first 64 files", "all tokens, seed 1"],
               [[f"`{name}`", rates_of(quarter, name), rates_of(whole, name)]
                for name in sorted({run["arm"] for run in quarter + whole})])


def print_positions(arms):
    ranges = next(iter(arms.values()))[0]["by_position"]
    print_rows(["tokens in sight"] + [f"{first}..{last}" for first, last, _ in ranges],
               [[f"`{name}`, {rate:g}"] + [f"{mean([r['by_position'][i][2] for r in whole]):.3f}"
                                           for i in range(len(ranges))] for (name, rate), whole in arms.items()])


def print_differences(arms, minus, near):
    """By the number of tokens in sight: the loss of one arm less the others', and how much more that is far than near,
    each seed behind it."""
    of_minus = next(runs for (name, _), runs in arms.items() if name == minus)
    ranges = [f"{first}..{last}" for first, last, _ in of_minus[0]["by_position"]]
    within = max(i for i, (_, last, _) in enumerate(of_minus[0]["by_position"]) if last <= near)
    rows = []
    for (name, rate), runs in arms.items():
        if name == minus:
            continue
        by_seed = [[m[2] - a[2] for m, a in zip(other["by_position"], run["by_position"])]
                   for other, run in zip(of_minus, runs)]
        more = [row[-1] - row[within] for row in by_seed]
        rows.append([f"`{name}`, {rate:g}"] + [f"{mean(column):+.3f}" for column in zip(*by_seed)]
                    + [f"**{mean(more):+.3f}** ({', '.join(f'{x:+.3f}' for x in more)})"])
    print_rows([f"`{minus}` less"] + ranges + [f"{ranges[-1]} less {ranges[within]}"], rows)
    rows = []
    for (name, rate), runs in arms.items():
        if name != minus and all("by_document" in run for run in runs + of_minus):
            pairs = [zip(other["by_document"], run["by_document"]) for other, run in zip(of_minus, runs)]
            by_document = [[mean([m[1][i] - a[1][i] for m, a in of_seeds]) for i in range(len(ranges))]
                           for of_seeds in zip(*pairs)]
            rows.append([f"`{name}`, {rate:g}"] + [interval(column) for column in zip(*by_document)])
    if rows:
        print_rows([f"`{minus}` less, 95 % by document"] + ranges, rows)


def interval(values):
    """What holds 95 % of 2000 draws of as many documents, with repetition; it says nothing about other seeds."""
    draws = random.Random(1)
    means = sorted(mean(draws.choices(values, k=len(values))) for _ in range(2000))
    return f"{mean(values):+.4f} ({means[50]:+.4f} to {means[1949]:+.4f})"


def mean_curve(runs):
    points = []
    for together in zip(*[run["curve"] for run in runs]):
        points.append((together[0][0], mean([loss for _, loss in together])))
    return points


class Axes:
    def __init__(self, curves):
        # The first tenth of a run would leave no room for the rest.
        late = [loss for curve in curves for tokens, loss in curve if tokens > curve[-1][0] / 10]
        self.low, self.high = min(late) - 0.05, max(late)
        self.right = max(curve[-1][0] for curve in curves)

    def x(self, tokens):
        return LEFT + tokens / self.right * (WIDTH - LEFT - RIGHT)

    def y(self, loss):
        return TOP + (self.high - loss) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM)


def text(x, y, words, anchor="start", color="#888"):
    """No anchor: like start, without the word."""
    anchored = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{anchored} fill="{color}">{words}</text>'


def line(points, color, more=""):
    return (f'<polyline fill="none" stroke="{color}" stroke-width="1.8" {more} points="'
            + " ".join(f"{x:.1f},{y:.1f}" for x, y in points) + '"/>')


def best_rates(arms, runs):
    """Of each arm the runs at the rate that was best on the seed that chooses, of those rates that have all seeds."""
    chose = {(run["arm"], run["rate"], run["tokens"]): run["held_out_loss"] for run in runs
             if run["seed"] == SEED_OF_RATE}
    best = {}
    for (name, rate), whole in arms.items():
        loss = chose.get((name, rate, whole[0]["tokens"]), math.inf)
        if len(whole) == len(SEEDS) and (name not in best or loss < best[name][0]):
            best[name] = loss, rate, whole
    return {(name, rate): whole for name, (_, rate, whole) in best.items()}


def figure(arms):
    """No background and colours of middle brightness: it can be read on white and on black."""
    curves = {name: mean_curve(whole) for name, whole in arms.items()}
    axes = Axes(list(curves.values()))
    titles, shared = titles_of([name for name, _ in arms])
    width = WIDTH - RIGHT + max(RIGHT, 14 + 6.6 * (max(map(len, titles)) + len(": 0.000")))
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {HEIGHT}" '
             'font-family="sans-serif" font-size="12">']
    levels, decimals = round_ticks(axes.low, axes.high)
    for level in levels:
        parts.append(line([(LEFT, axes.y(level)), (WIDTH - RIGHT, axes.y(level))], "#888", 'stroke-opacity="0.3"'))
        parts.append(text(LEFT - 6, axes.y(level) + 4, f"{level:.{decimals}f}", "end"))
    millions, decimals = round_ticks(0, axes.right / 1e6)
    for at in millions:
        parts.append(text(axes.x(at * 1e6), HEIGHT - BOTTOM + 18, f"{at:.{decimals}f}", "middle"))
    title = "training loss, nats per byte, over the bytes of training, in millions"
    parts.append(text(axes.x(axes.right / 2), HEIGHT - 4, title, "middle"))
    for i, (name, words) in enumerate(zip(arms, titles)):
        color, loss = COLORS[i % len(COLORS)], f"{mean([run['held_out_loss'] for run in arms[name]]):.3f}"
        curve = [(axes.x(t), axes.y(l)) for t, l in curves[name] if l <= axes.high]
        parts.append(line(curve, color, 'stroke-dasharray="6 3"' if i >= len(COLORS) else ""))
        parts.append(text(WIDTH - RIGHT + 14, TOP + 16 + 20 * i, f"{words}: {loss}", color=color))
    for i, words in enumerate(["(numbers: held-out loss at the end)"] + [f"(all with {shared})"] * bool(shared)):
        parts.append(text(WIDTH - RIGHT + 14, TOP + 16 + 20 * (len(arms) + i), words))
    return "\n".join(parts + ["</svg>"]) + "\n"


def main():
    arguments = arguments_of(__doc__, [])
    arguments.add_argument("--tokens", type=int, help="of the whole runs; without it those of the longest run")
    arguments.add_argument("--svg")
    arguments.add_argument("--drawn", nargs="+", metavar="ARM", help="the arms of the figure; without it all")
    arguments.add_argument("--minus", metavar="ARM", help="whose loss less the others' is printed too")
    arguments.add_argument("--near", type=int, default=256, help="tokens that it sees whole")
    a = parse(arguments)
    results = Results(a.results)
    runs = results.of_runs()
    if not runs:
        sys.exit(f"table.py: {a.results} has no result of run.py")
    tokens = max(run["tokens"] for run in runs) if a.tokens is None else a.tokens
    arms = by_arm(runs, tokens)
    shorter = sorted({run["tokens"] for run in runs if tokens // 2 <= run["tokens"] < tokens}, reverse=True)
    print_tables(arms, [by_arm(runs, n) for n in shorter], results.beginning("ngram_"), runs)
    print_sweeps(runs, tokens)
    best = best_rates(arms, runs)
    if best:
        print_positions(best)
        if a.minus:
            print_differences(best, a.minus, a.near)
    if a.svg and best:
        with open(a.svg, "w") as file:
            file.write(figure({key: runs for key, runs in best.items() if not a.drawn or key[0] in a.drawn}))


if __name__ == "__main__":
    main()
