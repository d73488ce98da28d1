"""torch_timing.py: times whole training steps of a PyTorch model on the CPU for dev/bench/cpu.sh: forward, backward,
clipping, AdamW. Prints one line per step, "rate NAME tokens/s", and a line of conditions. The models that are timed are
in gpt2_torch.py and nsa_torch.py.
"""
import argparse
import collections
import contextlib
import os
import resource
import sys
import time

from needs import needs

with needs("PyTorch"):
    import torch


# As lib/run/options.h has them. block, stride: of compression; select, count: selection blocks; phi: its hidden width.
Sizes = collections.namedtuple("Sizes", "layers dim heads groups hidden vocab block stride select count window phi")
SIZES = {
    "125m": Sizes(12, 768, 12, 2, 3072, 50257, 32, 16, 64, 16, 512, 128),
    "tiny": Sizes(2, 128, 4, 2, 512, 256, 8, 4, 16, 6, 16, 32),
}


def arguments():
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="bf16: autocast")
    parser.add_argument("--steps", type=int, default=3, help="timed steps, after two to warm up")
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile the model; that happens while it warms up"
    )
    parser.add_argument("--model", choices=list(SIZES), default="125m", help="the preset of train_nsa")
    parser.add_argument("--layers", type=int, help="another number than the preset's; so with --dim and --heads")
    parser.add_argument("--dim", type=int)
    parser.add_argument("--heads", type=int)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    args.sizes = SIZES[args.model]
    given = {name: getattr(args, name) for name in ("layers", "dim", "heads") if getattr(args, name)}
    args.sizes = args.sizes._replace(**given, **({"hidden": 4 * args.dim} if args.dim else {}))
    return args


def busy_seconds():
    """Processor time of the whole machine since it started, all cores together."""
    fields = [int(x) for x in open("/proc/stat").readline().split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def own_seconds():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def time_steps(name, model, vocab, args):
    torch.set_num_threads(args.threads)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    autocast = torch.autocast("cpu", dtype=torch.bfloat16) if args.dtype == "bf16" else contextlib.nullcontext()
    name += f"{'-compiled' if args.compile else ''}-{args.dtype}"
    if args.compile:
        model = torch.compile(model)
    for step in range(2 + args.steps):
        if step == 2:
            begun, busy, own = time.perf_counter(), busy_seconds(), own_seconds()
        tokens = torch.randint(vocab, (args.batch, args.seq_len + 1))
        start = time.perf_counter()
        with autocast:
            loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        if step >= 2:
            print(f"rate {name} {args.batch * args.seq_len / (time.perf_counter() - start):.1f}", flush=True)
    cores = len(os.sched_getaffinity(0))
    others = max(0.0, busy_seconds() - busy - (own_seconds() - own)) / (time.perf_counter() - begun) / cores
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"# {name}: PyTorch {torch.__version__}, {parameters / 1e6:.1f}M parameters, loss {loss.item():.3f},"
        f" {args.threads} threads, peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB,"
        f" load of others {100 * others:.0f} %",
        flush=True,
    )


if __name__ == "__main__":
    print(__doc__)
