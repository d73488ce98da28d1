#!/usr/bin/env python3
"""tiktoken_rate.py TEXT VOCAB_DIR: MB/s of tiktoken's GPT-2 encoder on one thread, with the vocabulary files in
VOCAB_DIR. For dev/bench/cpu.sh.
"""
import sys
import time

if {"-h", "--help"} & set(sys.argv[1:]):
    print(__doc__)
    sys.exit()
try:
    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
except ImportError:
    print("# tiktoken is not installed")
    sys.exit()

text = open(sys.argv[1], encoding="utf-8", errors="replace").read()
ranks = data_gym_to_mergeable_bpe_ranks(
    vocab_bpe_file=f"{sys.argv[2]}/vocab.bpe", encoder_json_file=f"{sys.argv[2]}/encoder.json"
)
pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
encoding = tiktoken.Encoding(
    name="gpt2", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256}
)
for i in range(6):
    begin = time.perf_counter()
    encoding.encode_ordinary(text)
    if i > 0:
        print(f"rate tokenize-tiktoken {len(text.encode()) * 1e-6 / (time.perf_counter() - begin):.1f}", flush=True)
print(f"# tiktoken {tiktoken.__version__}")
