#!/usr/bin/env python3
"""torch_cpu.py: what dev/bench/cpu.sh times beside the CPU engine, in PyTorch.

    torch_cpu.py nsa [OPTION...]          training steps of our model as one would write it without custom kernels:
                                          dense attention under masks, in chunks of queries
    torch_cpu.py dense [OPTION...]        training steps of torch_step.py's dense model, with PyTorch's fused attention
    torch_cpu.py sdpa --seq-len T         that attention alone at the shape of a layer of 125m: 12 heads of 64, with 12
                                          heads of keys and values, as GPT-2 has, and with our 2

A step is forward, backward, clipping and AdamW. Each step prints "rate NAME VALUE", in tokens/s, and conditions stand
in a last line. Attention alone prints microseconds a token, medians. To compare values use dev/reference.py.
"""
import argparse
import collections
import contextlib
import math
import os
import resource
import statistics
import time

from needs import needs

with needs("PyTorch"):
    import torch
    import torch.nn as nn
    import torch.nn.functional as F
    from torch_step import Model, make_adamw, make_dense, rotate, rotation_of, train_step

# As lib/run/options.h has them. block, stride: of compression; select, count: selection blocks; phi: its hidden width.
Sizes = collections.namedtuple("Sizes", "layers dim heads groups hidden vocab block stride select count window phi")
SIZES = {
    "125m": Sizes(12, 768, 12, 2, 3072, 50257, 32, 16, 64, 16, 512, 128),
    "tiny": Sizes(2, 128, 4, 2, 512, 256, 8, 4, 16, 6, 16, 32),
}
CHUNK = 256  # queries of the selected branch and of the window at a time


# ----------------------------------------------------------------------------------------------------------------------
# NSA.

class Compress(nn.Module):
    """phi: the mean of a block's rows plus a small MLP of them. [B, G, T, D] -> [B, G, blocks, D]"""

    def __init__(self, s):
        super().__init__()
        D = s.dim // s.heads
        self.block, self.stride = s.block, s.stride
        self.fc1, self.fc2 = nn.Linear(s.block * D, s.phi), nn.Linear(s.phi, D, bias=False)

    def forward(self, x):
        blocks = x.unfold(2, self.block, self.stride).transpose(-1, -2)  # [B, G, blocks, block, D]
        return blocks.mean(3) + self.fc2(F.silu(self.fc1(blocks.flatten(3))))


class Masks:
    """Everything that depends only on the length."""

    def __init__(self, T, s):
        D = s.dim // s.heads
        t, blocks, selectable = torch.arange(T), (T - s.block) // s.stride + 1, (T + s.select - 1) // s.select
        self.cos, self.sin = rotation_of(T, D, "cpu")
        start = torch.arange(blocks) * s.stride
        self.compressed = start + s.block - 1 <= t[:, None]  # visible
        begin = torch.arange(selectable) * s.select
        end = torch.minimum(start[:, None] + s.block, begin + s.select)
        self.shared = (end - torch.maximum(start[:, None], begin)).clamp_min(0) / s.stride
        own, block = t // s.select, torch.arange(selectable)
        self.forced = (block == 0) | (block == own[:, None]) | (block == own[:, None] - 1)
        self.candidates = block <= own[:, None]
        self.causal = t <= t[:, None]
        self.window = self.causal & (t > t[:, None] - s.window)


