"""arms.py: the arms of a comparison: their options, their widths for equal parameters, and what they cost.

An arm is a name of ARMS and options of the trainer behind it: nsa, full+optimizer=muon, window+smear. The setting has
the model of NSA. An arm with fewer parameters gets a wider MLP, and the window alone reads as many keys for a query,
on average over a sequence, as NSA in its three branches together; alternating, where every fourth layer has full
attention and the others a window, on average over its layers too; interleaved has windows, as NSA's, and NSA in turn.
"""
import sys

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
TOLERANCE = 0.02
VOCABULARY = {"bytes": 256, "gpt2": 50257}


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
    """Those of its layers of NSA."""
    return options.get("branches", "cmp,slc,win").split(",")


def numbers_of(options):
    return {name: int(value) for name, value in options.items() if str(value).isdigit()}


def pairs(branch, o, tokens):
    """Keys that the queries of one sequence read in a branch of NSA, as lib/model/shape.h counts."""
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
    return sum(pairs(branch, numbers_of(options), tokens) for branch in branches)


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


def matrices_of(options):
    """(size, rows that it multiplies in one sequence) of each. A branch that is left out keeps its tensors in the file,
    but they do nothing; compression chooses the blocks of the selected branch, so its keys stay with that."""
    o = numbers_of(options)
    C, D, tokens = o["dim"], o["head-dim"], o["seq-len"]
    of_heads, of_groups = o["heads"] * D * C, o["kv-groups"] * D * C
    found = [(VOCABULARY[options["tokenizer"]] * C, tokens)]
    for kind in kinds_of(options):
        found += [(of_heads, tokens)] * 2 + [(o["mlp-hidden"] * C, tokens)] * 2
        branches = branches_of(options) if kind == "nsa" else ["win"]
        compressed = ("cmp" in branches or "slc" in branches) + ("cmp" in branches)  # keys, values
        found += [(of_groups, tokens)] * (compressed + 2 * ("slc" in branches) + 2 * ("win" in branches))
        if kind == "nsa":
            rows = o["kv-groups"] * max(0, (tokens - o["cmp-block"]) // o["cmp-stride"] + 1)
            found += [(3 * o["heads"] * C, tokens)]
            found += [(o["phi-hidden"] * o["cmp-block"] * D, rows), (o["phi-hidden"] * D, rows)] * compressed
    return found


def parameters_of(options):
    """Those that the arm uses."""
    o, branches = numbers_of(options), branches_of(options)
    compressed = ("cmp" in branches or "slc" in branches) + ("cmp" in branches)
    found = sum(size for size, _ in matrices_of(options)) + o["dim"] + 2 * o["dim"] * ("smear" in options)
    for kind in kinds_of(options):
        found += 2 * o["dim"] + (4 if kind == "nsa" else 2) * o["head-dim"] * (options.get("qk-norm", "off") != "off")
        found += o["phi-hidden"] * compressed if kind == "nsa" else 0
    return found + (matrices_of(options)[0][0] if options.get("head") == "untied" else 0)


def flops_per_token(options):
    """As lib/model/flops.h counts them, without the branches that are left out."""
    o = numbers_of(options)
    flops = sum(6 * size * rows for size, rows in matrices_of(options)) / o["seq-len"]
    return flops + 12 * o["head-dim"] * o["heads"] * o["layers"] * keys_per_query(options)


class Arm:
    """An arm with the MLP's width that gives it as many parameters as NSA has."""

    def __init__(self, name, setting):
        model = setting["model"]
        self.options = options_of(name, model)
        if setting.get("equal_parameters", True):
            wanted = parameters_of(model)
            of_one_column = 2 * int(self.options["dim"]) * int(self.options["layers"])
            missing = wanted - parameters_of(self.options)
            self.options["mlp-hidden"] = int(self.options["mlp-hidden"]) + round(missing / of_one_column / 8) * 8
            if abs(parameters_of(self.options) / wanted - 1) > TOLERANCE:
                sys.exit(f"arms.py: {name} has {parameters_of(self.options)} parameters, nsa {wanted}")
        self.parameters, self.flops = parameters_of(self.options), flops_per_token(self.options)
        self.keys = keys_per_query(self.options)


if __name__ == "__main__":
    print(__doc__)
