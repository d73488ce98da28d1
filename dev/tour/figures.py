#!/usr/bin/env python3
"""figures.py: draws the figures of the documents from the program's numbers, by Python's standard library alone.

    dev/tour/figures.py BUILD             all figures, from BUILD/tour, BUILD/tour_lanes and the files below
    dev/tour/figures.py BUILD --measure   before that, the first two anew: trains tiny (two minutes) for what a trained
                                          model selects, and times a step of two ranks; on a machine that does nothing
                                          else

The files are dev/tour/selection.json and dev/tour/timeline.txt, and for speeds and losses dev/bench/gpu.md and
dev/bench/evidence/results.
"""

import html
import json
import math
import os
import re
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
CMP, SLC, WIN, GREY, RED, VIOLET = "#d07a1f", "#2f7fe0", "#2c9a4b", "#8a8a8a", "#d1495b", "#8e63d6"
TIMELINE = "timeline --model 125m --layers 4 --seq-len 1024 --batch 1 --total-batch 2048"


def run(*command, **options):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, **options).stdout


class Figure:
    """An SVG. #767676 is readable on white and on black; viewers that know the background get more contrast."""

    def __init__(self, name, width, height, title):
        self.path, self.size = os.path.join(HERE, "figures", name + ".svg"), (width, height)
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'font-family="Helvetica, Arial, sans-serif" font-size="13">',
            f"<title>{html.escape(title)}</title>",
            "<style>text { fill: #767676 } .line { stroke: #767676 } "
            "@media (prefers-color-scheme: light) { text { fill: #333333 } } "
            "@media (prefers-color-scheme: dark) { text { fill: #d0d0d0 } } text.on { fill: #ffffff }</style>",
        ]

    def add(self, tag, content=None, **attributes):
        """An element; attributes that are None are left out, and _ in a name is -."""
        given = "".join(f' {k.rstrip("_").replace("_", "-")}="{v}"' for k, v in attributes.items() if v is not None)
        self.parts.append(f"<{tag}{given}/>" if content is None else f"<{tag}{given}>{html.escape(content)}</{tag}>")

    def text(self, x, y, text, anchor="start", size=13, on=False, bold=False, color=None):
        self.add(
            "text",
            text,
            x=f"{x:.1f}",
            y=f"{y:.1f}",
            text_anchor=anchor,
            font_size=size,
            class_="on" if on else None,
            font_weight="bold" if bold else None,
            style=f"fill: {color}" if color else None,
        )

    def box(self, x, y, width, height, color, opacity=1.0, outline=False, round=0):
        paint = f'fill="none" stroke="{color}" stroke-width="1.5"' if outline else f'fill="{color}"'
        self.parts.append(
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" rx="{round}" {paint} '
            f'opacity="{opacity}"/>'
        )

    def line(self, x0, y0, x1, y1, color=None, width=1.0, arrow=False, dashed=False):
        self.add(
            "line",
            x1=f"{x0:.1f}",
            y1=f"{y0:.1f}",
            x2=f"{x1:.1f}",
            y2=f"{y1:.1f}",
            stroke=color,
            class_=None if color else "line",
            stroke_width=width,
            stroke_dasharray="4 3" if dashed else None,
        )
        if arrow:
            length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
            u, v = (x1 - x0) / length * 6, (y1 - y0) / length * 6
            corners = ((x1, y1), (x1 - u - v / 2, y1 - v + u / 2), (x1 - u + v / 2, y1 - v - u / 2))
            self.area(corners, color or "#767676", 1)

    def path_of(self, points, color, width=2.0):
        d = "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        self.add("path", d=d, fill="none", stroke=color, stroke_width=width)

    def area(self, points, color, opacity=0.85):
        d = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polygon points="{d}" fill="{color}" opacity="{opacity}"/>')

    def legend(self, x, y, entries, step):
        for i, (color, text) in enumerate(entries):
            self.box(x + i * step, y - 10, 12, 12, color)
            self.text(x + i * step + 17, y, text)

    def write(self):
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        with open(self.path, "w") as out:
            out.write("\n".join(self.parts) + "\n</svg>\n")


# ----------------------------------------------------------------------------------------------------------------------
# Page 1.


