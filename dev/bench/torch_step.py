#!/usr/bin/env python3
"""The whole training step of a dense model of 124M parameters in PyTorch with torch.compile: what --attention full, and NSA, are compared with. GPT-2's sizes in this
project's architecture (RMSNorm, RoPE, SiLU, no biases, tied head), bf16 autocast, fused AdamW, clipping by the norm: the usual fast recipe.
tokens/s is the median over steps after warm-up, with one synchronisation a step. MFU counts this model's own FLOPs: 6 for each matrix parameter and token, and 12 D
for each pair of query and key (4 forward, 8 backward).
"""
import argparse
import math
import statistics
import time

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.attn_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x, cosine, sine):
        B, T, C = x.shape
        q, k, v = self.qkv(self.attn_norm(x)).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)

        def rotate(y):
            low, high = y.chunk(2, dim=-1)
            return torch.cat((low * cosine - high * sine, low * sine + high * cosine), dim=-1).to(v.dtype)

        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(B, T, C))
        return x + self.fc2(F.silu(self.fc1(self.mlp_norm(x))))


class Dense(nn.Module):
    def __init__(self, vocabulary, layers, width, heads):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers) if name.endswith(("o.weight", "fc2.weight")) else 0.02)

    def forward(self, tokens, targets, cosine, sine):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cosine, sine)
        logits = self.norm(x) @ self.embed.weight.t()
        return F.cross_entropy(logits.float().flatten(0, 1), targets.reshape(-1))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=50304, help="GPT-2's 50257, padded as here")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--warmup", type=int, default=8, help="steps that are not timed, the compilation among them")
    parser.add_argument("--peak-tflops", type=float, default=0, help="of this GPU in dense bf16; 0: MFU n/a")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = Dense(args.vocabulary, args.layers, args.width, args.heads).cuda()
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    D, T = args.width // args.heads, args.seq_len
    angle = torch.arange(T, device="cuda").float()[:, None] * 10000.0 ** (-torch.arange(0, D, 2, device="cuda").float() / D)
    cosine, sine = angle.cos(), angle.sin()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    compiled = torch.compile(model)
    seconds = []
    for step in range(args.warmup + args.steps):
        tokens = torch.randint(args.vocabulary, (args.batch, T + 1), device="cuda")
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = compiled(tokens[:, :-1], tokens[:, 1:], cosine, sine)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        if step >= args.warmup:
            seconds.append(time.perf_counter() - begin)
    rate = args.batch * T / statistics.median(seconds)
    flops = 6 * matrices + 12 * D * args.heads * args.layers * (T + 1) / 2  # of a token
    mfu = f"{100 * rate * flops / (args.peak_tflops * 1e12):.1f} %" if args.peak_tflops else "n/a (--peak-tflops)"
    print(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name()}: dense, {sum(p.numel() for p in model.parameters())} parameters, {args.batch} x {T}, loss {loss.item():.3f}")
    print(f"{1e3 * statistics.median(seconds):.1f} ms a step, {flops * 1e-6:.1f} MFLOP a token, MFU {mfu}, peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
    print(f"result: PyTorch dense, torch.compile, T={T} | {rate:.0f} | tokens/s | {args.batch} sequences, median of {args.steps} steps, MFU {mfu}")


if __name__ == "__main__":
    main()
