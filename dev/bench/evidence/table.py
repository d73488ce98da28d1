#!/usr/bin/env python3
"""Makes a table and a figure of the results.

    table.py [--results results] [--tokens N] [--svg FILE]

The table has one line for each arm whose sweep has ended: its best rate, its held-out loss with all tokens over the
seeds, mean and range, and what it cost; the n-grams of the same text stand below. The figure has the training loss
over the tokens, the mean of the seeds: each byte is seen once.
"""
import argparse
import glob
import json
import os
import sys

from run import SEED_OF_SWEEP

HERE = os.path.dirname(os.path.abspath(__file__))
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 720, 400, 50, 40, 16, 210
COLORS = ["#d9534f", "#3a8fd9", "#2fa36b", "#b8860b", "#9a6fd0", "#e07bb0", "#5aa9a9", "#8a8a8a"]


def load(folder, pattern):
    found = []
    for path in sorted(glob.glob(f"{glob.escape(folder)}/{pattern}.json")):
        with open(path) as file:
            found.append(json.load(file))
    return found


def mean(numbers):
    return sum(numbers) / len(numbers)


def by_arm(runs, tokens):
    """arm -> (runs of the sweep, whole runs at one rate with other seeds), in the order of the mean loss."""
    arms = {}
    for name in sorted({run["arm"] for run in runs}):
        sweep = [r for r in runs if r["arm"] == name and r["seed"] == SEED_OF_SWEEP and r["tokens"] == tokens // 4]
        whole = [r for r in runs if r["arm"] == name and r["seed"] != SEED_OF_SWEEP and r["tokens"] == tokens]
        if whole:
            arms[name] = sorted(sweep, key=lambda r: r["rate"]), whole
    return dict(sorted(arms.items(), key=lambda entry: mean([r["held_out_loss"] for r in entry[1][1]])))


def print_table(arms, ngrams):
    print("| arm | rate | held-out loss | seeds | lowest, highest | sweep: rate e-3: loss | parameters | keys a query | "
          "TFLOPs | processor |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, (sweep, whole) in arms.items():
        losses = [r["held_out_loss"] for r in whole]
        rates = ", ".join(f"{r['rate'] * 1000:g}: {r['held_out_loss']:.3f}" for r in sweep)
        print(f"| `{name}` | {whole[0]['rate']:g} | **{mean(losses):.4f}** | {len(losses)} | {min(losses):.4f}, "
              f"{max(losses):.4f} | {rates} | {whole[0]['parameters']} | {whole[0]['keys_per_query']:.0f} | "
              f"{whole[0]['flops'] / 1e12:.1f} | {mean([r['processor_seconds'] for r in whole]):.0f} s |")
    print()
    if ngrams:
        print("| n-gram, tokens of training | " + " | ".join(ngrams[0]["loss_by_order"]) + " |")
        print("|---" * (1 + len(ngrams[0]["loss_by_order"])) + "|")
    for ngram in sorted(ngrams, key=lambda n: n["tokens"]):
        print(f"| {ngram['tokens']:,} | " + " | ".join(f"{loss:.3f}" for loss in ngram["loss_by_order"].values()) + " |")
    print()
    ranges = next(iter(arms.values()))[1][0]["by_position"] if arms else []
    print("| tokens in sight | " + " | ".join(f"{first}..{last}" for first, last, _ in ranges) + " |")
    print("|---" * (1 + len(ranges)) + "|")
    for name, (_, whole) in arms.items():
        print(f"| `{name}` | " + " | ".join(f"{mean([r['by_position'][i][2] for r in whole]):.3f}"
                                            for i in range(len(ranges))) + " |")


def mean_curve(runs):
    points = []
    for together in zip(*[run["curve"] for run in runs]):
        points.append((together[0][0], mean([loss for _, loss in together])))
    return points


class Axes:
    def __init__(self, curves, floor):
        # The first tenth of a run would leave no room for the rest.
        late = [loss for curve in curves for tokens, loss in curve if tokens > curve[-1][0] / 10]
        self.low, self.high = min(late + floor) - 0.05, max(late)
        self.right = max(curve[-1][0] for curve in curves)

    def x(self, tokens):
        return LEFT + tokens / self.right * (WIDTH - LEFT - RIGHT)

    def y(self, loss):
        return TOP + (self.high - loss) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM)


def text(x, y, words, anchor="start", color="#888"):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{words}</text>'


def line(points, color, more=""):
    return (f'<polyline fill="none" stroke="{color}" stroke-width="1.8" {more} points="'
            + " ".join(f"{x:.1f},{y:.1f}" for x, y in points) + '"/>')


def figure(arms, ngrams):
    """No background and colours of middle brightness: it can be read on white and on black."""
    curves = {name: mean_curve(whole) for name, (_, whole) in arms.items()}
    tokens = next(iter(arms.values()))[1][0]["tokens"]
    same = [n for n in ngrams if abs(n["tokens"] - tokens) < 100]
    floor = [min(n["loss_by_order"].values()) for n in same]
    axes = Axes(list(curves.values()), floor)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
             'font-family="sans-serif" font-size="12">']
    step = 0.1 if axes.high - axes.low < 1.2 else 0.25
    level = -(-axes.low // step) * step
    while level < axes.high:
        parts.append(line([(LEFT, axes.y(level)), (WIDTH - RIGHT, axes.y(level))], "#888", 'stroke-opacity="0.3"'))
        parts.append(text(LEFT - 6, axes.y(level) + 4, f"{level:.2f}", "end"))
        level += step
    for quarter in range(5):
        at = axes.right * quarter / 4
        parts.append(text(axes.x(at), HEIGHT - BOTTOM + 18, f"{at / 1e6:.2f}", "middle"))
    parts.append(text(axes.x(axes.right / 2), HEIGHT - 4, "million bytes of training; nats per byte", "middle"))
    for loss in floor:
        parts.append(line([(LEFT, axes.y(loss)), (WIDTH - RIGHT, axes.y(loss))], "#888", 'stroke-dasharray="5 4"'))
    rows = [(name, COLORS[i % len(COLORS)], f"{mean([r['held_out_loss'] for r in arms[name][1]]):.3f}")
            for i, name in enumerate(arms)]
    for i, (name, color, loss) in enumerate(rows):
        curve = [(axes.x(t), axes.y(l)) for t, l in curves[name] if l <= axes.high]
        parts.append(line(curve, color))
        parts.append(text(WIDTH - RIGHT + 14, TOP + 16 + 20 * i, f"{name} {loss}", color=color))
    for i, loss in enumerate(floor):
        parts.append(text(WIDTH - RIGHT + 14, TOP + 16 + 20 * (len(rows) + i), f"- - best n-gram {loss:.3f}"))
    return "\n".join(parts + ["</svg>"]) + "\n"


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--results", default=f"{HERE}/results")
    arguments.add_argument("--tokens", type=int, help="of the whole runs; without it those of the longest run")
    arguments.add_argument("--svg")
    a = arguments.parse_args()
    runs = load(a.results, "*_lr*")
    if not runs:
        sys.exit(f"table.py: {a.results} has no result of run.py")
    arms = by_arm(runs, a.tokens or max(run["tokens"] for run in runs))
    ngrams = load(a.results, "ngram_*")
    print_table(arms, ngrams)
    if a.svg and arms:
        with open(a.svg, "w") as file:
            file.write(figure(arms, ngrams))


if __name__ == "__main__":
    main()
