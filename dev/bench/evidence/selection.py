#!/usr/bin/env python3
"""Does selection select? Where a trained model's attention lies, and how much of that the chosen blocks hold.

    selection.py --cache CACHE --work FOLDER [--setting small] [--files 16] [--losses] [--out FILE] RUN...
    selection.py --documents NEEDLE/items_1024.jsonl --last 1 --cache NEEDLE --work FOLDER RUN...
    selection.py --selftest

Reads checkpoints that run.py has left in FOLDER, and computes each held-out file with dev/reference.py in fp64. The
true mass of a block is the share that the selected branch's own q.k gives it in a softmax over all keys up to the
query, the mean of a group's heads. The first block, the query's own and the one before are always read; of the mass of
the others, the open ones, the table says which share lies in as many of them as a query may choose, if these are

    chosen   the best by compression's importance, as the model chooses
    random   drawn at random: what that gives on average, computed, not drawn
    recent   the last ones
    best     those of the greatest mass

over all queries that have a choice, or over the last of each file, such as that which looks up. "of the gap" is
(chosen - random) / (best - random): 0 is chance, 1 the best there is. With --losses it also says what the held-out
loss is when the branch reads each of these sets in every layer, or none but the three forced blocks; random is then
drawn. Nothing is trained for the sets that training never chose.

Needs PyTorch and NumPy. RUN may be an arm with its rate, as in a result's name up to _seed: then all its seeds.
"""
import array
import glob
import json
import math
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
import reference  # noqa: E402  it says what is missing
import numpy as np  # noqa: E402
import torch  # noqa: E402
from ngram import shards_of  # noqa: E402
from run import arguments_of, folders_of, parse, read_setting  # noqa: E402
from table import mean, table_of  # noqa: E402

WAYS = ["chosen", "random", "recent", "best"]
END_OF_TEXT = 0  # of bytes


