#!/usr/bin/env python3
"""Does selection select? Where a trained model's attention lies, and how much of that the chosen blocks hold.

    selection.py --cache CACHE --work WORK [--setting small] [--files 16] ARM_lrRATE...

Reads the checkpoints of seeds 2 and 3 that run.py has left in WORK, computes some held-out files with dev/reference.py
in fp64, and appends a line for each run to runs.jsonl, which table.py prints. The true mass of a block is the share
that the selected branch's own q.k gives it in a softmax over all keys up to the query, the mean of a group's heads. The
first block, the query's own and the one before are always read; the others are open. Of their mass it counts, over all
queries that have a choice, what lies in as many of them as a query may choose:

    chosen   the best by compression's importance, as the model chooses
    random   drawn at random: what that gives on average, computed, not drawn
    recent   the last ones
    best     those of the greatest mass

And it measures the loss where the branch reads each of these sets in every layer, or none but the three forced blocks;
random is then drawn. Needs PyTorch and NumPy.
"""
import array
import glob
import math
import os
import sys
from collections import Counter

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
import reference  # noqa: E402  it says what is missing
import numpy as np  # noqa: E402
import torch  # noqa: E402
from ngram import shards_of  # noqa: E402
from run import Results, folders_of, parse, read_setting  # noqa: E402

WAYS = ["chosen", "random", "recent", "best"]


def forced_blocks(T, c):
    """[T, blocks] bool: those that every query reads; and those that it sees."""
    j, b = torch.arange(-(-T // c.slc_block)), (torch.arange(T) // c.slc_block)[:, None]
    seen = j <= b
    return ((j == 0) | (j >= b - 1)) & seen, seen


def open_blocks(way, importance, mass, c, generator):
    """[T, G, blocks] bool: those that a way chooses, of equal ones the lower."""
    forced, seen = forced_blocks(len(mass), c)
    allowed = (seen & ~forced)[:, None].expand_as(mass)
    scores = {
        "chosen": importance,
        "random": torch.rand(mass.shape, generator=generator, dtype=mass.dtype),
        "recent": torch.arange(mass.shape[-1], dtype=mass.dtype).expand_as(mass),
        "best": mass,
    }[way].masked_fill(~allowed, -math.inf)
    order = scores.argsort(dim=-1, descending=True, stable=True)[..., :c.slc_count - 3]
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, True) & allowed


def mass_of_blocks(q, k, c):
    """q [T, G, h, D], k [T, G, D] -> [T, G, blocks]: the mean over the heads of a group, 1 in all."""
    T = len(q)
    causal = torch.arange(T)[:, None] >= torch.arange(T)
    scores = torch.einsum("tghd,sgd->tghs", q, k) / math.sqrt(q.shape[-1])
    weights = scores.masked_fill(~causal[:, None, None], -math.inf).softmax(-1).mean(2)  # [T, G, s]
    padded = torch.nn.functional.pad(weights, (0, -T % c.slc_block))
    return padded.view(T, c.kv_groups, -1, c.slc_block).sum(-1)


def shares(importance, mass, c):
    """Sums over the queries and groups that have a choice: the mass of the open blocks, and each way's."""
    T = len(mass)
    forced, seen = forced_blocks(T, c)
    choosing = torch.arange(T) // c.slc_block + 1 > c.slc_count
    of_open = (mass * (seen & ~forced)[:, None]).sum(-1)
    sums = {"open": float(of_open[choosing].sum())}
    for way in WAYS:
        sums[way] = float((mass * open_blocks(way, importance, mass, c, None))[choosing].sum())
    candidates = (seen & ~forced).sum(-1).clamp(min=1)[:, None]
    sums["random"] = float((of_open * (c.slc_count - 3) / candidates)[choosing].sum())
    return sums


class Watch:
    """Stands in for the reference's attend() and select(). What it sees of each layer it counts; with a way it gives
    the selected branch the blocks of that way. "forced": none but those."""
    attend, select = staticmethod(reference.attend), staticmethod(reference.select)

    def __init__(self, c, way):
        self.c, self.way, self.calls = c, way, 0
        self.layers = [Counter() for _ in c.layers_of_nsa()]
        self.generator = torch.Generator().manual_seed(1)
        reference.attend, reference.select = self.on_attend, self.on_select

    def on_select(self, importance, c):
        self.importance = importance
        return self.select(importance, c)

    def on_attend(self, q, k, v, visible):
        """Of a layer of NSA the second of three calls is the selected branch's; others call once."""
        of_pass = [(i, branch) for i in range(self.c.layers) for branch in range(3 if self.c.kind(i) == "nsa" else 1)]
        layer, branch = of_pass[self.calls % len(of_pass)]
        self.calls += 1
        if branch == 1:
            mass = mass_of_blocks(q, k, self.c)
            self.layers[self.c.layers_of_nsa().index(layer)].update(shares(self.importance, mass, self.c))
            if self.way:
                visible = self.visible(mass)
        return self.attend(q, k, v, visible)

    def visible(self, mass):
        forced, _ = forced_blocks(len(mass), self.c)
        blocks = forced[:, None].expand_as(mass)
        if self.way != "forced":
            blocks = blocks | open_blocks(self.way, self.importance, mass, self.c, self.generator)
        t = torch.arange(len(mass))
        return blocks[:, :, t // self.c.slc_block] & (t[:, None] >= t)[:, None]


def evaluate(c, params, documents, way=None):
    """(mean loss, sums of each layer)."""
    losses, watch = [], Watch(c, way)
    for tokens in documents:
        logits, _ = reference.forward(tokens[:-1], params, c)
        losses.append(torch.nn.functional.cross_entropy(logits, tokens[1:]).item())
    return round(sum(losses) / len(losses), 4), watch.layers


def read_model(run):
    folder = os.path.dirname(sorted(glob.glob(f"{run}/step_*/model.safetensors"))[-1])
    with open(f"{folder}/config.json") as file:
        c = reference.read_config(file.read(), f"{folder}/config.json")
    tensors, _ = reference.read_safetensors(f"{folder}/model.safetensors")
    return c, {name: torch.from_numpy(tensors[name].astype(np.float64)) for name in reference.parameter_shapes(c)}


def read_documents(pattern, T, count):
    """So many of the held-out files, evenly spread."""
    shards = list(shards_of(pattern))
    spread = shards[::max(1, len(shards) // count)][:count]
    return [torch.tensor(array.array("H", shard)[:T].tolist()) for shard in spread]


def main():
    a = parse(__doc__, ["arms"], cache=None, work=None, setting="small", results="", files=16)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    setting = read_setting(a.setting)
    documents = read_documents(f"{a.cache}/{setting['held_out']}", setting["model"]["seq-len"], a.files)
    for path in folders_of(a.arms, a.work):
        c, params = read_model(path)
        loss, layers = evaluate(c, params, documents)
        losses = {way: evaluate(c, params, documents, way)[0] for way in WAYS + ["forced"]}
        run = os.path.basename(path)
        Results(a.results).add({"name": f"selection_{run}", "run": run, "files": len(documents), "loss": loss,
                                "layers": layers, "losses": losses})


if __name__ == "__main__":
    main()
