#!/usr/bin/env python3
"""reference.py: the model of MODEL.md in PyTorch, float64, written to be read. The trainer is checked against it.

    python3 dev/reference.py compare STATE
        compares a dump of `train_nsa --dump-state` with this file: logits, loss, gradients, selection; status 1 beyond
        the limits
    python3 dev/reference.py update STATE BEFORE AFTER
        repeats one step of the optimiser: two checkpoints of a run, folders, and the dump of --resume at the first with
        that step's options; status 1 beyond the limits
    python3 dev/reference.py golden STATE GOLDEN
        writes a small file of expected results, with which the tests check themselves without Python

Needs PyTorch and NumPy (pip install torch numpy).
"Eq. (n)" is equation n of "Native Sparse Attention", arXiv 2502.11089; steps 1 to 9 are those of MODEL.md.
Symbols there, names here: l = cmp_block, d = cmp_stride, l' = slc_block, n = slc_count, w = window,
F = phi_hidden, M = mlp_hidden, h = heads per KV group.
"""

import argparse
import dataclasses
import json
import math
import os
import re
import sys
from typing import NamedTuple

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "bench"))

from needs import needs

with needs("PyTorch and NumPy"):
    import numpy as np
    import torch
    import torch.nn.functional as F
    from torch.utils.checkpoint import checkpoint


class Failure(Exception):
    """An error that a user can cause. Its text is one line: what, where, found, expected, what to do."""


# ----------------------------------------------------------------------------------------------------------------------
# Configuration and parameters.

@dataclasses.dataclass
class Config:
    layers: int
    dim: int
    heads: int
    kv_groups: int
    head_dim: int
    cmp_block: int
    cmp_stride: int
    slc_block: int
    slc_count: int
    window: int
    phi_hidden: int
    mlp_hidden: int
    attention: str  # of each layer: "nsa", "full", "window", or a pattern of them that repeats: "window,nsa"
    vocab_size: int
    rope_base: float
    norm_eps: float
    qk_norm: str     # "on": RMSNorm of the heads of q and of the keys, before RoPE; "off"
    smear: str       # "on": a part of the token before is added to each input; "off"
    head: str        # "tied" to the embedding, or "untied": a matrix of its own

    def kind(self, layer):
        """nsa, full or window."""
        pattern = self.attention.split(",")
        return pattern[layer % len(pattern)]

    def layers_of_nsa(self):
        return [i for i in range(self.layers) if self.kind(i) == "nsa"]


def read_config(text, path):
    """config.json's text -> Config. Keys that do not describe the model (seq_len, tokenizer) are not needed here."""
    try:
        # older ones do not name these
        later = {"qk_norm": "off", "smear": "off", "head": "tied"}
        values = later | json.loads(text)
        c = Config(**{field.name: field.type(values[field.name]) for field in dataclasses.fields(Config)})
    except (ValueError, TypeError, KeyError) as e:
        raise Failure(f"{path}: metadata key 'config' is not a complete config.json: {type(e).__name__} {e}")
    if not set(c.attention.split(",")) <= {"nsa", "full", "window"}:
        raise Failure(f"{path}: this file knows the attentions nsa, full and window, found {c.attention}")
    return c


def parameter_shapes(c):
    """{name: shape} of every parameter, in MODEL.md's order. Linear weights are [out, in]."""
    C, D = c.dim, c.head_dim
    shapes = {"embed_tokens.weight": (c.vocab_size, C)}
    if c.smear == "on":
        shapes |= {"smear.gate.weight": (C,), "smear.scale.weight": (C,)}
    for i in range(c.layers):
        layer = {"attn_norm.weight": (C,), "mlp_norm.weight": (C,), "attn.q_proj.weight": (c.heads * D, C)}
        for branch in ("cmp", "slc", "win") if c.kind(i) == "nsa" else ("win",):
            layer |= {f"attn.{kind}_{branch}_proj.weight": (c.kv_groups * D, C) for kind in "kv"}
        if c.qk_norm == "on":
            for kind in ("q", "k_cmp", "k_slc", "k_win") if c.kind(i) == "nsa" else ("q", "k_win"):
                layer[f"attn.{kind}_norm.weight"] = (D,)
        if c.kind(i) == "nsa":
            layer["attn.gate_proj.weight"] = (3 * c.heads, C)
            for phi in ("phi_k", "phi_v"):
                layer |= {
                    f"attn.{phi}.fc1.weight": (c.phi_hidden, c.cmp_block * D),
                    f"attn.{phi}.fc1.bias": (c.phi_hidden,),
                    f"attn.{phi}.fc2.weight": (D, c.phi_hidden),
                }
        layer |= {
            "attn.o_proj.weight": (C, c.heads * D),
            "mlp.fc1.weight": (c.mlp_hidden, C),
            "mlp.fc2.weight": (C, c.mlp_hidden),
        }
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["norm.weight"] = (C,)
    if c.head == "untied":
        shapes["head.weight"] = (c.vocab_size, C)
    return shapes


