#!/usr/bin/env python3
"""Times the whole training step of a dense model of 124M parameters in PyTorch with torch.compile, for comparison with
--attention full and with NSA. It has GPT-2's sizes in this project's architecture (RMSNorm, RoPE, SiLU, no biases, tied
head) and the usual fast recipe: bf16 autocast, the residual stream in bf16 as in ours, fused AdamW, clipping by the
norm. Keys and values have as many heads as queries (12, as in GPT-2), where ours have 2 groups. Attention runs with
PyTorch's flash and then with its cuDNN backend; the faster one is the result.

tokens/s is the median over the steps after warm-up, by the GPU's own clock at the end of each: the host runs ahead, as
ours does, and waits once, at the end. The batches are on the GPU beforehand. MFU counts this model's own FLOPs: 6 for
each matrix parameter and token, and 12 D for each pair of query and key (4 forward, 8 backward).

Everything ends within --limit seconds: the second backend is cut off then.
"""

import argparse
import math
import os
import signal
import statistics
import sys
import time

BEGIN = time.perf_counter()
# This cache's key does not say which attention a graph holds: the second backend could get the first one's graph.
os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"

from needs import needs

with needs("PyTorch"):
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

LAYERS, WIDTH, HEADS, VOCABULARY = 12, 768, 12, 50304  # GPT-2's 50257 words, padded as here
WARMUP, STEPS = 8, 25  # steps that are not timed, the compilation among them; and those that are
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def first_line(error):
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def say(text):
    print(f"[{time.perf_counter() - BEGIN:6.1f} s] {text}", flush=True)


def stop(*_):
    raise TimeoutError("stopped at the time limit")


def rotate(x, cosine, sine):
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cosine - high * sine, low * sine + high * cosine), dim=-1)


class FullAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.o = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x, cosine, sine):
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, cosine, sine).to(v.dtype), rotate(k, cosine, sine).to(v.dtype)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, width, hidden, attention):
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.attn = attention
        self.fc1, self.fc2 = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x, *context):
        x = x + self.attn(self.attn_norm(x), *context)
        return x + self.fc2(F.silu(self.fc1(self.mlp_norm(x))))


class Model(nn.Module):
    """A decoder with the attention that `make_attention` makes for each layer, which gets the context of forward()."""

    def __init__(self, vocabulary, layers, width, hidden, make_attention):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, hidden, make_attention()) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                narrow = name.endswith(("o.weight", "fc2.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers) if narrow else 0.02)

    def forward(self, tokens, targets, *context):
        x = self.embed(tokens)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.bfloat16)  # else autocast leaves the residual stream in fp32, twice the bytes
        for block in self.blocks:
            x = block(x, *context)
        logits = self.norm(x) @ self.embed.weight.t()
        return F.cross_entropy(logits.float().flatten(0, 1), targets.reshape(-1))


def make_dense(vocabulary, layers, width, hidden, heads):
    return Model(vocabulary, layers, width, hidden, lambda: FullAttention(width, heads))


def make_adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def train_step(forward, model, optimizer, tokens, context, autocast):
    with autocast:
        loss = forward(tokens[:, :-1], tokens[:, 1:], *context)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss


def time_backend(name, model, optimizer, rotation, args):
    """Seconds of each timed step, end to end on the GPU, and the last loss. Drops the other backend's graphs first."""
    torch.compiler.reset()
    compiled = torch.compile(model)
    batches = torch.randint(VOCABULARY, (8, args.batch, args.seq_len + 1), device="cuda")
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]

    def step(i):
        return train_step(compiled, model, optimizer, batches[i % len(batches)], rotation,
                          torch.autocast("cuda", dtype=torch.bfloat16))

    with sdpa_kernel(BACKENDS[name]):
        for i in range(WARMUP):
            begin = time.perf_counter()
            step(i)
            torch.cuda.synchronize()
            if i == 0:
                say(f"{name}: compiled, and the first step made, in {time.perf_counter() - begin:.1f} s")
        ends[0].record()
        for i in range(STEPS):
            loss = step(i)
            ends[i + 1].record()
        torch.cuda.synchronize()
        seconds = [1e-3 * before.elapsed_time(after) for before, after in zip(ends, ends[1:])]
        say(f"{name}: {STEPS} steps, {1e3 * min(seconds):.1f} to {1e3 * max(seconds):.1f} ms")
    return seconds, loss.item()


def rotation_of(T, D, device, base=10000.0):
    """RoPE's cosines and sines, [T, D/2] each."""
    frequency = base ** (-torch.arange(0, D, 2, device=device).float() / D)
    angle = torch.arange(T, device=device).float()[:, None] * frequency
    return angle.cos(), angle.sin()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--peak-tflops", type=float, default=0, help="of this GPU in dense bf16; 0: MFU n/a")
    parser.add_argument("--limit", type=float, default=180, help="seconds from the start after which nothing is timed")
    args = parser.parse_args()
    say(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name()}")
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = make_dense(VOCABULARY, LAYERS, WIDTH, 4 * WIDTH, HEADS).cuda()
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    D, T = WIDTH // HEADS, args.seq_len
    rotation = rotation_of(T, D, "cuda")
    optimizer = make_adamw(model)
    rates, loss = {}, math.nan
    signal.signal(signal.SIGALRM, stop)
    for name in BACKENDS:
        try:
            # again every two seconds, in case somebody catches it
            signal.setitimer(signal.ITIMER_REAL, max(args.limit - (time.perf_counter() - BEGIN), 0.01), 2)
            seconds, loss = time_backend(name, model, optimizer, rotation, args)
        except Exception as error:
            # This PyTorch or GPU lacks the backend, or memory or time ran out: the other one's figure stands.
            say(f"{name}: not timed: {first_line(error)}")
            optimizer.zero_grad(set_to_none=True)
            continue
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        rates[name] = args.batch * T / statistics.median(seconds)
        say(f"{name}: {rates[name]:.0f} tokens/s, {1e3 * statistics.median(seconds):.1f} ms a step, the median")
    if not rates:
        print("no backend of attention ran: no figure")
        return 1
    fastest = max(rates, key=rates.get)
    rate = rates[fastest]
    flops = 6 * matrices + 12 * D * HEADS * LAYERS * (T + 1) / 2  # of a token
    mfu = f"{100 * rate * flops / (args.peak_tflops * 1e12):.1f} %" if args.peak_tflops else "n/a (--peak-tflops)"
    print(f"dense, {sum(p.numel() for p in model.parameters())} parameters, {args.batch} x {T}, loss {loss:.3f},"
          f" {flops * 1e-6:.1f} MFLOP a token, peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
    others = "".join(f" ({name}: {other:.0f})" for name, other in rates.items() if name != fastest)
    print(f"result: PyTorch dense, torch.compile, T={T} | {rate:.0f} | tokens/s | {args.batch} sequences, attention by"
          f" {fastest}, the fastest backend that ran{others}, {HEADS} heads of keys and values (ours: 2 groups),"
          f" residual stream in bf16 as ours, median of {STEPS} steps, MFU {mfu}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
