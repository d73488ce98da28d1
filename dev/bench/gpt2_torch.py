#!/usr/bin/env python3
"""gpt2_torch.py: training steps of a dense GPT-2 in plain PyTorch on the CPU, with PyTorch's fused attention.
For dev/bench/cpu.sh.
"""

from needs import needs

with needs("PyTorch"):
    import torch
    import torch.nn as nn
    import torch.nn.functional as F

from torch_timing import arguments, time_steps

args = arguments()
SIZES = args.sizes
WIDTH, HEADS, VOCAB = SIZES.dim, SIZES.heads, SIZES.vocab


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, SIZES.hidden), nn.Linear(SIZES.hidden, WIDTH)

    def forward(self, x):
        B, T, _ = x.shape
        q, k, v = (y.view(B, T, HEADS, WIDTH // HEADS).transpose(1, 2) for y in self.qkv(self.norm1(x)).split(WIDTH, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, WIDTH))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, layers, seq_len):
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(seq_len, WIDTH)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(layers)), nn.LayerNorm(WIDTH)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, 0, 0.02)

    def forward(self, tokens, targets):
        x = self.embed(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embed.weight)  # tied
        return F.cross_entropy(logits.view(-1, VOCAB).float(), targets.reshape(-1))


if __name__ == "__main__":
    torch.manual_seed(0)
    time_steps("torch-dense", GPT2(SIZES.layers, args.seq_len), VOCAB, args)