# ----------------------------------------------------------------------------------------------------------------------
# The model. One sequence at a time: tokens [T] in, logits [T, V] out.

class Selection(NamedTuple):
    """The results of steps 5 and 6 for one layer."""
    chosen: torch.Tensor      # [T, G, blocks] bool, chosen by these importances, whether or not the branch used it
    importance: torch.Tensor  # [T, G, blocks], p_slc
    # [T, G], max over heads of |q|, times max over blocks of |Kc|, / sqrt(D): scales the rounding of a score
    score_norm: torch.Tensor


def rmsnorm(x, gain, eps):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * gain


def rope(x, position, base):
    """Rotates x [N, ..., D] by its position [N]: elements i and i + D/2 pair up, with angle position * base^(-2i/D)."""
    half = x.shape[-1] // 2
    angle = position.double()[:, None] * base ** (-torch.arange(half, dtype=torch.float64) / half)  # [N, D/2]
    angle = angle.view(len(x), *[1] * (x.dim() - 2), half)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attend(q, k, v, visible):
    """Eq. (2). q [T, G, h, D], k [S, G, D], v [S, G, D], visible [T, G or 1, S] -> outputs [T, G, h, D], weights
    [T, G, h, S].
    A query that sees no key gets weights 0 and output 0."""
    visible = visible.unsqueeze(2)
    scores = torch.einsum("tghd,sgd->tghs", q, k) / math.sqrt(q.shape[-1])
    lowest = torch.finfo(scores.dtype).min  # finite, so that a row without keys holds no NaN before it is zeroed
    p = torch.softmax(scores.masked_fill(~visible, lowest), dim=-1) * visible
    return torch.einsum("tghs,sgd->tghd", p, v), p


def compress(x, fc1, bias, fc2, c):
    """phi of Eq. (7). x [T, G, D] -> [NC, G, D]: the mean of each block's l rows, plus the learnable MLP of the
    concatenated rows."""
    T = len(x)
    blocks = 0 if T < c.cmp_block else (T - c.cmp_block) // c.cmp_stride + 1
    row = torch.arange(blocks)[:, None] * c.cmp_stride + torch.arange(c.cmp_block)  # block i is rows i*d ... i*d + l-1
    X = x[row].transpose(1, 2)  # [NC, G, l, D]
    return X.mean(2) + F.silu(X.flatten(2) @ fc1.T + bias) @ fc2.T


def shared_tokens(compressed, selection, c):
    """[compressed, selection]: the tokens that block [i*d, i*d + l) and block [j*l', (j+1)*l') share, divided by d."""
    start_i, start_j = torch.arange(compressed)[:, None] * c.cmp_stride, torch.arange(selection) * c.slc_block
    end = torch.minimum(start_i + c.cmp_block, start_j + c.slc_block)
    return (end - torch.maximum(start_i, start_j)).clamp(min=0) / c.cmp_stride


def select(importance, c):
    """Eq. (11). importance [T, G, blocks] -> bool: the forced blocks {0, b-1, b} and the best others, n in all."""
    T, _, blocks = importance.shape
    j, b = torch.arange(blocks), torch.arange(T)[:, None, None] // c.slc_block  # query t lies in block b
    seen = j <= b
    forced = ((j == 0) | (j == b - 1) | (j == b)) & seen
    rank_by = importance.masked_fill(forced, math.inf).masked_fill(~seen, -math.inf)
    # stable: equal scores go to the lower index
    best = rank_by.argsort(dim=-1, descending=True, stable=True)[..., :c.slc_count]
    return torch.zeros_like(importance, dtype=torch.bool).scatter(-1, best, True) & seen


