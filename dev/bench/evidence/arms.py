#!/usr/bin/env python3
"""The arms of a comparison: their options, their widths for equal parameters, and what they cost.

    arms.py [--setting small.json] [--program ./train_nsa] [ARM...]      prints them

An arm is a name of ARMS and options of the trainer behind it: nsa, full+optimizer=muon, window+smear. The setting has
the model of NSA. An arm with fewer parameters gets a wider MLP, and the window alone reads as many keys for a query,
on average over a sequence, as NSA in its three branches together; alternating, where every fourth layer has full
attention and the others a window, on average over its layers too; interleaved has windows, as NSA's, and NSA in turn.
The program's own tensors say what a model has.
"""
import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
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
REFERENCE = "nsa"
TOLERANCE = 0.02
GPT2_TOKENS = 50257
# Tensors of a branch, which nothing reads where the branch is left out. Compression chooses the blocks of the selected
# branch, so its keys stay with that.
OF_BRANCH = {
    "cmp": ["v_cmp_proj", "phi_v"],
    "slc": ["k_slc_proj", "v_slc_proj"],
    "win": ["k_win_proj", "v_win_proj"],
}
TO_CHOOSE = ["k_cmp_proj", "phi_k"]


def command_line(options):
    words = []
    for name, value in options.items():
        words += [f"--{name}"] if value is None else [f"--{name}", str(value)]
    return words


def kinds_of(options):
    """nsa, full or window, of each layer."""
    pattern = options.get("attention", "nsa").split(",")
    return [pattern[i % len(pattern)] for i in range(int(options["layers"]))]


def branches_of(options):
    """Those of its layers of NSA, or the window's where it has none."""
    if "nsa" not in kinds_of(options):
        return ["win"]
    chosen = options.get("branches", "all")
    return ["cmp", "slc", "win"] if chosen == "all" else chosen.split(",")


