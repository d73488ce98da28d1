"""The arms of a comparison: their options, their widths for equal parameters, and what they cost.

An arm is a name of ARMS and options of the trainer behind it: `nsa`, `full+optimizer=muon`, `window+smear`.
"""
import json
import os
import struct
import subprocess
import sys

MODEL = {
    "layers": 4, "dim": 192, "heads": 6, "kv-groups": 2, "head-dim": 32, "mlp-hidden": 768,
    "cmp-block": 16, "cmp-stride": 8, "slc-block": 16, "slc-count": 8, "window": 128, "phi-hidden": 32,
    "init": "random", "tokenizer": "bytes", "seq-len": 1024,
}
# What an arm changes of MODEL. A window of 360 has as many keys for a query of a sequence of 1024, on average, as NSA
# reads in its three branches together (keys_per_query below counts them; a test compares).
ARMS = {
    "nsa": {},
    "full": {"attention": "full"},
    "window": {"branches": "win", "window": 360},
    "window+selected": {"branches": "slc,win"},
    "window+compressed": {"branches": "cmp,win"},
}
OF_NSA = ["cmp-block", "cmp-stride", "slc-block", "slc-count", "window", "phi-hidden"]  # refused by full attention
REFERENCE = "nsa"
TOLERANCE = 0.02
# Tensors of a branch, which nothing reads where the branch is left out. Compression chooses the blocks of the selected
# branch, so its keys stay with that.
OF_BRANCH = {
    "cmp": ["v_cmp_proj", "phi_v"],
    "slc": ["k_slc_proj", "v_slc_proj"],
    "win": ["k_win_proj", "v_win_proj"],
}
TO_CHOOSE = ["k_cmp_proj", "phi_k"]


def options_of(arm):
    """The arm's options, a dictionary from name to value; a flag's value is None."""
    base = max((name for name in ARMS if arm == name or arm.startswith(name + "+")), key=len, default=None)
    if base is None:
        sys.exit(f"arms.py: '{arm}' is no arm: expected one of {', '.join(ARMS)}, and +OPTION=VALUE or +FLAG behind it")
    options = {**MODEL, **ARMS[base]}
    for option in arm[len(base):].split("+")[1:]:
        name, equals, value = option.partition("=")
        options[name] = value if equals else None
    if options.get("attention") == "full":
        for name in OF_NSA:
            del options[name]
    return options


def command_line(options):
    words = []
    for name, value in options.items():
        words += [f"--{name}"] if value is None else [f"--{name}", str(value)]
    return words


def branches_of(options):
    if options.get("attention") == "full":
        return ["win"]
    chosen = options.get("branches", "all")
    return ["cmp", "slc", "win"] if chosen == "all" else chosen.split(",")


def pairs(branch, options, tokens):
    """Keys that the queries of one sequence read in a branch, as lib/model/shape.h counts them."""
    o = {name: int(value) for name, value in options.items() if str(value).isdigit()}
    if options.get("attention") == "full":
        return tokens * (tokens + 1) // 2
    if branch == "win":
        return sum(min(t + 1, o["window"]) for t in range(tokens))
    if branch == "cmp":
        return sum(max(0, (t + 1 - o["cmp-block"]) // o["cmp-stride"] + 1) for t in range(tokens))
    size = o["slc-block"]
    return sum(min(t // size, o["slc-count"] - 1) * size + t % size + 1 for t in range(tokens))


def keys_per_query(options):
    tokens = int(options["seq-len"])
    return sum(pairs(branch, options, tokens) for branch in branches_of(options)) / tokens


def tensors_of(program, options, scratch):
    """The program's own tensors, name -> shape, of a model that it trained for a step."""
    folder = f"{scratch}/shape_{os.getpid()}"
    one_step = ["--steps", "1", "--batch", "1", "--total-batch", str(options["seq-len"]), "--sample-tokens", "0"]
    done = subprocess.run([program, "--out", folder] + one_step + command_line(options), capture_output=True)
    if done.returncode:
        sys.exit(done.stderr.decode())
    with open(f"{folder}/step_00000001/model.safetensors", "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    subprocess.run(["rm", "-r", folder], check=True)
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}


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
    flops = 0
    for name, shape in tensors.items():
        if len(shape) == 2 and is_used(name, branches_of(options)):
            rows = blocks_of(options) * int(options["kv-groups"]) if ".phi_" in name else tokens
            flops += 6 * size_of(shape) * rows
    for branch in branches_of(options):
        flops += 12 * int(options["head-dim"]) * int(options["heads"]) * int(options["layers"]) * pairs(
            branch, options, tokens)
    return flops / tokens


class Arm:
    """An arm with the MLP's width that gives it as many parameters as NSA has."""

    def __init__(self, name, program, scratch, wanted=None):
        self.options = options_of(name)
        tensors = tensors_of(program, self.options, scratch)
        if wanted:
            missing = wanted - parameters(tensors, self.options)
            of_one_column = 2 * int(self.options["dim"]) * int(self.options["layers"])
            self.options["mlp-hidden"] = int(self.options["mlp-hidden"]) + round(missing / of_one_column / 8) * 8
            tensors = tensors_of(program, self.options, scratch)
            if abs(parameters(tensors, self.options) / wanted - 1) > TOLERANCE:
                sys.exit(f"arms.py: {name} has {parameters(tensors, self.options)} parameters, {wanted} are wanted")
        self.parameters = parameters(tensors, self.options)
        self.flops = flops_per_token(tensors, self.options)
        self.keys = keys_per_query(self.options)
