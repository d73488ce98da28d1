"""llmc_files.py FOLDER: writes the files that llm.c's CPU trainer (train_gpt2.c) reads, with random weights and random
tokens, so that nothing has to be downloaded; the time of a step does not depend on them. FOLDER is a checkout of
llm.c. Then run `make train_gpt2` there, and dev/bench/cpu.sh ... --llmc FOLDER.
"""
import array
import os
import random
import struct
import sys

if {"-h", "--help"} & set(sys.argv[1:]):
    print(__doc__)
    sys.exit()
if len(sys.argv) != 2 or not os.path.exists(os.path.join(sys.argv[1], "train_gpt2.c")):
    sys.exit("llmc_files.py: expected one argument, a checkout of llm.c (a folder with train_gpt2.c)")
folder = sys.argv[1]


def write(name, header, body):
    path = os.path.join(folder, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as out:
        out.write(struct.pack("256i", *(header + [0] * (256 - len(header)))))
        for block in body:
            block.tofile(out)


max_T, V, L, heads, C, padded_V = 1024, 50257, 12, 12, 768, 50304  # GPT-2 124M
parameters = padded_V * C + max_T * C + L * (12 * C * C + 13 * C) + 2 * C
source = random.Random(1)
pool = array.array("f", (source.gauss(0, 0.02) for _ in range(1 << 16)))
blocks = [pool] * (parameters // len(pool)) + [pool[: parameters % len(pool)]]
write("gpt2_124M.bin", [20240326, 3, max_T, V, L, heads, C, padded_V], blocks)
tokens = array.array("H", (source.randrange(V) for _ in range(40000)))
for part in ("train", "val"):
    write(f"dev/data/tinyshakespeare/tiny_shakespeare_{part}.bin", [20240520, 1, len(tokens)], [tokens])