def pairs(branch, options, tokens):
    """Keys that the queries of one sequence read in a branch of NSA, as lib/model/shape.h counts."""
    o = {name: int(value) for name, value in options.items() if str(value).isdigit()}
    if branch == "win":
        return sum(min(t + 1, o["window"]) for t in range(tokens))
    if branch == "cmp":
        return sum(max(0, (t + 1 - o["cmp-block"]) // o["cmp-stride"] + 1) for t in range(tokens))
    size = o["slc-block"]
    return sum(min(t // size, o["slc-count"] - 1) * size + t % size + 1 for t in range(tokens))


def pairs_of_layer(kind, options, tokens):
    if kind == "full":
        return tokens * (tokens + 1) / 2
    branches = branches_of(options) if kind == "nsa" else ["win"]
    return sum(pairs(branch, options, tokens) for branch in branches)


def keys_per_query(options):
    """The mean of the layers."""
    tokens, kinds = int(options["seq-len"]), kinds_of(options)
    return sum(kinds.count(kind) * pairs_of_layer(kind, options, tokens) for kind in set(kinds)) / len(kinds) / tokens


def window_of_equal_keys(model, options):
    """The narrowest window, in steps of 8, that has no fewer keys than NSA; all tokens where none has."""
    wanted = keys_per_query(model)
    for window in range(8, model["seq-len"], 8):
        if keys_per_query({**options, "window": window}) >= wanted:
            return window
    return model["seq-len"]


def options_of(arm, model):
    """The arm's options, a dictionary from name to value; a flag's value is None."""
    base = max((name for name in ARMS if arm == name or arm.startswith(name + "+")), key=len, default=None)
    if base is None:
        sys.exit(f"arms.py: '{arm}' is no arm: expected one of {', '.join(ARMS)}, and +OPTION=VALUE or +FLAG behind it")
    options = {**model, **ARMS[base]}
    for option in arm[len(base):].split("+")[1:]:
        name, equals, value = option.partition("=")
        options[name] = value if equals else None
    if base in ("window", "alternating") and "+window=" not in arm:
        options["window"] = window_of_equal_keys(model, options)
    kinds = kinds_of(options)
    if "nsa" not in kinds:
        for name in OF_NSA + (["window"] if "window" not in kinds else []):
            del options[name]
    return options


def tensors_of(program, options):
    """The program's own tensors, name -> shape, of a model that it trained for a step on short sequences."""
    with tempfile.TemporaryDirectory() as folder:
        tokens = str(2 * max(int(options.get("slc-block", 1)), int(options.get("cmp-block", 1))))
        words = command_line({**options, "seq-len": tokens, "batch": 1, "total-batch": tokens, "steps": 1,
                              "tokenizer": "bytes", "sample-tokens": 0, "device": "cpu", "out": folder + "/run"})
        done = subprocess.run([program] + words, capture_output=True)
        if done.returncode:
            sys.exit(done.stderr.decode())
        with open(f"{folder}/run/step_00000001/model.safetensors", "rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    shapes = {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
    if options["tokenizer"] == "gpt2":
        shapes["embed_tokens.weight"][0] = GPT2_TOKENS  # the step above had bytes: the built-in corpus is of bytes
    return shapes


def is_used(tensor, branches):
    left_out = [part for branch in OF_BRANCH if branch not in branches for part in OF_BRANCH[branch]]
    if "cmp" not in branches and "slc" not in branches:
        left_out += TO_CHOOSE
    return not any(part in tensor for part in left_out)


def size_of(shape):
    size = 1
    for n in shape:
        size *= n
    return size


def parameters(tensors, options):
    """Those that the arm uses: a branch that is left out keeps its tensors in the file, but they do nothing."""
    return sum(size_of(shape) for name, shape in tensors.items() if is_used(name, branches_of(options)))


def blocks_of(options):
    return max(0, (int(options["seq-len"]) - int(options["cmp-block"])) // int(options["cmp-stride"]) + 1)


def flops_per_token(tensors, options):
    """As lib/model/flops.h counts them, without the branches that are left out."""
    tokens = int(options["seq-len"])
    flops, D = 0, int(options["head-dim"])
    for name, shape in tensors.items():
        if len(shape) == 2 and is_used(name, branches_of(options)):
            rows = blocks_of(options) * int(options["kv-groups"]) if ".phi_" in name else tokens
            flops += 6 * size_of(shape) * rows
    keys = keys_per_query(options) * int(options["layers"])
    return flops / tokens + 12 * D * int(options["heads"]) * keys


class Arm:
    """An arm with the MLP's width that gives it as many parameters as the arm `like` has."""

    def __init__(self, name, model, program, like=None):
        self.options = options_of(name, model)
        tensors = tensors_of(program, self.options)
        if like:
            missing = like.parameters - parameters(tensors, self.options)
            of_one_column = 2 * int(self.options["dim"]) * int(self.options["layers"])
            self.options["mlp-hidden"] = int(self.options["mlp-hidden"]) + round(missing / of_one_column / 8) * 8
            tensors = tensors_of(program, self.options)
            if abs(parameters(tensors, self.options) / like.parameters - 1) > TOLERANCE:
                sys.exit(f"arms.py: {name} has {parameters(tensors, self.options)} parameters, {REFERENCE} "
                         f"{like.parameters}")
        self.parameters = parameters(tensors, self.options)
        self.flops = flops_per_token(tensors, self.options)
        self.keys = keys_per_query(self.options)


def read_setting(path):
    with open(path) as file:
        return json.load(file)


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("arms", nargs="*", default=list(ARMS))
    arguments.add_argument("--setting", default=f"{HERE}/small.json")
    arguments.add_argument("--program", default="./train_nsa")
    a = arguments.parse_args()
    model = read_setting(a.setting)["model"]
    reference = Arm(REFERENCE, model, a.program)
    for name in a.arms:
        arm = Arm(name, model, a.program, reference)
        print(f"{name}: {arm.parameters} parameters, MLP {arm.options['mlp-hidden']}, window "
              f"{arm.options.get('window', '-')}, {arm.keys:.0f} keys a query, {arm.flops / 1e6:.1f} MFLOPs a token")


if __name__ == "__main__":
    main()
