#!/usr/bin/env python3
"""Times PyTorch's scaled_dot_product_attention on the CPU, causal, forward and backward, at the shape of a layer of
125m: 12 heads of 64, with 12 heads of keys and values (as GPT-2 has) and with our 2 (enable_gqa). For dev/bench/cpu.sh.
Prints microseconds a token, medians.
"""
import argparse
import statistics
import time

from needs import needs

with needs("PyTorch"):
    import torch
    from torch.nn.functional import scaled_dot_product_attention

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--seq-len", type=int, default=2048)
parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
args = parser.parse_args()
T = args.seq_len
repetitions = 1 if T >= 32768 else 3 if T > 8192 else 5
for kv_heads in (12, 2):
    q, k, v, dout = (
        torch.randn(1, heads, T, 64, dtype=getattr(torch, args.dtype), requires_grad=i < 3)
        for i, heads in enumerate((12, kv_heads, kv_heads, 12))
    )
    seconds = [[], []]
    for _ in range(repetitions + (T < 32768)):  # the first warms up, where there are several
        start = time.perf_counter()
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv_heads != 12)
        middle = time.perf_counter()
        torch.autograd.grad(out, (q, k, v), dout)
        seconds[0].append(middle - start)
        seconds[1].append(time.perf_counter() - middle)
    forward, backward = (1e6 / T * statistics.median(s[-repetitions:]) for s in seconds)
    print(
        f"    PyTorch {torch.__version__}, scaled_dot_product_attention, {kv_heads} heads of keys and values,"
        f" {args.dtype}: forward {forward:.1f}, backward {backward:.1f} us a token",
        flush=True,
    )