def attention(x, w, c, given=None, layer=0):
    """x [T, C], w the layer's attn.* parameters -> [T, C] and the layer's Selection (None without NSA).
    given [T, G, blocks] replaces the selection that the branch uses."""
    T, G, D, h = len(x), c.kv_groups, c.head_dim, c.heads // c.kv_groups
    t = torch.arange(T)
    past = t[:, None] - t  # [T, T]: how far key s lies behind query t
    before = past >= 0  # [T, T]: what query t may look at

    # 1, 2. Project, norm if asked, and rotate. Head a of group g is head g*h + a.
    def heads(name, *shape):
        y = (x @ w[f"attn.{name}_proj.weight"].T).view(T, *shape, -1)
        normed = c.qk_norm == "on" and not name.startswith("v")
        return rmsnorm(y, w[f"attn.{name}_norm.weight"], c.norm_eps) if normed else y

    q = rope(heads("q", G, h), t, c.rope_base)
    k_win, v_win = rope(heads("k_win", G), t, c.rope_base), heads("v_win", G)
    if c.kind(layer) != "nsa":
        seen = before & (past < c.window) if c.kind(layer) == "window" else before
        full, _ = attend(q, k_win, v_win, seen[:, None])
        return full.reshape(T, -1) @ w["attn.o_proj.weight"].T, None
    k_slc, v_slc = rope(heads("k_slc", G), t, c.rope_base), heads("v_slc", G)

    # 3. Compress the unrotated keys, then rotate each by its block's first position. Eq. (7)
    phi_k, phi_v = (
        [w[f"attn.{phi}.{name}"] for name in ("fc1.weight", "fc1.bias", "fc2.weight")] for phi in ("phi_k", "phi_v")
    )
    k_cmp, v_cmp = compress(heads("k_cmp", G), *phi_k, c), compress(heads("v_cmp", G), *phi_v, c)
    start = torch.arange(len(k_cmp)) * c.cmp_stride
    k_cmp = rope(k_cmp, start, c.rope_base)

    # 4. The compressed branch sees the blocks that end at or before the query. Eq. (8) is its softmax.
    whole = start + c.cmp_block - 1 <= t[:, None]
    cmp, p_cmp = attend(q, k_cmp, v_cmp, whole[:, None])

    # 5, 6. Importance, Eq. (9), summed over the heads of a group, Eq. (10), so that the group reads one set of blocks.
    # No gradient. Eq. (9) adds p_cmp[j*l'/d - m - n]. With indices from 0 those would be the blocks before block j;
    # the paper means those that overlap it.
    with torch.no_grad():
        blocks = -(-T // c.slc_block)
        importance = p_cmp.sum(2) @ shared_tokens(len(k_cmp), blocks, c).to(x.dtype)
        largest_key = k_cmp.norm(dim=-1).amax(0) if len(k_cmp) else torch.zeros(G, dtype=x.dtype)
        found = Selection(select(importance, c), importance, q.norm(dim=-1).amax(-1) * largest_key / math.sqrt(D))
        chosen = found.chosen if given is None else given

    # 7. The selected branch, Eq. (12): the tokens of the chosen blocks that are not ahead of the query.
    slc, _ = attend(q, k_slc, v_slc, chosen[:, :, t // c.slc_block] & before[:, None])

    # 8. The window branch: the query's own key and the w - 1 before it.
    win, _ = attend(q, k_win, v_win, (before & (past < c.window))[:, None])

    # 9. Gate, per head and branch. Eq. (5)
    gate = torch.sigmoid(x @ w["attn.gate_proj.weight"].T).view(T, G, h, 3, 1)
    out = gate[..., 0, :] * cmp + gate[..., 1, :] * slc + gate[..., 2, :] * win
    return out.reshape(T, -1) @ w["attn.o_proj.weight"].T, found


def layer_forward(x, w, c, given, layer):
    attended, found = attention(rmsnorm(x, w["attn_norm.weight"], c.norm_eps), w, c, given, layer)
    x = x + attended
    hidden = F.silu(rmsnorm(x, w["mlp_norm.weight"], c.norm_eps) @ w["mlp.fc1.weight"].T)
    return x + hidden @ w["mlp.fc2.weight"].T, found


def smear(e, gate, scale):
    """e [T, C]: each row plus a part of the row before, which a gate of its own opens."""
    before = F.pad(e[:-1], (0, 0, 1, 0))
    return e + torch.sigmoid(e @ gate)[:, None] * scale * before


def forward(tokens, params, c, given=None):
    """tokens [T] -> logits [T, V] and one Selection per layer.
    given: {layer: the selection to use instead of the one computed here}."""
    x, found = params["embed_tokens.weight"][tokens], []
    if c.smear == "on":
        x = smear(x, params["smear.gate.weight"], params["smear.scale.weight"])
    for i in range(c.layers):
        prefix = f"layers.{i}."
        w = {name[len(prefix):]: p for name, p in params.items() if name.startswith(prefix)}
        # The backward pass computes the layer again: the T x T weights of one layer at a time are enough memory.
        x, selection = checkpoint(layer_forward, x, w, c, given.get(i) if given else None, i, use_reentrant=False)
        found.append(selection)
    head = "embed_tokens.weight" if c.head == "tied" else "head.weight"
    return rmsnorm(x, params["norm.weight"], c.norm_eps) @ params[head].T, found


class Results(NamedTuple):
    logits: torch.Tensor  # [B, T, V]
    loss: torch.Tensor    # [1], mean cross-entropy over the B*T targets
    grads: dict           # {name: gradient of the loss}
    selection: dict       # {layer of NSA: its Selection with a leading dimension B}


def run(c, params, inputs, targets, given=None):
    """Logits, loss, gradients and selection of a batch, inputs and targets [B, T].
    given: {layer: [B, T, G, blocks]}, see forward()."""
    params = {name: p.detach().requires_grad_() for name, p in params.items()}
    B, T = inputs.shape
    loss, logits, found = 0, [], []
    for row in range(B):
        row_given = {i: layer[row] for i, layer in given.items()} if given else None
        row_logits, row_found = forward(inputs[row], params, c, row_given)
        row_loss = F.cross_entropy(row_logits, targets[row], reduction="sum") / (B * T)
        row_loss.backward()
        loss = loss + row_loss.detach()
        logits.append(row_logits.detach())
        found.append(row_found)
    by_layer = list(zip(*found))
    selection = {i: Selection(*map(torch.stack, zip(*by_layer[i]))) for i in c.layers_of_nsa()}
    # A parameter that nothing used (the compressor when T < l) gets gradient zero.
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in params.items()}
    return Results(torch.stack(logits), loss.reshape(1), grads, selection)


# ----------------------------------------------------------------------------------------------------------------------
# safetensors: a little-endian 64-bit length, a JSON header of that length, the tensors' bytes.

DTYPES = {"F64": "<f8", "F32": "<f4", "I32": "<i4", "U8": "u1"}


def read_safetensors(path):
    """-> {name: array}, metadata."""
    try:
        data = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as e:
        raise Failure(f"cannot read {path}: {e}")
    length = int.from_bytes(data[:8].tobytes(), "little")
    if len(data) < 8 or length > len(data) - 8:
        raise Failure(f"{path}: a header of {length} bytes in a file of {len(data)}: not safetensors, or cut off")
    body, tensors = data[8 + length:], {}
    try:
        header = json.loads(data[8:8 + length].tobytes())
        metadata = dict(header.pop("__metadata__", {}))
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            if not 0 <= begin <= end <= len(body):
                raise Failure(f"{path}: tensor {name} is bytes {begin} to {end} of {len(body)}: the file is cut off")
            tensors[name] = body[begin:end].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise Failure(f"{path}: no safetensors header of F64, F32, I32, U8 tensors: {type(e).__name__} {e}")
    return tensors, metadata


def write_safetensors(path, tensors, metadata):
    header, offset = {"__metadata__": metadata}, 0
    names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    tensors = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    for name, array in tensors.items():
        header[name] = {"dtype": names[array.dtype], "shape": list(array.shape),
                        "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in tensors.values():
            file.write(array.tobytes())


class State(NamedTuple):
    """A dump of the trainer: parameters and batch for run(), and the trainer's results."""
    config: Config
    metadata: dict
    params: dict            # {name: float64 tensor}
    inputs: torch.Tensor    # [B, T] int64
    targets: torch.Tensor
    tensors: dict           # the file's arrays: logits, loss, grad.<name>, layers.i.selection


def read_state(path):
    tensors, metadata = read_safetensors(path)
    c = read_config(metadata.get("config", "{}"), path)
    inputs = tensors.get("inputs")
    if inputs is None or inputs.ndim != 2 or inputs.size == 0:
        raise Failure(f"{path}: no tensor 'inputs' of shape [B, T]: not a dump of train_nsa --dump-state")
    (B, T), shapes = inputs.shape, parameter_shapes(c)
    expected = {"inputs": ("I32", (B, T)), "targets": ("I32", (B, T)), "logits": ("F32", (B, T, c.vocab_size)),
                "loss": ("F32", (1,))}
    for name, shape in shapes.items():
        expected |= {name: ("F32", shape), "grad." + name: ("F32", shape)}
    blocks = -(-T // c.slc_block)
    expected |= {f"layers.{i}.selection": ("U8", (B, c.kv_groups, T, blocks)) for i in c.layers_of_nsa()}
    for name, (dtype, shape) in expected.items():
        found = tensors.get(name)
        if found is None or found.dtype != DTYPES[dtype] or found.shape != shape:
            described = "absent" if found is None else f"{found.dtype} {list(found.shape)}"
            raise Failure(f"{path}: tensor {name} is {described}, expected {dtype} {list(shape)} from its own config")
    for name in tensors.keys() - expected.keys():
        raise Failure(f"{path}: tensor {name} is not in the model that the file's config describes")
    for name in ("inputs", "targets"):
        if tensors[name].min() < 0 or tensors[name].max() >= c.vocab_size:
            raise Failure(f"{path}: tensor {name} holds a token outside 0 to {c.vocab_size - 1}")
    params = {name: torch.from_numpy(tensors[name].astype(np.float64)) for name in shapes}
    tokens = (torch.from_numpy(tensors[name].astype(np.int64)) for name in ("inputs", "targets"))
    return State(c, metadata, params, *tokens, tensors)


# ----------------------------------------------------------------------------------------------------------------------
# How far the trainer may be from float64. u is the unit roundoff of what it stores; sums are in float32 in either
# precision. Rounding errors are independent enough to add up like a random walk (Higham and Mary, SIAM J. Sci. Comput.
# 41, 2019): a sum of K terms errs by sqrt(K) * 2^-24 of its size, and `operations` of those in a row by
# sqrt(operations) of that. We allow 4 standard deviations.

UNIT_ROUNDOFF = {"fp32": 2.0 ** -24, "bf16": 2.0 ** -9}
# norm, projection, rope, compression, score, softmax, mix, gate, o_proj, add; norm, fc1, silu, fc2, add
LAYER_OPERATIONS = 15
SCORE_OPERATIONS = 5   # the first five of those


def rounding(operations, terms, precision):
    return 4 * math.sqrt(operations) * (UNIT_ROUNDOFF[precision] + math.sqrt(terms) * 2.0 ** -24)


def longest_sum(c, B, T):
    """Terms of the longest sum: projections, MLP, compressor, attention rows, weight gradients over the batch."""
    return max(c.dim, c.mlp_hidden, c.heads * c.head_dim, c.cmp_block * c.head_dim, B * T)


def limit_of_tensors(c, B, T, precision):
    """Limit of |error| / max|tensor| of a logit or a gradient: all layers forward and backward, and the head."""
    return rounding(2 * (LAYER_OPERATIONS * c.layers + 4), longest_sum(c, B, T), precision)


def score_rounding(layer, c, B, T, precision):
    """Relative error of q and of Kc in a layer."""
    return rounding(LAYER_OPERATIONS * layer + SCORE_OPERATIONS, longest_sum(c, B, T), precision)


def tie_limit(first, second, score_norm, r):
    """The gap between two importances that rounding can close. A score q.Kc/sqrt(D) whose q and Kc both have relative
    error r errs by 2r * |q| |Kc| / sqrt(D), and its exponential and softmax by r more. If no score of a row errs by
    more than e, a weight p = exp(s) / sum changes by a factor within exp(+-2e), and the importances, sums of weights,
    change by at most 2e times themselves. Below float32's smallest normal number (weights flushed to zero) nothing is
    promised."""
    e = r * (1 + 2 * score_norm)
    return 2 * e * (first + second) + 2.0 ** -126


# ----------------------------------------------------------------------------------------------------------------------
# compare

def to_tgb(selection):
    """[B, G, T, blocks] of a file <-> [B, T, G, blocks] of run()."""
    return torch.from_numpy(np.array(selection)).transpose(1, 2)


def check_selection(layer, found, dumped, c, precision, failures):
    """One layer's dumped selection [B, T, G, blocks] against the importances. Prints one line, appends to failures."""
    B, T, G, blocks = dumped.shape
    name = f"layers.{layer}.selection"
    j, b = torch.arange(blocks), torch.arange(T)[:, None, None] // c.slc_block
    may = j <= b
    must, may_choose = ((j == 0) | (j == b - 1) | (j == b)) & may, (b + 1).squeeze(-1)

    def first(rows):
        row, t, g = rows.nonzero()[0].tolist()
        return f"sequence {row}, token {t}, group {g}"

    for wrong, what in (
        ((dumped > 1).any(-1), "a value other than 0 and 1"),
        ((dumped.bool() & ~may).any(-1), "a block ahead of the query's"),
        ((~dumped.bool() & must).any(-1), "a forced block missing"),
        (dumped.sum(-1, dtype=torch.int64) != may_choose.clamp(max=c.slc_count), "a wrong number of blocks"),
    ):
        if wrong.any():
            failures.append(f"{name}: {what} in {int(wrong.sum())} rows, the first at {first(wrong)}")
            return
    dumped = dumped.bool()
    differs = (dumped != found.chosen).any(-1)
    # The best block that the dump left out, and the worst one that it took instead.
    left_out = found.importance.masked_fill(dumped | ~found.chosen, -math.inf).amax(-1)
    taken = found.importance.masked_fill(found.chosen | ~dumped, math.inf).amin(-1)
    limit = tie_limit(left_out, taken, found.score_norm, score_rounding(layer, c, B, T, precision))
    wrong = differs & ~(left_out - taken <= limit)
    rows, choices = int(differs.sum()), B * G * max(0, T - c.slc_count * c.slc_block)
    worst = ((left_out - taken) / limit)[differs].max().item() if rows else 0.0
    print(f"{name}: {rows} of {choices} rows that had a choice differ, {rows - int(wrong.sum())} of them near ties"
          + (f"; the largest gap is {worst:.2g} of what rounding can close" if rows else ""))
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        failures.append(f"{name}: {int(wrong.sum())} rows chose a block that is not among the best, the first at"
                        f" {first(wrong)}: importance {taken[at]:.6g} instead of {left_out[at]:.6g}, a tie would be"
                        f" within {limit[at]:.2g}")


def precision_of(state, path):
    """What the trainer stored activations in, or rounded the inputs of its products to."""
    precision = state.metadata.get("precision")
    if precision not in UNIT_ROUNDOFF:
        raise Failure(f"{path}: metadata key 'precision' is {precision!r}, expected {' or '.join(UNIT_ROUNDOFF)}: write"
                      " the dump again with this train_nsa")
    return precision


def compare(path):
    """Prints the tables; returns the failures, one line each, the worst first."""
    state = read_state(path)
    c, (B, T) = state.config, state.inputs.shape
    precision = precision_of(state, path)
    rtol = limit_of_tensors(c, B, T, precision)
    dumped = {i: to_tgb(state.tensors[f"layers.{i}.selection"]) for i in c.layers_of_nsa()}
    # With the dump's own choice of blocks, so that gradients are comparable where two blocks nearly tie.
    given = {i: layer.bool() for i, layer in dumped.items()}
    results = run(c, state.params, state.inputs, state.targets, given)

    failures, beyond = [], []
    for i, found in results.selection.items():
        check_selection(i, found, dumped[i], c, precision, failures)

    rows = {"logits": results.logits, "loss": results.loss} | {
        "grad." + name: grad for name, grad in results.grads.items()
    }
    # A gradient that is zero except for rounding (keys of softmax rows with one key) is measured against the others.
    floor = 1e-3 * max(grad.abs().max().item() for grad in results.grads.values())
    print(f"{'tensor':48} {'max |reference|':>16} {'max error':>11} {'/ max':>10} {'1 - cosine':>11}"
          f"     limit {rtol:.2g} of max ({precision})")
    for name, expected in rows.items():
        found = torch.from_numpy(np.array(state.tensors[name])).double()
        largest, error = expected.abs().max().item(), (found - expected).abs().max().item()
        scale = max(largest, floor) if name.startswith("grad.") else largest
        relative = error / scale if scale else 0.0 if error == 0 else math.inf
        # Errors of rtol in every element turn a tensor by less than rtol. A tensor of rounding errors only has no
        # direction.
        norms = (found.norm() * expected.norm()).item()
        off = 1 - (found * expected).sum().item() / norms if norms else 0.0
        bad = not relative <= rtol or (largest > rtol * scale and not off <= rtol)
        print(f"{name:48} {largest:16.6e} {error:11.2e} {relative:10.2e} {off:11.1e}{'   BEYOND' if bad else ''}")
        if bad:
            text = f"{name}: error {relative:.3g} of the tensor's largest value, 1 - cosine {off:.3g}; limit {rtol:.3g}"
            beyond.append((-relative if relative == relative else -math.inf, text))
    return failures + [text for _, text in sorted(beyond)]


# ----------------------------------------------------------------------------------------------------------------------
# update: AdamW, and Muon for the matrices of the layers.

# Polar Express, arXiv 2505.16932, for singular values from 0.001 to 1, before its margin of 1.01 for rounding
POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)
UPDATE_LIMIT = {"fp32": 1e-4, "bf16": 0.06}  # of a matrix's largest change; bf16 as in engine_model_tests.h


def orthogonal(u):
    """About U V^T of u's singular value decomposition: five polynomials of the matrix over its Frobenius norm."""
    x = u / u.norm() if u.any() else u
    for a, b, c in POLAR_EXPRESS:
        x = x / 1.01
        gram = x @ x.T
        x = a * x + b * gram @ x + c * gram @ gram @ x
    return x


def muon(w, m, g, lr, decay):
    """-> w, m after one step."""
    m = 0.95 * m + 0.05 * g
    ahead = 0.95 * m + 0.05 * g
    return (1 - lr * decay) * w - lr * 0.2 * math.sqrt(max(w.shape)) * orthogonal(ahead), m


def adamw(w, m, v, g, lr, decay, step):
    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
    corrected = (m / (1 - 0.9 ** step)) / ((v / (1 - 0.95 ** step)).sqrt() + 1e-8)
    return (1 - lr * decay) * w - lr * corrected, m, v


def is_muons(name, shape, optimizer):
    return optimizer == "muon" and name.startswith("layers.") and len(shape) == 2 and "gate_proj" not in name


def read_checkpoint(folder, shapes):
    """-> {name: float64 tensor} of the weights, of m.<name> and of v.<name>; NaN where no rank has written a moment."""
    tensors = {name: torch.from_numpy(array.astype(np.float64))
               for name, array in read_safetensors(os.path.join(folder, "model.safetensors"))[0].items()}
    if {name: tuple(x.shape) for name, x in tensors.items()} != shapes:
        raise Failure(f"{folder}: its tensors are not those of the dump's model")
    for file in sorted(os.listdir(folder)):
        if not file.startswith("optimizer_"):
            continue
        for name, array in read_safetensors(os.path.join(folder, file))[0].items():
            whole, first, last = re.fullmatch(r"([mv]\..*)\[(\d+):(\d+)\]", name).groups()
            if whole not in tensors:
                tensors[whole] = torch.full(shapes[whole[2:]], math.nan, dtype=torch.float64)
            tensors[whole].view(-1)[int(first):int(last)] = torch.from_numpy(array.astype(np.float64))
    return tensors


def read_step(after):
    """-> the options of AFTER's run, and its step and learning rate."""
    run_folder, name = os.path.split(os.path.abspath(after))
    step = int(name.split("_")[-1])
    with open(os.path.join(run_folder, "run.json")) as file:
        options = json.load(file)
    with open(os.path.join(run_folder, "log.jsonl")) as file:
        lines = [json.loads(line) for line in file]
    rates = [line["lr"] for line in lines if line.get("step") == step and "lr" in line]
    if not rates:
        raise Failure(f"{run_folder}/log.jsonl: no learning rate of step {step}")
    return options, step, rates[-1]


def compare_update(state_path, before, after):
    """Prints a line per tensor; returns the failures."""
    state = read_state(state_path)
    shapes, precision = parameter_shapes(state.config), precision_of(state, state_path)
    old, new = read_checkpoint(before, shapes), read_checkpoint(after, shapes)
    options, step, lr = read_step(after)
    grads = {name: torch.from_numpy(state.tensors["grad." + name].astype(np.float64)) for name in shapes}
    norm = math.sqrt(sum((g * g).sum().item() for g in grads.values()))
    clip = min(1.0, options["grad_clip"] / norm) if options["grad_clip"] else 1.0
    failures = []
    print(f"step {step}, lr {lr:g}, {options['optimizer']}, gradient's norm {norm:.6g}")
    print(f"{'tensor':48} {'by':6} {'largest change':>15} {'max error':>10} {'/ change':>10}")
    for name, shape in shapes.items():
        if not torch.equal(old[name], state.params[name]):
            raise Failure(f"{state_path}: {name} is not that of {before}")
        w, g, decay = old[name], grads[name] * clip, options["weight_decay"] if len(shape) == 2 else 0.0
        of_muon = is_muons(name, shape, options["optimizer"])
        if of_muon:
            w_new, m_new = muon(w, old["m." + name], g, lr, decay)
            moments = {"m." + name: m_new}
        else:
            w_new, m_new, v_new = adamw(w, old["m." + name], old["v." + name], g, lr, decay, step)
            moments = {"m." + name: m_new, "v." + name: v_new}
        # The weights are stored in fp32. AdamW's are computed in it whatever the products take.
        limit = UPDATE_LIMIT[precision if of_muon else "fp32"]
        change, error = (w_new - w).abs().max().item(), (new[name] - w_new).abs().max().item()
        allowed = limit * change + 2.0 ** -23 * w.abs().max().item()
        relative = error / change if change else 0.0
        print(f"{name:48} {'muon' if of_muon else 'adamw':6} {change:15.4e} {error:10.2e} {relative:10.2e}"
              f"{'' if error <= allowed else '   BEYOND'}")
        if not error <= allowed:
            failures.append(f"{name}: error {error:.3g} of a change of {change:.3g}")
        for moment, expected in moments.items():
            error = (new[moment] - expected).abs().max().item() if moment in new else math.nan
            if not error <= 1e-5 * expected.abs().max().item():
                failures.append(f"{moment}: error {error:.3g} of {expected.abs().max().item():.3g}")
        if of_muon and "v." + name in new:
            failures.append(f"v.{name}: there, although Muon has no second moment")
    return failures


# ----------------------------------------------------------------------------------------------------------------------
# golden

GOLDEN_ROWS, GOLDEN_SAMPLES = 4, 64


def selection_margin(layer, found, c):
    """The smallest gap between the worst block that was chosen without being forced and the best one that was
    rejected, and the smallest ratio of such a gap to what float32 rounding can close. Both are infinite if no row had
    a choice."""
    B, T, _, blocks = found.chosen.shape
    j, b = torch.arange(blocks), torch.arange(T)[:, None, None] // c.slc_block
    free = (j > 0) & (j < b - 1)
    worst_chosen = found.importance.masked_fill(~(found.chosen & free), math.inf).amin(-1)
    best_rejected = found.importance.masked_fill(found.chosen | ~free, -math.inf).amax(-1)
    limit = tie_limit(worst_chosen, best_rejected, found.score_norm, score_rounding(layer, c, B, T, "fp32"))
    chose = torch.isfinite(worst_chosen) & torch.isfinite(best_rejected)
    gap = worst_chosen - best_rejected
    return (min(values[chose].tolist(), default=math.inf) for values in (gap, gap / limit))


def golden(state_path, golden_path):
    """Prints a line per layer of selection and the file's size."""
    state = read_state(state_path)
    c, (B, T) = state.config, state.inputs.shape
    results = run(c, state.params, state.inputs, state.targets)
    rows = sorted({(2 * k + 1) * B * T // (2 * GOLDEN_ROWS) for k in range(GOLDEN_ROWS)})
    out = {"inputs": state.tensors["inputs"], "targets": state.tensors["targets"], "loss": results.loss.numpy(),
           "logits_rows": np.array(rows, np.int32), "logits": results.logits.flatten(0, 1)[rows].numpy()}
    for name, param in state.params.items():
        grad = results.grads[name].flatten().numpy()
        index = np.arange(grad.size)
        sign = np.where(index * 2654435761 % 2 ** 32 >> 16 & 1, 1.0, -1.0)
        samples = min(GOLDEN_SAMPLES, grad.size)
        out |= {f"grad_norm.{name}": np.array([np.linalg.norm(grad)]), f"grad_sign_dot.{name}": np.array([sign @ grad]),
                f"grad_sample.{name}": grad[np.arange(samples) * grad.size // samples],
                # cumsum adds in index order, sum does not
                f"param_sum.{name}": np.cumsum(param.flatten().numpy())[-1:]}
    for i, found in results.selection.items():
        margin, safety = selection_margin(i, found, c)
        out |= {f"layers.{i}.selection": found.chosen.transpose(1, 2).numpy().astype(np.uint8),
                f"layers.{i}.selection_margin": np.array([margin]), f"layers.{i}.selection_safety": np.array([safety])}
        # The limit is for sums that add one term after the other; float32 PyTorch stays near a hundredth of it.
        advice = "" if safety > 0.1 else ": a float32 engine may choose otherwise; take another --seed"
        print(f"layers.{i}.selection: smallest margin {margin:.3g}, {safety:.3g} of what float32 rounding can close"
              + advice)
    metadata = {key: state.metadata[key] for key in ("config", "options") if key in state.metadata}
    if "options" in metadata:  # the place where the dump was written says nothing about the parameters
        metadata["options"] = re.sub(r" --dump-state[ =]\S+", "", metadata["options"])
    write_safetensors(golden_path, out, metadata)
    print(f"{golden_path}: {os.path.getsize(golden_path)} bytes, loss {results.loss.item():.9f}")


def main():
    modes = {"compare": (compare, 1), "update": (compare_update, 3), "golden": (golden, 2)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=modes), parser.add_argument("files", nargs="+", metavar="FILE")
    arguments = parser.parse_args()
    function, count = modes[arguments.mode]
    if len(arguments.files) != count:
        parser.error(f"{arguments.mode} takes {count} of the files that --help names, found {len(arguments.files)}")
    try:
        failures = function(*arguments.files)
        if failures:
            raise Failure(failures[0] + (f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""))
        if failures is not None:
            print("ok: everything within the limits")
        return 0
    except (Failure, OSError) as e:
        print(f"reference.py: {e}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