def journey(tour):
    lines = run(tour, "journey").splitlines()
    value = lambda start: next(line for line in lines if line.startswith(start))[len(start) :].strip()
    row = lambda start: value(start).replace("...", "").split()[-5:][:3]
    loss = value("loss of input 100:").split(",")[0]
    steps = [
        ("text", ["the", "farmer", "wants"], GREY),
        ("token", ["input 97  'a'", "target 110  'n'", "(byte values)"], GREY),
        ("forward", [f"loss {loss}", "ln 256 is 5.545"], SLC),
        ("backward", ["row 97 of dE:"] + row("  gradient"), VIOLET),
        ("AdamW", ["row 97 of E:"] + row("  weights after the update"), WIN),
    ]
    f = Figure("01_journey", 800, 150, "One token from the text to an updated row of the embedding")
    for i, (name, texts, color) in enumerate(steps):
        x = 10 + i * 160
        f.box(x, 10, 130, 130, color, outline=True, round=6)
        f.text(x + 65, 32, name, "middle", bold=True)
        for j, text in enumerate(texts):
            f.text(x + 65, 58 + 22 * j, text, "middle", size=12)
        if i:
            f.line(x - 28, 75, x - 3, 75, arrow=True)
    f.write()


# ----------------------------------------------------------------------------------------------------------------------
# Page 2.


