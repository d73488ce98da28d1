#!/usr/bin/env python3
"""nsa_torch.py: training steps of the same model in plain PyTorch on the CPU, as one would write it without custom
kernels: the branches are dense attention under masks, in chunks of queries that see only the keys before them.
For dev/bench/cpu.sh. To compare values, use dev/reference.py.
"""
import math

from needs import needs

with needs("PyTorch"):
    import torch
    import torch.nn as nn
    import torch.nn.functional as F

from torch_timing import arguments, time_steps

args = arguments()
LAYERS, C, H, G, HIDDEN, VOCAB, BLOCK, STRIDE, SELECT, COUNT, WINDOW, PHI = args.sizes
D = C // H
HEADS_PER_GROUP, CHUNK = H // G, 256


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(C))

    def forward(self, x):
        return F.rms_norm(x, (C,), self.weight, 1e-6)


class Compress(nn.Module):
    """phi: the mean of a block's rows plus a small MLP of them. [B, G, T, D] -> [B, G, blocks, D]"""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(BLOCK * D, PHI), nn.Linear(PHI, D, bias=False)

    def forward(self, x):
        blocks = x.unfold(2, BLOCK, STRIDE).transpose(-1, -2)  # [B, G, blocks, BLOCK, D]
        return blocks.mean(3) + self.fc2(F.silu(self.fc1(blocks.flatten(3))))


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Masks:
    """Everything that depends only on the length."""

    def __init__(self, T):
        t, blocks, selectable = torch.arange(T), (T - BLOCK) // STRIDE + 1, (T + SELECT - 1) // SELECT
        angle = t[:, None] * 10000.0 ** (-torch.arange(0, D, 2) / D)
        self.cos, self.sin = angle.cos(), angle.sin()
        start = torch.arange(blocks) * STRIDE
        self.compressed = start + BLOCK - 1 <= t[:, None]  # visible
        begin = torch.arange(selectable) * SELECT
        self.shared = (
            torch.minimum(start[:, None] + BLOCK, begin + SELECT) - torch.maximum(start[:, None], begin)
        ).clamp_min(0) / STRIDE
        own, block = t // SELECT, torch.arange(selectable)
        self.forced = (block == 0) | (block == own[:, None]) | (block == own[:, None] - 1)
        self.candidates = block <= own[:, None]
        self.causal = t <= t[:, None]
        self.window = self.causal & (t > t[:, None] - WINDOW)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(C, H * D + 6 * G * D + 3 * H, bias=False)
        self.phi_k, self.phi_v, self.out = Compress(), Compress(), nn.Linear(C, C, bias=False)

    def forward(self, x, m):
        B, T, _ = x.shape
        q, kv, gate = self.project(x).split([H * D, 6 * G * D, 3 * H], -1)
        q = rotate(q.view(B, T, H, D).transpose(1, 2), m.cos, m.sin)  # head a of group g is g * HEADS_PER_GROUP + a
        kc, vc, ks, vs, kw, vw = kv.view(B, T, 6, G, D).permute(2, 0, 3, 1, 4)
        ks, kw = rotate(ks, m.cos, m.sin), rotate(kw, m.cos, m.sin)
        kc, vc = self.phi_k(kc), self.phi_v(vc)
        at_block = slice(0, STRIDE * kc.shape[2], STRIDE)
        kc = rotate(kc, m.cos[at_block], m.sin[at_block])
        q = q.to(vs.dtype)
        ks, kw, kc = ks.to(q.dtype), kw.to(q.dtype), kc.to(q.dtype)

        grouped = q.view(B, G, HEADS_PER_GROUP * T, D)
        scores = (grouped @ kc.transpose(-1, -2) / math.sqrt(D)).view(B, G, HEADS_PER_GROUP, T, -1).float()
        weights = scores.masked_fill(~m.compressed, -1e30).softmax(-1) * m.compressed
        compressed = (weights.to(vc.dtype).view(B, G, HEADS_PER_GROUP * T, -1) @ vc).view(B, H, T, D)
        with torch.no_grad():
            importance = (weights.sum(2) @ m.shared).masked_fill(m.forced, 1e9).masked_fill(~m.candidates, -1)
            chosen = torch.zeros_like(importance, dtype=torch.bool).scatter_(
                -1, importance.topk(min(COUNT, importance.shape[-1]), -1).indices, True
            )

        selected, window = [], []
        for begin in range(0, T, CHUNK):
            end, oldest = min(T, begin + CHUNK), max(0, begin - WINDOW + 1)
            queries = q[:, :, begin:end]
            seen = chosen[:, :, begin:end].repeat_interleave(SELECT, -1)[..., :end] & m.causal[begin:end, :end]
            selected.append(
                F.scaled_dot_product_attention(
                    queries, ks[:, :, :end], vs[:, :, :end], seen.repeat_interleave(HEADS_PER_GROUP, 1), enable_gqa=True
                )
            )
            window.append(
                F.scaled_dot_product_attention(
                    queries,
                    kw[:, :, oldest:end],
                    vw[:, :, oldest:end],
                    m.window[begin:end, oldest:end],
                    enable_gqa=True,
                )
            )
        gate = gate.sigmoid().view(B, T, H, 3).transpose(1, 2)
        y = (
            gate[..., 0:1] * compressed
            + gate[..., 1:2] * torch.cat(selected, 2)
            + gate[..., 2:3] * torch.cat(window, 2)
        )
        return self.out(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.attention = RMSNorm(), RMSNorm(), Attention()
        self.fc1, self.fc2 = nn.Linear(C, HIDDEN, bias=False), nn.Linear(HIDDEN, C, bias=False)

    def forward(self, x, masks):
        x = x + self.attention(self.norm1(x), masks)
        return x + self.fc2(F.silu(self.fc1(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, layers, seq_len):
        super().__init__()
        self.embed, self.blocks, self.norm, self.masks = (
            nn.Embedding(VOCAB, C),
            nn.ModuleList(Block() for _ in range(layers)),
            RMSNorm(),
            Masks(seq_len),
        )
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, 0, 0.02)

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.masks)
        logits = F.linear(self.norm(x), self.embed.weight)  # tied
        return F.cross_entropy(logits.view(-1, VOCAB).float(), targets.reshape(-1))


if __name__ == "__main__":
    torch.manual_seed(0)
    time_steps("torch-nsa", Model(LAYERS, args.seq_len), VOCAB, args)