def forced_blocks(T, c):
    """[T, blocks] bool: those that every query reads; and those that it sees."""
    j, b = torch.arange(-(-T // c.slc_block)), (torch.arange(T) // c.slc_block)[:, None]
    seen = j <= b
    return ((j == 0) | (j >= b - 1)) & seen, seen


def best_of(scores, allowed, count):
    """[T, G, blocks] bool: the `count` allowed blocks of the highest scores, of equal ones the lower."""
    order = scores.masked_fill(~allowed, -math.inf).argsort(dim=-1, descending=True, stable=True)[..., :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, True) & allowed


def sets_of(importance, mass, c, generator):
    """The name of a way -> [T, G, blocks] bool, the open blocks that it chooses."""
    forced, seen = forced_blocks(len(mass), c)
    allowed = (seen & ~forced)[:, None].expand_as(mass)
    scores = {
        "chosen": importance,
        "random": torch.rand(mass.shape, generator=generator, dtype=mass.dtype),
        "recent": torch.arange(mass.shape[-1], dtype=mass.dtype).expand_as(mass),
        "best": mass,
    }
    return {way: best_of(scores[way], allowed, c.slc_count - 3) for way in WAYS}


def mass_of_blocks(q, k, c):
    """q [T, G, h, D], k [T, G, D] -> [T, G, blocks]: the mean over the heads of a group, 1 in all."""
    T = len(q)
    causal = torch.arange(T)[:, None] >= torch.arange(T)
    scores = torch.einsum("tghd,sgd->tghs", q, k) / math.sqrt(q.shape[-1])
    weights = scores.masked_fill(~causal[:, None, None], -math.inf).softmax(-1).mean(2)  # [T, G, s]
    padded = torch.nn.functional.pad(weights, (0, -T % c.slc_block))
    return padded.view(T, c.kv_groups, -1, c.slc_block).sum(-1)


def shares(importance, mass, c, last=None):
    """Sums over the queries and groups that have a choice, or the `last` of them: their number, the mass of the forced
    and of the open blocks, and of the latter what each way holds."""
    T = len(mass)
    forced, seen = forced_blocks(T, c)
    choosing = torch.arange(T) // c.slc_block + 1 > c.slc_count
    if last:
        choosing &= torch.arange(T) >= T - last
    sums = {"queries": int(choosing.sum()) * c.kv_groups}
    sums["forced"] = float((mass * forced[:, None])[choosing].sum())
    of_open = (mass * (seen & ~forced)[:, None]).sum(-1)
    sums["open"] = float(of_open[choosing].sum())
    for way, blocks in sets_of(importance, mass, c, None).items():
        sums[way] = float((mass * blocks)[choosing].sum())
    candidates = (seen & ~forced).sum(-1).clamp(min=1)[:, None]
    sums["random"] = float((of_open * (c.slc_count - 3) / candidates)[choosing].sum())
    return sums


class Watch:
    """Stands in for the reference's attend() and select(). What it sees of each layer it counts; with a way it gives
    the selected branch the blocks of that way. "forced": none but those."""

    def __init__(self, c, way=None, last=None):
        self.c, self.way, self.last = c, way, last
        self.layers = [dict() for _ in c.layers_of_nsa()]
        self.generator = torch.Generator().manual_seed(1)
        self.calls = 0
        self.attend, self.select = reference.attend, reference.select

    def __enter__(self):
        reference.attend, reference.select = self.on_attend, self.on_select
        return self

    def __exit__(self, *_):
        reference.attend, reference.select = self.attend, self.select

    def on_select(self, importance, c):
        self.importance = importance
        return self.select(importance, c)

    def on_attend(self, q, k, v, visible):
        """Of a layer of NSA the second of three calls is the selected branch's; others call once."""
        of_pass = [(i, branch) for i in range(self.c.layers) for branch in range(3 if self.c.kind(i) == "nsa" else 1)]
        layer, branch = of_pass[self.calls % len(of_pass)]
        self.calls += 1
        if branch == 1:
            layer = self.c.layers_of_nsa().index(layer)
            mass = mass_of_blocks(q, k, self.c)
            for name, value in shares(self.importance, mass, self.c, self.last).items():
                self.layers[layer][name] = self.layers[layer].get(name, 0) + value
            if self.way:
                visible = self.visible(mass)
        return self.attend(q, k, v, visible)

    def visible(self, mass):
        T, c = len(mass), self.c
        forced, seen = forced_blocks(T, c)
        blocks = forced[:, None].expand_as(mass)
        if self.way != "forced":
            blocks = blocks | sets_of(self.importance, mass, c, self.generator)[self.way]
        t = torch.arange(T)
        all_there_are = (t // c.slc_block + 1 <= c.slc_count)[:, None, None] & (self.way != "forced")
        blocks = blocks | (seen[:, None] & all_there_are)
        return blocks[:, :, t // c.slc_block] & (t[:, None] >= t)[:, None]


def evaluate(c, params, documents, last, way=None):
    """(mean loss, sums of each layer)."""
    losses = []
    with Watch(c, way, last) as watch, torch.no_grad():
        for tokens in documents:
            logits, _ = reference.forward(tokens[:-1], params, c)
            losses.append(torch.nn.functional.cross_entropy(logits, tokens[1:]).item())
    return sum(losses) / len(losses), watch.layers


def checkpoint_of(run):
    steps = sorted(glob.glob(f"{glob.escape(run)}/step_*/model.safetensors"))
    if not steps:
        sys.exit(f"selection.py: {run} has no checkpoint: expected a folder that run.py has left in --work")
    return os.path.dirname(steps[-1])


def read_model(folder):
    with open(f"{folder}/config.json") as file:
        c = reference.read_config(file.read(), f"{folder}/config.json")
    if not c.layers_of_nsa():
        sys.exit(f"selection.py: {folder} has --attention {c.attention}, which selects nothing")
    tensors, _ = reference.read_safetensors(f"{folder}/model.safetensors")
    return c, {name: torch.from_numpy(tensors[name].astype(np.float64)) for name in reference.parameter_shapes(c)}


def read_documents(a, setting):
    """As many as --files, evenly spread: the held-out ones, or --documents, of needle.py's items those of one hop."""
    if a.documents:
        with open(a.documents) as file:
            found = [one["text"].encode() for one in map(json.loads, file) if one.get("hops", 1) == 1]
        documents = [[END_OF_TEXT] + list(text) for text in found]
    else:
        shards = shards_of(f"{a.cache}/{setting['held_out']}")
        documents = [array.array("H", shard)[:setting["model"]["seq-len"]].tolist() for shard in shards]
    if len(documents) > a.files:
        documents = [documents[i * len(documents) // a.files] for i in range(a.files)]
    return [torch.tensor(tokens, dtype=torch.long) for tokens in documents]


def of_run(path, documents, last, losses):
    c, params = read_model(checkpoint_of(path))
    loss, layers = evaluate(c, params, documents, last)
    found = {"run": os.path.basename(path), "files": len(documents), "loss": round(loss, 4)}
    found["layers"] = [{name: round(value, 6) for name, value in layer.items()} for layer in layers]
    if losses:
        found["losses"] = {way: round(evaluate(c, params, documents, last, way)[0], 4) for way in WAYS + ["forced"]}
    return found


def row_of(layers):
    """Shares of sums: of all mass the forced blocks', of the open mass each way's, and the part of the gap."""
    total = {name: sum(layer[name] for layer in layers) for name in layers[0]}
    held = {way: total[way] / total["open"] for way in WAYS}
    gap = (held["chosen"] - held["random"]) / (held["best"] - held["random"])
    return [total["forced"] / total["queries"]] + [held[way] for way in WAYS] + [gap]


def spread(values):
    return f"{mean(values):.2f}" + (f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else "")


def print_tables(runs):
    """A row for each layer and one for all of them: the mean over the runs, and the range."""
    count, rows = len(runs[0]["layers"]), []
    for name, layers in [(str(i + 1), [i]) for i in range(count)] + [("all", list(range(count)))]:
        of_runs = [row_of([run["layers"][i] for i in layers]) for run in runs]
        rows.append([name, *(spread(column) for column in zip(*of_runs))])
    print(table_of(["layer", "in the forced blocks, of all", *WAYS, "of the gap"], rows))
    if "losses" in runs[0]:
        cells = [[run["losses"][way] - run["loss"] for run in runs] for way in runs[0]["losses"]]
        row = [f"{mean(cell):+.4f} ({min(cell):+.4f} to {max(cell):+.4f})" for cell in cells]
        print("\n" + table_of(["the branch reads", *runs[0]["losses"]], [["loss, less the model's own", *row]]))


def expect(name, found, expected):
    if abs(found - expected) > 1e-13:
        sys.exit(f"selection.py: {name} is {found}, expected {expected}")


def selftest():
    """A hand-made attention: blocks of 2 tokens, 7 of them, n = 4, one group of one head with D = 1. Query 13 sees
    blocks 0 to 6, reads 0, 5 and 6 always, and may choose one of 1 to 4. A key ln w gets the weight w."""
    c = reference.Config(layers=1, dim=1, heads=1, kv_groups=1, head_dim=1, cmp_block=2, cmp_stride=2, slc_block=2,
                         slc_count=4, window=2, phi_hidden=1, mlp_hidden=1, attention="nsa", vocab_size=2,
                         rope_base=10000.0, norm_eps=1e-6, qk_norm="off", smear="off", head="tied")
    weights = [1, 1, 2, 3, 10, 20, 1, 0.5, 3, 4, 6, 2, 1, 1]  # blocks 2, 5, 30, 1.5, 7, 8, 2: 55.5 in all
    q = torch.ones(14, 1, 1, 1, dtype=torch.float64)
    k = torch.tensor(weights, dtype=torch.float64).log()[:, None, None]
    mass = mass_of_blocks(q, k, c)
    for block, expected in enumerate([2, 5, 30, 1.5, 7, 8, 2]):
        expect(f"the mass of block {block}", float(mass[13, 0, block]) * 55.5, expected)
    importance = torch.zeros_like(mass)
    importance[..., 1] = importance[..., 4] = 1  # of equal ones the lower
    before, after = (shares(importance[:T], mass[:T], c) for T in (13, 14))
    for name, expected in [("queries", 1), ("forced", 12 / 55.5), ("open", 43.5 / 55.5), ("chosen", 5 / 55.5),
                           ("random", 43.5 / 4 / 55.5), ("recent", 7 / 55.5), ("best", 30 / 55.5)]:
        expect(name, after[name] - before[name], expected)
    expect("the part of the gap", row_of([{"queries": 1, "forced": 0.5, "open": 0.5, "chosen": 0.3, "random": 0.1,
                                           "recent": 0.2, "best": 0.4}])[-1], 2 / 3)
    print("selection.py: the hand-made attention has the shares that it was made with")


def main():
    if "--selftest" in sys.argv:
        return selftest()
    arguments = arguments_of(__doc__)
    arguments.add_argument("runs", nargs="+", metavar="RUN")
    arguments.add_argument("--files", type=int, default=16)
    arguments.add_argument("--documents", help="instead of the held-out files")
    arguments.add_argument("--last", type=int, metavar="N", help="counts the last N queries of a document alone")
    arguments.add_argument("--losses", action="store_true")
    arguments.add_argument("--out")
    a = parse(arguments)
    torch.set_num_threads(1)
    documents = read_documents(a, read_setting(a.setting))
    everything = []
    for name in a.runs:
        runs = [of_run(path, documents, a.last, a.losses) for path in folders_of(name, a.work)]
        print(f"\n`{name}`, {len(runs)} seeds, {len(documents)} files of up to {max(map(len, documents))} tokens\n")
        print_tables(runs)
        everything += runs
    if a.out:
        with open(a.out, "w") as file:
            file.write(json.dumps(everything) + "\n")


if __name__ == "__main__":
    main()
