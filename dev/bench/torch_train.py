#!/usr/bin/env python3
"""Trains torch_step.py's dense model as a run of train_nsa was trained: on its shards in its order of samples, with its
AdamW, its schedule and its batches, from the weights of a checkpoint; prints the loss of each step, and how far the
run's losses are from them.

    torch_train.py RUN FIRST

RUN is the run, of --attention full with as many --kv-groups as heads; FIRST the checkpoint, such as that of a step with
--lr 0 under the same --seed; none: weights of its own, beside any run. On a GPU the model is compiled. Needs PyTorch
and NumPy.
"""
import argparse
import array
import json
import math
import os
import re
import sys
import time

from torch_step import make_dense, rotation_of, torch  # it says what is missing

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [f"{HERE}/..", f"{HERE}/evidence"]
import reference  # noqa: E402
from run import VOCABULARY  # noqa: E402
from ngram import shards_of  # noqa: E402

SHUFFLE = 2  # lib/base/random.h's stream
MASK = (1 << 32) - 1


def random_bits(seed, stream, counter):
    """Philox 4x32-10, as lib/base/random.h has it."""
    a, b, c, d = counter & MASK, counter >> 32, stream & MASK, stream >> 32
    k, l = seed & MASK, seed >> 32
    for _ in range(10):
        p, q = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = q >> 32 ^ b ^ k, q & MASK, p >> 32 ^ d ^ l, p & MASK
        k, l = k + 0x9E3779B9 & MASK, l + 0xBB67AE85 & MASK
    return a | b << 32


def shuffled_position(position, n, seed, epoch):
    """As dataloader.h has it."""
    half = 0
    while 1 << 2 * half < n:
        half += 1
    mask, x = (1 << half) - 1, position
    while True:
        left, right = x >> half, x & mask
        for turn in range(6):
            left, right = right, left ^ random_bits(seed, SHUFFLE + (epoch << 32), turn << 32 | right) & mask
        x = left << half | right
        if x < n:
            return x


class Batches:
    """The samples of T + 1 tokens of a run, in its order."""

    def __init__(self, pattern, T, seed):
        self.T, self.seed, self.next, self.samples = T, seed, 0, []
        for shard in shards_of(pattern):
            tokens = array.array("H", shard)
            self.samples += [(tokens, at) for at in range(0, (len(tokens) - 1) // T * T, T)]

    def take(self, count):
        rows = []
        for _ in range(count):
            epoch, position = divmod(self.next, len(self.samples))
            tokens, at = self.samples[shuffled_position(position, len(self.samples), self.seed, epoch)]
            rows.append(tokens[at:at + self.T + 1].tolist())
            self.next += 1
        return torch.tensor(rows)


def load_weights(model, folder):
    """The checkpoint's tensors, under the names that torch_step.py has for them."""
    found, _ = reference.read_safetensors(f"{folder}/model.safetensors")
    tensors = {name: torch.from_numpy(tensor.copy()) for name, tensor in found.items()}
    state = {"embed.weight": tensors["embed_tokens.weight"], "norm.weight": tensors["norm.weight"]}
    for i in range(len(model.blocks)):
        here, there = f"layers.{i}.", f"blocks.{i}."
        parts = [tensors[f"{here}attn.{name}_proj.weight"] for name in ("q", "k_win", "v_win")]
        state[there + "attn.qkv.weight"] = torch.cat(parts)
        state[there + "attn.o.weight"] = tensors[here + "attn.o_proj.weight"]
        for name in ("attn_norm", "mlp_norm"):
            state[f"{there}{name}.weight"] = tensors[f"{here}{name}.weight"]
        for name in ("fc1", "fc2"):
            state[f"{there}{name}.weight"] = tensors[f"{here}mlp.{name}.weight"]
    model.load_state_dict(state)


def learning_rate(o, step):
    """As lib/run/options.cpp has the cosine."""
    if step <= o["warmup"]:
        return o["lr"] * step / o["warmup"]
    fraction = 0.5 * (1 + math.cos(math.pi * (step - o["warmup"]) / (o["steps"] - o["warmup"])))
    return o["lr"] * (o["lr_final"] + (1 - o["lr_final"]) * fraction)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("first")
    a = parser.parse_args()
    with open(f"{a.run}/run.json") as file:
        o = json.load(file)
    o["warmup"] = int(o["warmup"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(o["seed"])
    torch.set_float32_matmul_precision("high")
    torch.set_num_threads(1)  # of the CPU: tiny models, beside other work
    model = make_dense(VOCABULARY[o["tokenizer"]], o["layers"], o["dim"], o["mlp_hidden"], o["heads"])
    if a.first != "none":
        load_weights(model, a.first)
    model = model.to(device)
    T = o["seq_len"]
    rotation = rotation_of(T, o["dim"] // o["heads"], device, float(o["rope_base"]))
    matrices = [p for p in model.parameters() if p.dim() == 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": o["weight_decay"]},
                                   {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0}],
                                  betas=(0.9, 0.95), eps=1e-8, fused=device == "cuda")
    compiled = torch.compile(model) if device == "cuda" else model
    batches, micro_steps = Batches(o["data"], T, o["seed"]), o["total_batch"] // (o["batch"] * T)
    with open(f"{a.run}/main.log") as file:
        losses = dict(re.findall(r"^s:(\d+) trl:([\d.]+)", file.read(), re.MULTILINE))
    differences = {}
    for step in range(1, o["steps"] + 1):
        begin = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(o, step)
        total = 0
        for _ in range(micro_steps):
            tokens = batches.take(o["batch"]).to(device)
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = compiled(tokens[:, :-1], tokens[:, 1:], *rotation) / micro_steps
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), o["grad_clip"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        differences[step] = abs(float(losses[str(step)]) - total.item())
        print(f"step {step} loss {total.item():.6f} seconds {time.perf_counter() - begin:.3f}", flush=True)
    worst = max(difference for step, difference in differences.items() if step % min(100, o["steps"]) == 0)
    if a.first != "none":
        print(f"largest difference between full attention and PyTorch at every 100th step: {worst:.4f}")


if __name__ == "__main__":
    main()
