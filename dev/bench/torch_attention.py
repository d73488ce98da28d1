#!/usr/bin/env python3
"""PyTorch's scaled_dot_product_attention, causal, forward and backward, with its flash and its cuDNN backend, in bf16: the dense baseline that stands beside
test_nsa --perf-attention. The same shapes (12 heads of 64, a constant number of tokens), the same method: medians of CUDA-event timings after warm-up, three sets of
inputs in turn. FLOPs are counted as there: 4 D for each pair of query and key forward, 8 D backward. Keys and values have as many heads as queries, as in GPT-2.
"""
import argparse
import statistics

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


def median_us(operation, sets, repetitions):
    for x in sets:
        operation(x)
    marks = []
    for i in range(repetitions):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        operation(sets[i % len(sets)])
        end.record()
        marks.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(1e3 * begin.elapsed_time(end) for begin, end in marks)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=65536, help="sequences times their length")
    parser.add_argument("--lengths", default="2048,4096,8192,16384,32768,65536")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=15)
    args = parser.parse_args()
    print(f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, {torch.cuda.get_device_name()}")
    print(f"{'T':>7} {'B':>4} {'backend':<10} {'pass':<9} {'us':>11} {'TFLOP/s':>9}")
    for T in (int(word) for word in args.lengths.split(",")):
        B = args.tokens // T
        sets = []
        for seed in range(3):
            generator = torch.Generator(device="cuda").manual_seed(seed)
            q, k, v, dout = (torch.randn(B, args.heads, T, args.head_dim, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(4))
            for x in (q, k, v):
                x.requires_grad_()
            sets.append({"q": q, "k": k, "v": v, "dout": dout})
        pairs = B * args.heads * T * (T + 1) / 2
        for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):

            def forward(x):
                x["out"] = scaled_dot_product_attention(x["q"], x["k"], x["v"], is_causal=True)

            def backward(x):
                torch.autograd.grad(x["out"], (x["q"], x["k"], x["v"]), x["dout"], retain_graph=True)

            try:
                with sdpa_kernel(backend):
                    for direction, operation, flops in (("forward", forward, 4), ("backward", backward, 8)):
                        us = median_us(operation, sets, args.repetitions)
                        print(f"{T:7d} {B:4d} {name:<10} {direction:<9} {us:11.1f} {flops * args.head_dim * pairs / us * 1e-6:9.2f}")
                        print(f"result: PyTorch {name} attention {direction}, T={T} | {us:.1f} | us | {B} sequences, {args.heads} heads of {args.head_dim}, bf16, causal", flush=True)
            except RuntimeError as error:  # a backend that this PyTorch or GPU lacks
                print(f"{T:7d} {B:4d} {name:<10} not available: {str(error).splitlines()[0]}", flush=True)
            for x in sets:
                x.pop("out", None)
        del sets
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
