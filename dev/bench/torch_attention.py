#!/usr/bin/env python3
"""Times PyTorch's scaled_dot_product_attention, causal, forward and backward, in bf16, with its flash and its cuDNN
backend: the dense baseline for test_device --perf-attention, with its shapes (12 heads of 64, --tokens in all) and its
method: medians of CUDA-event timings after warm-up, three sets of inputs in turn. FLOPs are counted as there: 4 D for
each pair of query and key forward, 8 D backward. It runs once with as many heads of keys and values as we have groups
(2, enable_gqa: our shape) and once with as many as there are queries (12, as in GPT-2). It reports and leaves out what
a backend cannot do. The exit status is 0 if at least one backend ran for each length, otherwise 1.
"""

import argparse
import statistics
import sys

from torch_step import BACKENDS, F, first_line, sdpa_kernel, torch  # it says what is missing

LENGTHS = [2048, 4096, 8192, 16384, 32768, 65536]
HEADS, HEAD_DIM, KV_HEADS = 12, 64, (2, 12)  # ours, and as many as queries
REPETITIONS = 15


def median_us(operation, sets):
    for x in sets:
        operation(x)
    marks = []
    for i in range(REPETITIONS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        operation(sets[i % len(sets)])
        end.record()
        marks.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(1e3 * begin.elapsed_time(end) for begin, end in marks)


def make_sets(B, T, kv_heads):
    """Three times q, dout [B, heads, T, D] and k, v [B, kv_heads, T, D]."""
    sets = []
    for seed in range(3):
        generator = torch.Generator(device="cuda").manual_seed(seed)
        x = {name: torch.randn(B, heads, T, HEAD_DIM, device="cuda", dtype=torch.bfloat16, generator=generator)
             for name, heads in (("q", HEADS), ("k", kv_heads), ("v", kv_heads), ("dout", HEADS))}
        for name in "qkv":
            x[name].requires_grad_()
        sets.append(x)
    return sets


def time_backend(backend, sets, grouped):
    """Microseconds forward and backward."""

    def forward(x):
        x["out"] = F.scaled_dot_product_attention(x["q"], x["k"], x["v"], is_causal=True, enable_gqa=grouped)

    def backward(x):
        torch.autograd.grad(x["out"], (x["q"], x["k"], x["v"]), x["dout"], retain_graph=True)

    try:
        with sdpa_kernel(backend):
            return median_us(forward, sets), median_us(backward, sets)
    finally:
        for x in sets:
            x.pop("out", None)


def time_shape(B, T, kv_heads):
    """Prints the results of one shape; false where no backend ran."""
    shape = f"{HEADS} heads, {kv_heads} of keys and values, {B} x {T}"
    times = {}
    for name, backend in BACKENDS.items():
        try:
            times[name] = time_backend(backend, make_sets(B, T, kv_heads), kv_heads != HEADS)
        except Exception as error:  # this PyTorch, GPU or shape lacks the backend, or memory ran out
            print(f"{shape}: {name} not timed: {first_line(error)}", flush=True)
        torch.cuda.empty_cache()
    pairs = B * HEADS * T * (T + 1) / 2
    for index, direction in enumerate(("forward", "backward") if times else ()):
        fastest, us = min(((name, both[index]) for name, both in times.items()), key=lambda entry: entry[1])
        others = "".join(f"; {name} {both[index]:.1f} us" for name, both in times.items() if name != fastest)
        print(f"result: PyTorch attention, {shape}: {direction} | {us:.1f} | us | {fastest}, the fastest backend,"
              f" {(4, 8)[index] * HEAD_DIM * pairs / us * 1e-6:.1f} TFLOP/s{others}; dimension {HEAD_DIM}, bf16, causal,"
              f" median of {REPETITIONS}", flush=True)
    return bool(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=65536, help="sequences times their length")
    args = parser.parse_args()
    print(f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()},"
          f" {torch.cuda.get_device_name()}")
    missing = [T for T in LENGTHS if not any([time_shape(args.tokens // T, T, heads) for heads in KV_HEADS])]
    if missing:
        print(f"no backend ran for T = {', '.join(map(str, missing))}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