def parameters(tour):
    colors = {
        "MLP": GREY,
        "embedding": VIOLET,
        "q": SLC,
        "k, v": WIN,
        "o": "#1d9aa8",
        "phi": CMP,
        "gates": RED,
        "others": "#b08d57",
    }
    f = Figure("02_parameters", 800, 250, "Parameters of the two presets by what they are for")
    for i, model in enumerate(("125m", "tiny")):
        rows = [
            line.rsplit(None, 3 if "%" in line else 1)
            for line in run(tour, "parameters", "--model", model).splitlines()
        ]
        total, x, y = int(rows[-1][1]), 70.0, 30 + 85 * i
        f.text(10, y + 26, model, bold=True)
        for name, count, *_ in rows[:-1]:
            width = 710 * int(count) / total
            f.box(x, y, max(width - 1, 0.5), 40, colors[name])
            if width > 32:
                f.text(x + width / 2, y + 25, f"{100 * int(count) / total:.1f} %", "middle", size=11, on=True)
            x += width
        f.text(70, y - 8, f"{total:,} parameters")
    for i, name in enumerate(colors):
        f.box(70 + i % 4 * 180, 195 + i // 4 * 26, 12, 12, colors[name])
        f.text(88 + i % 4 * 180, 206 + i // 4 * 26, name)
    f.write()


# ----------------------------------------------------------------------------------------------------------------------
# README.


def speed():
    """Tokens a second by T, as dev/bench/gpu.md has them."""
    with open(os.path.join(HERE, "..", "bench", "gpu.md")) as file:
        table = file.read().partition("| beside PyTorch")[2].partition("\n\n")[0]
    rows = [[int(number) for number in row]
            for row in re.findall(r"\| \d+ x (\d+) \| (\d+), [^|]*\|[^|]*\| (\d+), ", table)]
    lines = [
        ("NSA, this program", [(t, nsa) for t, nsa, _ in rows], SLC),
        ("dense, PyTorch", [(t, dense) for t, _, dense in rows], CMP),
    ]
    f = Figure("speed", 800, 330, "Tokens a second that an H200 trains, by the length of the sequences")
    left, bottom, height = 80, 270, 225
    at = lambda t, rate: (left + 150 * math.log2(t / 2048) + 60, bottom - height * rate / 550e3)
    for rate in range(0, 600, 100):
        f.line(left, at(2048, rate * 1e3)[1], 770, at(2048, rate * 1e3)[1], GREY, 0.5)
        f.text(left - 8, at(2048, rate * 1e3)[1] + 4, f"{rate},000" if rate else "0", "end", size=12)
    for t, _ in lines[0][1]:
        f.text(at(t, 0)[0], bottom + 20, str(t), "middle", size=12)
    f.text(425, bottom + 44, "tokens in a sequence; 125 million parameters, 32,768 tokens a step", "middle")
    f.text(10, 22, "tokens a second in training, one H200, bf16")
    for name, points, color in lines:
        f.path_of([at(*point) for point in points], color, 2.5)
        others = dict(next(line[1] for line in lines if line[0] != name))
        for t, rate in points:
            x, y = at(t, rate)
            f.add("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=4, fill=color)
            f.text(x, y + (-10 if rate > others[t] else 20), f"{round(rate, -2):,}", "middle", size=12, color=color)
    f.legend(520, 22, [(color, name) for name, _, color in lines], 140)
    f.write()


# ----------------------------------------------------------------------------------------------------------------------
# EVIDENCE.

SMALL_BLOCKS = "+cmp-block=4+cmp-stride=4+window=56"
CURVES_8M = {
    "NSA, Muon, QK-norm": f"nsa+optimizer=muon+init=narrow+smear{SMALL_BLOCKS}+qk-norm_lr0.008",
    "full attention, Muon": "full+optimizer=muon+init=narrow+smear_lr0.008",
    "NSA, Muon": f"nsa+optimizer=muon+init=narrow+smear{SMALL_BLOCKS}_lr0.008",
    "NSA, AdamW": f"nsa+init=narrow+smear{SMALL_BLOCKS}_lr0.004",
    "full attention, AdamW": "full+init=narrow+smear_lr0.004",
}
CURVES_42M = {
    "windows and full attention, 3:1": "alternating+optimizer=muon+init=narrow+smear_lr0.004",
    "full attention": "full+optimizer=muon+init=narrow+smear_lr0.004",
    "window alone": "window+optimizer=muon+init=narrow+smear+window=768_lr0.004",
    "NSA": f"nsa+optimizer=muon+init=narrow+smear{SMALL_BLOCKS}_lr0.004",
    "NSA without the selected branch": f"window+compressed+optimizer=muon+init=narrow+smear{SMALL_BLOCKS}_lr0.004",
}


def curves(name, setting, tokens, losses, titles):
    """Training loss over the bytes of training, the mean of seeds 2 and 3, and the held-out losses at the end."""
    with open(os.path.join(HERE, "..", "bench", "evidence", "results", setting, "runs.jsonl")) as file:
        runs = {run["name"]: run for run in map(json.loads, file)}
    f = Figure(name, 800, 330, f"Training loss over {tokens // 1000000} million bytes")
    left, top, bottom, right = 50, 40, 280, 520
    low, high = losses[0], losses[-1]
    x_of = lambda read: left + (right - left) * read / tokens
    at = lambda read, loss: (x_of(read), bottom - (bottom - top) * (loss - low) / (high - low))
    for loss in losses:
        f.line(left, at(0, loss)[1], right, at(0, loss)[1], GREY, 0.5)
        f.text(left - 8, at(0, loss)[1] + 4, f"{loss}", "end", size=12)
    for read in range(0, tokens + 1, tokens // 4):
        f.text(x_of(read), bottom + 20, f"{read / 1e6:.0f}", "middle", size=12)
    f.text(10, 22, "training loss, nats per byte; behind each name the held-out loss at the end")
    f.text((left + right) / 2, bottom + 44, "million bytes of training", "middle")
    for i, ((title, run), color) in enumerate(zip(titles.items(), (CMP, SLC, WIN, RED, VIOLET))):
        seeds = [runs[f"{run}_seed{seed}_tokens{tokens}"] for seed in (2, 3)]
        points = [(one[0], (one[1] + other[1]) / 2) for one, other in zip(*(seed["curve"] for seed in seeds))]
        f.path_of([at(read, loss) for read, loss in points if loss <= high], color, 2)
        end = sum(seed["held_out_loss"] for seed in seeds) / 2
        f.text(right + 14, top + 20 * (i + 1), f"{title}: {end:.3f}", size=12, color=color)
    f.write()


# ----------------------------------------------------------------------------------------------------------------------
# README and page 3.


def keys_per_query(tour):
    lines = run(tour, "keys", "--model", "125m", "--seq-len", "8192").splitlines()[1:]
    rows = [[float(x) for x in line.split()] for line in lines][::32] + [[float(x) for x in lines[-1].split()]]
    f = Figure("keys_per_query", 800, 330, "Keys that a query reads, by its position, in the 125m preset")
    left, bottom, width, height, most = 70, 280, 700, 240, 8192
    at = lambda t, keys: (left + width * t / 8192, bottom - height * keys / most)
    sums = [(t, [0, win, win + slc, win + slc + cmp]) for t, cmp, slc, win, _ in rows]
    for part, color in ((0, WIN), (1, SLC), (2, CMP)):
        f.area([at(t, s[part]) for t, s in sums] + [at(t, s[part + 1]) for t, s in reversed(sums)], color)
    f.path_of([at(row[0], row[4]) for row in rows], GREY, 2.5)
    for keys in (0, 2048, 4096, 6144, 8192):
        f.line(left - 5, at(0, keys)[1], left, at(0, keys)[1])
        f.text(left - 9, at(0, keys)[1] + 4, str(keys), "end", size=12)
        f.text(at(keys, 0)[0], bottom + 18, str(keys), "middle", size=12)
    f.line(left, bottom, left + width, bottom)
    f.line(left, bottom, left, bottom - height)
    f.text(left + width / 2, bottom + 40, "position of the query", "middle")
    f.text(left, 22, "keys that it reads")
    f.text(*[a + b for a, b in zip(at(5200, 5200), (-14, 0))], "full attention: all before it", "end")
    last = rows[-1]
    labels = [
        (last[3] / 2, "window 512"),
        (last[3] + last[2] / 2, f"selected {last[2]:.0f}"),
        (last[3] + last[2] + last[1] / 2, f"compressed {last[1]:.0f}"),
    ]
    for keys, text in labels:
        f.text(left + width - 8, at(0, keys)[1] + 4, text, "end", size=12, on=True)
    f.write()


def strip_and_overlap():
    with open(os.path.join(HERE, "selection.json")) as file:
        saved = json.load(file)
    t, blocks = 221, saved["blocks"][221]
    f = Figure("03_one_query", 800, 420, "The keys that one query sees, and the overlap of blocks in equation 9")
    left, cell = 105, 2.65
    f.text(10, 22, f"What query {t} of 256 sees in the trained tiny (layer 1, group 0)", bold=True)
    for row, name in enumerate(("compressed", "selected", "window")):
        y = 40 + 40 * row
        f.text(10, y + 17, name)
        f.box(left, y, 256 * cell, 24, GREY, 0.25)
    for i in range((t + 1 - 8) // 4 + 1):
        f.box(left + (4 * i) * cell, 40 + (i % 2) * 12, 8 * cell - 1, 11, CMP)
    for block in blocks:
        end = min(16 * block + 16, t + 1)
        f.box(left + 16 * block * cell, 80, (end - 16 * block) * cell - 1, 24, SLC)
        f.text(left + (16 * block + 2) * cell, 97, str(block), size=11, on=True)
    f.box(left + (t - 15) * cell, 120, 16 * cell, 24, WIN)
    for token in (0, 64, 128, 192, 256):
        f.text(left + token * cell, 162, str(token), "middle", size=11)
    f.line(left + (t + 0.5) * cell, 34, left + (t + 0.5) * cell, 150, RED, 1.5)
    f.text(left + (t + 4) * cell, 176, f"the query, {t}", "middle", size=11, color=RED)

    f.text(
        10,
        215,
        "Equation 9 with l = 32, d = 16, l' = 64: tokens that a compressed block shares with block j",
        bold=True,
    )
    left, cell = 190, 5.2
    f.box(left + 16 * cell, 232, 64 * cell, 24, SLC)
    f.text(left + 48 * cell, 249, "selection block j: tokens 64 j to 64 j + 63", "middle", size=12, on=True)
    for i, name in enumerate(("4j - 1", "4j", "4j + 1", "4j + 2", "4j + 3")):
        y, begin = 264 + 26 * i, 16 * i
        inside = (max(begin, 16), min(begin + 32, 80))
        f.box(left + begin * cell, y, 32 * cell, 20, CMP, 0.35)
        f.box(left + inside[0] * cell, y, (inside[1] - inside[0]) * cell, 20, CMP)
        f.text(60, y + 15, f"block {name}", size=12)
        f.text(left + 100 * cell, y + 15, f"{inside[1] - inside[0]} / 16 = {(inside[1] - inside[0]) // 16}", size=12)
    for edge in (16, 80):
        f.line(left + edge * cell, 228, left + edge * cell, 396, GREY, 1, dashed=True)
    f.text(
        left + 48 * cell, 412, "p_slc[j] = 1 p[4j-1] + 2 p[4j] + 2 p[4j+1] + 2 p[4j+2] + 1 p[4j+3]", "middle", size=12
    )
    f.write()


def mask():
    with open(os.path.join(HERE, "selection.json")) as file:
        saved = json.load(file)
    f = Figure("mask", 800, 590, "Which tokens each query of a trained model reads, in one layer and group")
    left, top, cell = 60, 40, 2
    f.text(
        left, 24, "One text of 256 tokens, layer 1 and group 0 of the trained tiny: a row is a query, a column a token"
    )
    f.box(left, top, 256 * cell, 256 * cell, GREY, 0.15)
    for t, blocks in enumerate(saved["blocks"]):
        window = max(0, t - 15)
        for block in blocks:
            begin, end = 16 * block, min(16 * block + 16, t + 1)
            f.box(left + begin * cell, top + t * cell, (end - begin) * cell, cell, SLC)
        f.box(left + window * cell, top + t * cell, (t + 1 - window) * cell, cell, WIN)
    for token in (0, 64, 128, 192, 256):
        f.text(left + token * cell, top + 256 * cell + 18, str(token), "middle", size=12)
        f.text(left - 8, top + token * cell + 4, str(token), "end", size=12)
    x = left + 256 * cell + 20
    f.box(x, 60, 12, 12, SLC)
    f.text(x + 18, 71, "in a selected block")
    f.box(x, 86, 12, 12, WIN)
    f.text(x + 18, 97, "in the window")
    f.text(x, 135, "Not drawn: the averages")
    f.text(x, 153, "of all blocks of 8 tokens")
    f.text(x, 171, "before the query.")
    f.write()


# ----------------------------------------------------------------------------------------------------------------------
# Page 4.


def memory(tour):
    lines = [line for line in run(tour, "memory", "--model", "125m", "--batch", "1").splitlines() if " x " in line]
    names = {
        "fc1 (N": "fc1: the MLP before SiLU",
        "act (N": "act: after SiLU",
        "branch outputs": "branch outputs",
        "logits": "logits, one chunk",
        "keys and values": "keys and values",
        "q (B": "q",
    }
    colors = {
        "fc1: the MLP before SiLU": VIOLET,
        "act: after SiLU": "#b48ae8",
        "branch outputs": SLC,
        "q": WIN,
        "keys and values": "#1d9aa8",
        "x, x_mid, attn, norms": CMP,
        "logits, one chunk": RED,
        "all others": GREY,
    }
    groups = {name: [0.0] * 3 for name in colors}
    for line in lines:
        name, sizes = line.split(" x ", 1)[1], [float(x) for x in line.split()[-3:]]
        kind = next((kind for start, kind in names.items() if name.startswith(start)), "all others")
        if name.startswith(("x (N", "x_mid", "attn (N", "attn_normed", "mlp_normed")):
            kind = "x, x_mid, attn, norms"
        groups[kind] = [a + b for a, b in zip(groups[kind], sizes)]
    f = Figure("04_memory", 800, 270, "Activations of a training step by buffer, with --recompute 0, 1 and 2")
    for level in range(3):
        x, y = 130.0, 34 + 56 * level
        f.text(10, y + 24, f"--recompute {level}", bold=True)
        for name, sizes in groups.items():
            width = 560 * sizes[level] / 1600
            f.box(x, y, max(width - 1, 0.5), 36, colors[name])
            if width > 24:
                f.text(x + width / 2, y + 23, f"{sizes[level]:.0f}", "middle", size=11, on=True)
            x += width
        f.text(x + 8, y + 23, f"{sum(sizes[level] for sizes in groups.values()):.0f} MiB")
    f.text(130, 22, "MiB of one sequence of 2048 tokens, 125m, fp32", size=12)
    for i, name in enumerate(groups):
        f.box(130 + i % 3 * 220, 204 + i // 3 * 22, 12, 12, colors[name])
        f.text(148 + i % 3 * 220, 215 + i // 3 * 22, name, size=12)
    f.write()


# ----------------------------------------------------------------------------------------------------------------------
# Page 5.


def softmax(tour):
    lines = run(tour, "softmax").splitlines()
    keys = [[float(x) for x in line.split()] for line in lines[1:4]]
    r = float(lines[4].split()[-1])
    f = Figure("05_softmax", 800, 230, "Softmax and its backward pass for one query and three keys")
    columns = [
        ("S = q.k / sqrt(D)", 1, 2.5, GREY),
        ("P' = e^(S - LSE')", 3, 0.5, SLC),
        ("dP = dO.v", 4, 4.5, VIOLET),
        ("dP - r", None, 5.0, VIOLET),
        ("dS = P' (dP - r)", 5, 0.9, RED),
    ]
    for c, (title, index, most, color) in enumerate(columns):
        middle = 130 + c * 150
        f.text(middle, 22, title, "middle", size=12, bold=True)
        f.line(middle, 34, middle, 166)
        for i, key in enumerate(keys):
            y, x = 40 + 48 * i, key[4] - r if index is None else key[index]
            width = 62 * x / most
            f.box(min(middle, middle + width), y, max(abs(width), 1), 22, color)
            f.text(middle + (6 if x < 0 else -6), y + 15, f"{x:.3f}", "start" if x < 0 else "end", size=11)
            if c == 0:
                f.text(10, y + 16, f"key {i}", size=12)
    f.text(10, 208, f"r = dO.O = {r:.3f} is the mean of dP under P, so the three dS add up to 0.", size=12)
    f.write()


# ----------------------------------------------------------------------------------------------------------------------
# Page 6.


def shuffle(lanes):
    text = run(lanes).split("sums:")[1].splitlines()[1:]
    rows = [[int(x) for x in line.split(":")[1].split()] for line in text if ":" in line]
    names = [line.split(":")[0] for line in text if ":" in line]
    f = Figure("06_shuffle", 800, 270, "A sum over eight lanes by shuffles")
    place = lambda lane: 190 + lane * 80
    for lane in range(8):
        f.text(place(lane), 24, f"lane {lane}", "middle", size=12, bold=True)
    for i, row in enumerate(rows):
        y = 48 + 62 * i
        f.text(10, y + 18, names[i], size=12)
        for lane, value in enumerate(row):
            f.box(place(lane) - 26, y, 52, 26, (GREY, SLC, VIOLET, WIN)[i], round=4)
            f.text(place(lane), y + 18, str(value), "middle", size=12, on=True)
            if i:
                flip = (4, 2, 1)[i - 1]
                for source in (lane, lane ^ flip):
                    f.line(place(source), y - 36, place(lane), y - 1, width=0.8)
    f.write()


# ----------------------------------------------------------------------------------------------------------------------
# Page 7.


def online(tour):
    lines = run(tour, "online").splitlines()
    f = Figure("07_online", 800, 250, "Online softmax over three tiles of four scores")
    for tile, line in enumerate(lines[1:4]):
        x = [float(word) for word in line.split()][1:]
        scores, m, rescale, total, weighted = x[:4], x[4], x[5], x[10], x[11]
        left = 20 + 265 * tile
        f.box(left, 8, 230, 234, GREY, outline=True, round=6)
        f.text(left + 115, 28, f"tile {tile}", "middle", bold=True)
        for i, score in enumerate(scores):
            color = RED if score == m and (tile == 0 or rescale < 1) else SLC
            f.box(left + 25 + 48 * i, 118 - 18 * score, 32, max(18 * score, 1), color)
            f.text(left + 41 + 48 * i, 134, f"{score:.0f}", "middle", size=12)
        f.text(left + 12, 160, f"largest so far, m = {m:.0f}", size=12)
        f.text(left + 12, 182, f"old sums times {rescale:.5f}", size=12)
        f.text(left + 12, 204, f"total = {total:.5f}", size=12)
        f.text(left + 12, 226, f"weighted sum = {weighted:.5f}", size=12)
        if tile:
            f.line(left - 32, 125, left - 3, 125, arrow=True)
    f.write()


# ----------------------------------------------------------------------------------------------------------------------
# Page 8.


def lane_maps(lanes):
    out, maps, name = run(lanes), {}, ""
    for line in out.splitlines():
        if ": lane" in line:
            name = line[0]
            maps[name] = {}
        elif name and "," in line and ":" not in line:
            lane, *cells = line.split()
            for register, cell in enumerate(cells):
                maps[name][tuple(int(x) for x in cell.split(","))] = (int(lane), register)
        elif line.startswith("banks"):
            name = ""
    f = Figure("08_lanes", 800, 560, "Which lane holds which element of A, B and C in mma m16n8k16")
    cell = 20
    shades = {0: CMP, 13: SLC, 22: VIOLET}
    for name, left, top, rows, columns, title in (
        ("A", 30, 50, 16, 16, "A, 16 x 16"),
        ("B", 400, 50, 16, 8, "B, 16 x 8"),
        ("C", 610, 50, 16, 8, "C, 16 x 8"),
    ):
        f.text(left, top - 22, title, bold=True)
        f.text(left, top - 6, {"A": "query rows", "B": "columns are keys", "C": "scores"}[name], size=11)
        for (row, column), (lane, _) in maps[name].items():
            x, y = left + column * cell, top + row * cell
            f.box(x, y, cell - 1, cell - 1, shades.get(lane, GREY), 1 if lane in shades else 0.3)
            f.text(x + cell / 2 - 0.5, y + 14, str(lane), "middle", size=10, on=lane in shades)
        f.box(left - 1, top - 1, columns * cell + 1, rows * cell + 1, GREY, outline=True)
    y = 395
    f.legend(30, y, [(CMP, "lane 0"), (SLC, "lane 13"), (VIOLET, "lane 22")], 90)
    f.text(330, y, "The left half of A and C look alike: two C side by side are the next A.", size=12)
    banks = [line.split() for line in out.split("banks:")[1].splitlines()[1:9]]
    f.text(
        30,
        428,
        "Banks of shared memory that the first 16 bytes of 8 rows of a tile lie in (a row has 128 bytes, 32 banks)",
        size=12,
        bold=True,
    )
    for kind, x0 in ((1, 30), (2, 420)):
        f.text(
            x0, 448, ("as they come: all 8 in banks 0 to 3", "swizzled: 8 times 4 different banks")[kind - 1], size=12
        )
        for i, bank in enumerate(banks):
            f.box(x0, 456 + 12 * i, 320, 10, GREY, 0.2)
            f.box(x0 + 10 * int(bank[kind].split("-")[0]), 456 + 12 * i, 40, 10, RED if kind == 1 else WIN)
    f.write()


# ----------------------------------------------------------------------------------------------------------------------
# Page 9.


def number_in(path, pattern):
    with open(os.path.join(HERE, "..", "..", path)) as file:
        return int(re.search(pattern, file.read()).group(1))


def ladder():
    level1 = number_in("dev/ladder/attention_level1.cuh", r"int TILE = (\d+)")
    bare = number_in("dev/ladder/attention_bare.cuh", r"int ROWS = (\d+)")
    rows = number_in("lib/cuda/attention_kernels.h", r"GENERATIONS\[\] = \{\{ 80, (\d+)")
    rungs = [
        ("0  plain", 1, 32, GREY),
        ("1  shared tiles", level1, 32, CMP),
        ("2  bare mma", bare, 2048, SLC),
        ("3  tensor cores", rows, 2048, WIN),
        ("4  gathered rows", rows, 2048, VIOLET),
    ]
    f = Figure("09_ladder", 800, 240, "What each rung of the ladder shares and multiplies at once")
    f.text(170, 22, "query rows that share one read of a key", size=12, bold=True)
    f.text(500, 22, "multiply-adds in one instruction of a warp", size=12, bold=True)
    for i, (name, shared, products, color) in enumerate(rungs):
        y = 36 + 36 * i
        f.text(10, y + 17, name)
        f.box(170, y, 240 * shared / 128, 24, color)
        f.text(178 + 240 * shared / 128, y + 17, str(shared), size=12)
        f.box(500, y, 240 * products / 2048, 24, color)
        f.text(508 + 240 * products / 2048, y + 17, str(products), size=12)
    f.text(
        10,
        230,
        "Rung 4 has the rows of rung 3, but only those that chose the block. Counted in the source; no times.",
        size=12,
    )
    f.write()


# ----------------------------------------------------------------------------------------------------------------------
# Page 10.


def timeline():
    events = {0: [], 1: []}
    with open(os.path.join(HERE, "timeline.txt")) as file:
        for line in file:
            if line.startswith("rank"):
                _, rank, seconds, what = line.split(None, 3)
                events[int(rank)].append((float(seconds), what.strip()))
    end = max(seconds for list in events.values() for seconds, _ in list)
    f = Figure("10_timeline", 800, 440, "A step of two ranks: what each computes, and when its gradients travel")
    left, width = 70, 710
    at = lambda seconds: left + width * max(seconds, 0) / end
    colors = {
        "forward": SLC,
        "classifier": VIOLET,
        "backward": CMP,
        "embedding": "#b08d57",
        "wait": RED,
        "norm": GREY,
        "update": WIN,
    }
    for rank, list in events.items():
        top, before = 40 + 180 * rank, list[0][0]
        f.text(10, top + 18, f"rank {rank}", bold=True)
        sent, buckets, layer = [], 0, 3
        for seconds, what in list[1:]:
            kind = what.split()[0]
            if kind in colors:
                f.box(at(before), top, max(at(seconds) - at(before) - 1, 1), 26, colors[kind])
                label = f"layer {layer}" if kind == "backward" else kind
                layer -= kind == "backward"
                if at(seconds) - at(before) > 36:
                    f.text((at(before) + at(seconds)) / 2, top + 17, label, "middle", size=11, on=True)
                before = seconds
            elif kind == "leaves":
                sent.append(seconds)
        buckets = len(sent)
        for seconds, what in list:
            if what.startswith("arrives"):
                bucket = int(what.split()[1])
                begin, y = sent[buckets - 1 - bucket], top + 32 + 11 * (buckets - 1 - bucket)
                f.box(at(begin), y, max(at(seconds) - at(begin), 2), 9, GREY)
                f.text(at(begin) - 4, y + 8, f"{bucket}", "end", size=9)
    f.text(
        left,
        24,
        "seconds; grey bars: a bucket of gradients, from when it is handed to MPI until its sum is seen",
        size=12,
    )
    for seconds in (0, 0.5, 1, 1.5, 2):
        if seconds < end:
            f.line(at(seconds), 395, at(seconds), 400)
            f.text(at(seconds), 413, f"{seconds:.1f}", "middle", size=11)
    f.line(left, 395, left + width, 395)
    f.legend(left, 434, [(color, name) for name, color in colors.items()], 100)
    f.write()


# ----------------------------------------------------------------------------------------------------------------------
# Page 11.


def parameter():
    added = {}
    with open(os.path.join(HERE, "11_head_scale.diff")) as diff:
        for line in diff:
            if line.startswith("+++"):
                file = line.split("/", 1)[1].strip()
            elif line.startswith("+"):
                added[file] = added.get(file, 0) + 1
    f = Figure(
        "11_parameter", 800, 330, "Where a learnt scale per head stands, forward and backward, and lines by file"
    )

    def node(x, y, width, lines, color):
        f.box(x, y, width, 44, color, outline=True, round=6)
        for i, line in enumerate(lines):
            f.text(x + width / 2, y + 19 + 17 * i, line, "middle", size=12, bold=i == 0)

    f.text(10, 50, "forward")
    node(90, 24, 150, ["attn", "kept by each layer"], SLC)
    node(290, 24, 130, ["times s[head]", "the new tensor"], RED)
    node(470, 24, 150, ["scaled", "one for all layers"], CMP)
    node(670, 24, 110, ["o_proj", "and residual"], GREY)
    for x in (240, 420, 620):
        f.line(x + 3, 46, x + 47, 46, arrow=True)
    f.text(10, 150, "backward")
    node(90, 124, 150, ["dattn", "= dscaled * s"], SLC)
    node(290, 94, 130, ["ds[head] +=", "sum dscaled * attn"], RED)
    node(470, 124, 150, ["dscaled", "= dx W"], CMP)
    node(670, 124, 110, ["dW of o_proj", "needs scaled"], GREY)
    f.line(667, 146, 623, 146, arrow=True)
    f.line(467, 152, 243, 152, arrow=True)
    f.line(467, 134, 423, 118, arrow=True)
    f.line(165, 70, 287, 112, dashed=True, arrow=True)
    f.line(560, 70, 700, 122, dashed=True, arrow=True)
    f.text(90, 200, "lines of the diff by file", bold=True, size=12)
    for i, (file, lines) in enumerate(added.items()):
        f.text(270, 222 + 18 * i, file, "end", size=12)
        f.box(280, 211 + 18 * i, 9 * lines, 13, VIOLET)
        f.text(286 + 9 * lines, 222 + 18 * i, str(lines), size=12)
    f.write()


# ----------------------------------------------------------------------------------------------------------------------
# Page 12.


def rounding(tour):
    lines = run(tour, "rounding").splitlines()[2:62]
    rows = [[float(x) for x in line.split()] for line in lines]
    f = Figure("12_rounding", 800, 330, "A weight that is moved by 0.0006 in each of 60 steps, in fp32 and in bf16")
    left, top, width, height = 80, 45, 690, 230
    at = lambda step, value: (left + width * step / 60, top + height * (1.0665 - value) / 0.0685)
    for value in (1.0, 1.0078125, 1.015625, 1.0234375, 1.03125, 1.0390625, 1.046875, 1.0546875, 1.0625):
        f.line(left, at(0, value)[1], left + width, at(0, value)[1], GREY, 0.5, dashed=True)
        f.text(left - 8, at(0, value)[1] + 4, f"{value:.5f}", "end", size=11)
    for column, color in ((4, SLC), (5, CMP), (3, VIOLET), (2, RED), (1, WIN)):
        f.path_of([at(0, 1)] + [at(row[0], row[column]) for row in rows], color, 2.5 if column == 1 else 1.6)
    for step in (0, 20, 40, 60):
        f.text(at(step, 0)[0], top + height + 22, str(step), "middle", size=12)
    f.text(
        left + width / 2, top + height + 40, "step; dashed lines are neighbouring numbers of bf16", "middle", size=12
    )
    for i, (color, name) in enumerate(
        (
            (WIN, "fp32"),
            (RED, "bf16 alone, nearest"),
            (VIOLET, "bf16 alone, stochastic"),
            (SLC, "copy of fp32, nearest"),
            (CMP, "copy of fp32, stochastic"),
        )
    ):
        x = (80, 150, 300, 470, 635)[i]
        f.box(x, 12, 12, 12, color)
        f.text(x + 17, 23, name, size=12)
    f.write()


# ----------------------------------------------------------------------------------------------------------------------


def measure(build):
    tour, folder = os.path.join(build, "tour"), os.path.join(build, "tour_run")
    text, found = os.path.join(build, "tour_text.txt"), os.path.join(build, "tour_selection.json")
    run("./train_nsa", "--out", folder)
    with open(text, "w") as out:
        out.write(run(tour, "text"))
    run("./train_nsa", "inspect", "--from", folder, "--text", text, "--json", found)
    with open(found) as file:
        layer = json.load(file)["layers"][1]["groups"][0]
    with open(text) as file, open(os.path.join(HERE, "selection.json"), "w") as out:
        blocks = ",\n".join(json.dumps(blocks, separators=(",", ":")) for blocks in layer["blocks"])
        out.write('{"text": ' + json.dumps(file.read()) + ',\n"blocks": [\n' + blocks + "\n]}\n")
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    with open(os.path.join(HERE, "timeline.txt"), "w") as out:
        out.write(f"OMP_NUM_THREADS=1 mpirun -np 2 build/tour {TIMELINE}\n")
        out.write(run("mpirun", "-np", "2", tour, *TIMELINE.split(), env=environment))


def main():
    if sys.argv[1:] in (["-h"], ["--help"]):
        return print(__doc__)
    if len(sys.argv) < 2 or sys.argv[1].startswith("-") or sys.argv[2:] not in ([], ["--measure"]):
        sys.exit(__doc__)
    build = sys.argv[1]
    if sys.argv[2:]:
        measure(build)
    tour, lanes = os.path.join(build, "tour"), os.path.join(build, "tour_lanes")
    for draw in (journey, parameters, keys_per_query, memory, softmax, online, rounding):
        draw(tour)
    for draw in (shuffle, lane_maps):
        draw(lanes)
    curves("curves_8m", "learning", 8388608, (0.8, 1.2, 1.6, 2.0, 2.4), CURVES_8M)
    curves("curves_42m", "long", 41943040, (0.6, 0.8, 1.0, 1.2, 1.4), CURVES_42M)
    for draw in (speed, strip_and_overlap, mask, ladder, timeline, parameter):
        draw()


if __name__ == "__main__":
    main()