class Attention(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.s, self.D, self.heads = s, s.dim // s.heads, s.heads // s.groups  # of a group
        self.widths = [s.dim, 6 * s.groups * self.D, 3 * s.heads]
        self.project, self.o = nn.Linear(s.dim, sum(self.widths), bias=False), nn.Linear(s.dim, s.dim, bias=False)
        self.phi_k, self.phi_v = Compress(s), Compress(s)

    def forward(self, x, m):
        B, T, C = x.shape
        H, G, D = self.s.heads, self.s.groups, self.D
        q, kv, gate = self.project(x).split(self.widths, -1)
        q = rotate(q.view(B, T, H, D).transpose(1, 2), m.cos, m.sin)  # head a of group g is g * self.heads + a
        kc, vc, ks, vs, kw, vw = kv.view(B, T, 6, G, D).permute(2, 0, 3, 1, 4)
        ks, kw = rotate(ks, m.cos, m.sin), rotate(kw, m.cos, m.sin)
        kc, vc = self.phi_k(kc), self.phi_v(vc)
        at_block = slice(0, self.s.stride * kc.shape[2], self.s.stride)
        kc = rotate(kc, m.cos[at_block], m.sin[at_block])
        q, ks, kw, kc = (y.to(vs.dtype) for y in (q, ks, kw, kc))

        grouped = q.view(B, G, self.heads * T, D)
        scores = (grouped @ kc.transpose(-1, -2) / math.sqrt(D)).view(B, G, self.heads, T, -1).float()
        weights = scores.masked_fill(~m.compressed, -1e30).softmax(-1) * m.compressed
        compressed = (weights.to(vc.dtype).view(B, G, self.heads * T, -1) @ vc).view(B, H, T, D)
        with torch.no_grad():
            importance = (weights.sum(2) @ m.shared).masked_fill(m.forced, 1e9).masked_fill(~m.candidates, -1)
            best = importance.topk(min(self.s.count, importance.shape[-1]), -1).indices
            chosen = torch.zeros_like(importance, dtype=torch.bool).scatter_(-1, best, True)

        selected, window = [], []
        for begin in range(0, T, CHUNK):
            end, oldest = min(T, begin + CHUNK), max(0, begin - self.s.window + 1)
            queries = q[:, :, begin:end]
            seen = chosen[:, :, begin:end].repeat_interleave(self.s.select, -1)[..., :end] & m.causal[begin:end, :end]
            selected.append(F.scaled_dot_product_attention(
                queries, ks[:, :, :end], vs[:, :, :end], seen.repeat_interleave(self.heads, 1), enable_gqa=True))
            window.append(F.scaled_dot_product_attention(
                queries, kw[:, :, oldest:end], vw[:, :, oldest:end], m.window[begin:end, oldest:end], enable_gqa=True))
        gate = gate.sigmoid().view(B, T, H, 3).transpose(1, 2)
        branches = compressed, torch.cat(selected, 2), torch.cat(window, 2)
        y = sum(gate[..., i:i + 1] * branch for i, branch in enumerate(branches))
        return self.o(y.transpose(1, 2).reshape(B, T, C))


# ----------------------------------------------------------------------------------------------------------------------
# Timing.

def busy_seconds():
    """Processor time of the whole machine since it started, all cores together."""
    fields = [int(x) for x in open("/proc/stat").readline().split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def time_steps(a):
    torch.manual_seed(0)
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(cores)
    given = {name: getattr(a, name) for name in ("layers", "dim", "heads") if getattr(a, name)}
    sizes = SIZES[a.model]._replace(**given, **({"hidden": 4 * a.dim} if a.dim else {}))
    if a.what == "nsa":
        model = Model(sizes.vocab, sizes.layers, sizes.dim, sizes.hidden, lambda: Attention(sizes))
        context = [Masks(a.seq_len, sizes)]
    else:
        model = make_dense(sizes.vocab, sizes.layers, sizes.dim, sizes.hidden, sizes.heads)
        context = rotation_of(a.seq_len, sizes.dim // sizes.heads, "cpu")
    optimiser = make_adamw(model)
    autocast = torch.autocast("cpu", dtype=torch.bfloat16) if a.dtype == "bf16" else contextlib.nullcontext()
    name = f"torch-{a.what}{'-compiled' if a.compile else ''}-{a.dtype}"
    forward = torch.compile(model) if a.compile else model
    for step in range(2 + a.steps):
        if step == 2:
            begun, busy, own = time.perf_counter(), busy_seconds(), time.process_time()
        tokens = torch.randint(sizes.vocab, (a.batch, a.seq_len + 1))
        start = time.perf_counter()
        loss = train_step(forward, model, optimiser, tokens, context, autocast)
        if step >= 2:
            print(f"rate {name} {a.batch * a.seq_len / (time.perf_counter() - start):.1f}", flush=True)
    others = max(0.0, busy_seconds() - busy - (time.process_time() - own)) / (time.perf_counter() - begun) / cores
    parameters = sum(p.numel() for p in model.parameters())
    print(f"# {name}: PyTorch {torch.__version__}, {parameters / 1e6:.1f}M parameters, loss {loss.item():.3f},"
          f" {cores} threads, peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB,"
          f" load of others {100 * others:.0f} %", flush=True)


def time_attention(a):
    T, dtype = a.seq_len, torch.bfloat16 if a.dtype == "bf16" else torch.float32
    repetitions = 1 if T >= 32768 else 3 if T > 8192 else 5
    for kv_heads in (12, 2):
        q, k, v, dout = (torch.randn(1, heads, T, 64, dtype=dtype, requires_grad=i < 3)
                         for i, heads in enumerate((12, kv_heads, kv_heads, 12)))
        seconds = [[], []]
        for _ in range(repetitions + (T < 32768)):  # the first warms up, where there are several
            start = time.perf_counter()
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv_heads != 12)
            middle = time.perf_counter()
            torch.autograd.grad(out, (q, k, v), dout)
            seconds[0].append(middle - start)
            seconds[1].append(time.perf_counter() - middle)
        forward, backward = (1e6 / T * statistics.median(s[-repetitions:]) for s in seconds)
        print(f"    PyTorch {torch.__version__}, scaled_dot_product_attention, {kv_heads} heads of keys and values,"
              f" {a.dtype}: forward {forward:.1f}, backward {backward:.1f} us a token", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_subparsers(dest="what", required=True)
    for name in ("nsa", "dense", "sdpa"):
        one = what.add_parser(name)
        one.add_argument("--seq-len", type=int, default=2048)
        one.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="bf16: autocast")
        one.set_defaults(do=time_attention if name == "sdpa" else time_steps)
        if name == "sdpa":
            continue
        one.add_argument("--batch", type=int, default=1)
        one.add_argument("--steps", type=int, default=3, help="timed steps, after two to warm up")
        one.add_argument("--compile", action="store_true", help="torch.compile the model, while it warms up")
        one.add_argument("--model", choices=list(SIZES), default="125m", help="the preset of train_nsa")
        for size in ("layers", "dim", "heads"):
            one.add_argument(f"--{size}", type=int, help="another number than the preset's")
    a = parser.parse_args()
    a.do(a)


if __name__ == "__main__":
    main()
