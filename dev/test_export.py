#!/usr/bin/env python3
"""test_export.py: what `train_nsa export` writes, as Hugging Face's transformers sees it.

    python3 dev/test_export.py [--program ./train_nsa] [--vocab-dir DIR]

Trains small models for a few steps, exports them, and compares transformers with the program itself: logits on texts of
1 to 3000 tokens, 512 greedy tokens with and without caches, the tokens of a text, and import(export(run)) == run, byte
for byte. Prints a line for each comparison; exit status 1 if one fails. --vocab-dir: GPT-2's vocabulary, for which one
that `train_nsa vocabulary` learns stands in otherwise.

Needs transformers (4.57 or later), torch, safetensors and numpy (pip install them). Two minutes on two cores.
"""

import argparse
import copy
import glob
import os
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "bench"))

from needs import needs

with needs("transformers, torch, safetensors and numpy"):
    import numpy as np
    import torch
    from safetensors.numpy import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as SHIFTED
    from transformers.utils import logging

LOGIT_LIMIT = 1e-4
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 300, 1025, 3000)
GREEDY_TOKENS = 512

# Small, but with the paper's blocks: 3000 tokens are 47 selection blocks, of which 16 are chosen.
PAPER = (
    "--layers 2 --dim 48 --heads 6 --kv-groups 2 --head-dim 16 --cmp-block 32 --cmp-stride 16 --slc-block 64"
    " --slc-count 16 --window 512 --phi-hidden 24 --mlp-hidden 96"
)
TRAINED = " --warmup 10 --lr 4e-3 --seq-len 256 --total-batch 1024 --steps "
# random: no tensor is zero, so no path is silent; but what it writes is one word for ever, so others are trained.
MODELS = {
    "nsa, random": PAPER + " --init random --steps 1 --seq-len 64 --lr 1e-4",
    "nsa, trained": PAPER + TRAINED + "800",
    "nsa, one head a group": "--layers 3 --dim 32 --heads 2 --kv-groups 2 --head-dim 8 --cmp-block 12 --cmp-stride 4"
    " --slc-block 20 --slc-count 4 --window 37 --phi-hidden 8 --mlp-hidden 64 --rope-base 500 --init random --steps 1"
    " --seq-len 64",
    "nsa, two branches": PAPER + " --branches cmp,win --init random --steps 1 --seq-len 64 --lr 1e-4",
    "nsa, options": PAPER + " --qk-norm --smear --head untied --init random --steps 1 --seq-len 64 --lr 1e-4",
    "full": "--attention full --layers 2 --dim 48 --heads 6 --kv-groups 2 --head-dim 16 --mlp-hidden 96"
    + TRAINED + "800",
    "windows and full in turn": "--attention window,full --window 37 --layers 3 --dim 48 --heads 6 --kv-groups 2"
    " --head-dim 16 --mlp-hidden 96 --init random --steps 1 --seq-len 64",
    "windows and nsa in turn": PAPER.replace("--layers 2", "--layers 4").replace("--window 512", "--window 37")
    + " --attention window,nsa,full --qk-norm --init random --steps 1 --seq-len 64 --lr 1e-4",
    "nsa, gpt2": PAPER + " --init random --steps 1 --seq-len 64 --lr 1e-4 --tokenizer gpt2",
}
failures = 0


def report(good, text):
    global failures
    failures += not good
    print("ok    " if good else "FAILED", text, flush=True)


class Program:
    def __init__(self, path, folder):
        self.path, self.folder = os.path.abspath(path), folder

    def __call__(self, *words):
        """Runs it in the folder of the test -> what it printed, as bytes."""
        done = subprocess.run([self.path, *words], cwd=self.folder, capture_output=True)
        if done.returncode:
            sys.exit(f"{' '.join(words)}: status {done.returncode}: {done.stderr.decode(errors='replace')}")
        return done.stdout

    def file(self, *parts):
        return os.path.join(self.folder, *parts)


def written_bytes():
    """byte -> the character that stands for it in vocab.json: printable ones for themselves, the others from U+0100."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


# ----------------------------------------------------------------------------------------------------------------------
# Comparisons.

def load(name, folder):
    """-> the model. Neither it nor the file has a tensor that the other lacks."""
    model, found = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    other = {kind: sorted(found[kind]) for kind in ("missing_keys", "unexpected_keys") if found[kind]}
    report(not other, f"{name}: the tensors of the file are those of the model" + (f": {other}" if other else ""))
    return model.eval()


def tokens_of_shard(path):
    return np.fromfile(path, dtype=np.uint16, offset=1024)


def same_choices(model, state, compute):
    """-> compute(), and the number of tokens before the first at which model and program choose other blocks that are
    of one importance but for rounding. What comes behind that one may differ by any amount."""
    module = sys.modules[type(model).__module__]
    select, same, left = module.select, state["inputs"].shape[1], sorted(k for k in state if k.endswith(".selection"))

    def watched(importance, t, c):
        nonlocal same
        chosen = select(importance, t, c)
        if t[0] == 0:
            watched.ours = torch.from_numpy(state[left.pop(0)]).bool()
        ours = watched.ours[:, :, t, :chosen.shape[-1]]
        for row in (chosen != ours).any(-1).nonzero().tolist():
            row = tuple(row)
            differ = importance[row][chosen[row] != ours[row]]
            if differ.max() - differ.min() < 1e-5 * differ.max():
                same = min(same, int(t[row[-1]]))
        return chosen

    module.select = watched
    try:
        return compute(), same
    finally:
        module.select = select


def compare_logits(name, program, run, shards, model):
    """The program's own dump of a batch (logits and inputs) against the exported model, at every length."""
    worst, dump, ties = {}, program.file("dump.safetensors"), []
    for length in LENGTHS:
        program("--init-from", run, "--seq-len", str(length), "--total-batch", str(length), "--batch", "1", "--data",
                shards, "--dump-state", dump, "--out", "dumped")
        state = load_file(dump)
        os.remove(dump)
        with torch.no_grad():
            inputs = torch.from_numpy(state["inputs"]).long()
            found, same = same_choices(model, state, lambda: model(inputs).logits.numpy())
        ties += [same] if same < length else []
        worst[length] = float(np.abs(found - state["logits"])[:, :same].max(initial=0))
    at = max(worst, key=worst.get)
    close = all(error < LOGIT_LIMIT for error in worst.values())  # max passes over NaN
    report(close, f"{name}: logits of {min(LENGTHS)} to {max(LENGTHS)} tokens differ by at most"
           f" {worst[at]:.1e} (at {at}); the largest is {np.abs(state['logits']).max():.1f}"
           + "".join(f"; a tie at token {t}" for t in ties))


def compare_chunks(name, model, tokens):
    """Pieces of any length through the cache against one pass."""
    tokens = torch.from_numpy(tokens[:1200].astype(np.int64))[None]
    with torch.no_grad():
        whole, cache, pieces, at = model(tokens).logits, {}, [], 0
        for length in [1, 7, 1, 1, 5, 16, 33, 200, 1, 300, 1, 1, 257, 1200]:
            out = model(tokens[:, at:at + length], use_cache=True, **cache)
            pieces.append(out.logits)
            cache, at = {name: out[name] for name in ("past_key_values", "cache") if name in vars(out)}, at + length
    worst = (torch.cat(pieces, 1) - whole).abs().max().item()
    report(worst < LOGIT_LIMIT, f"{name}: logits of 1200 tokens in pieces through the cache differ by {worst:.1e}")


def compare_greedy(name, program, run, model, tokenizer, prompt_text):
    out = program("sample", "--from", run, "--temperature", "0", "--past-end", "--tokens",
                  str(GREEDY_TOKENS), "--prompt", prompt_text)
    # as the program prints them: end-of-text as a newline, one more at the end
    byte_of = {c: b for b, c in written_bytes().items()} | {"\0": 10}
    prompt = tokenizer(tokenizer.bos_token + prompt_text, return_tensors="pt")
    made, read = {}, {True: 0, False: 0}
    for cached in (True, False):
        def count(_, args, given, cached=cached):
            read[cached] += given["input_ids"].shape[1]
        hook = model.register_forward_pre_hook(count, with_kwargs=True)
        made[cached] = model.generate(**prompt, do_sample=False, max_new_tokens=GREEDY_TOKENS, use_cache=cached,
                                      eos_token_id=None)[0]
        hook.remove()
    new = made[True][prompt.input_ids.shape[1]:].tolist()
    text = b"".join(b"\n" if t == tokenizer.bos_token_id else bytes(byte_of[c] for c in written)
                    for t, written in zip(new, tokenizer.convert_ids_to_tokens(new)))
    report(out == prompt_text.encode() + text + b"\n",
           f"{name}: {len(new)} greedy tokens, {len(set(new))} different ones, are those of ./train_nsa sample")
    report(torch.equal(made[True], made[False]), f"{name}: the same without caches")
    report(read[True] == len(made[True]) - 1, f"{name}: with caches {read[True]} tokens were read for them, each once")


def compare_tokens(name, program, tokenizer, text, vocabulary):
    """The exported tokenizer against ./train_nsa tokenize, whose shards begin with end-of-text."""
    with open(program.file("awkward.txt"), "w", encoding="utf-8", newline="") as file:
        file.write(text)
    for old in glob.glob(program.file("awkward_*.bin")):
        os.remove(old)
    program("tokenize", "--in", "awkward.txt", "--out", "awkward", "--val-fraction", "0", *vocabulary)
    expected = tokens_of_shard(program.file("awkward_train_000001.bin")).tolist()
    ids = tokenizer(text).input_ids
    report([tokenizer.bos_token_id] + ids == expected and tokenizer.decode(ids) == text,
           f"{name}: {len(ids)} tokens of {len(text.encode())} bytes, and back")


def compare_import(name, program, run, export, model, tokenizer):
    """As exported, and as transformers writes it again."""
    again = export + "_again"
    model.save_pretrained(program.file(again))
    tokenizer.save_pretrained(program.file(again))
    prompt = ("--prompt", "a text", "--temperature", "0", "--tokens", "20")
    original = open(glob.glob(program.file(run, "step_*", "model.safetensors"))[0], "rb").read()
    for folder in (export, again):
        program("import", "--from", folder, "--out", folder + "_back")
        back = open(program.file(folder + "_back", "step_00000000", "model.safetensors"), "rb").read()
        report(back == original, f"{name}: import of the {'export' if folder == export else 're-saved export'} has the"
               f" {len(back)} bytes of the run's model.safetensors")
        report(program("sample", "--from", folder + "_back", *prompt) == program("sample", "--from", run, *prompt),
               f"{name}: and finds its vocabulary")


def check_padding(model, tokenizer):
    """Texts of different lengths in one batch, padded on either side, against each alone."""
    texts = [tokenizer.bos_token + text for text in ("two words", "a", "a text that is longer than the others by far")]
    settings = {"do_sample": False, "max_new_tokens": 40, "eos_token_id": None}

    def of(batch):
        return model(**batch).logits, model.generate(**batch, **settings)[:, batch.input_ids.shape[1]:]

    with torch.no_grad():
        alone = [of(tokenizer(text, return_tensors="pt")) for text in texts]
        for side in ("left", "right"):
            tokenizer.padding_side = side
            batch = tokenizer(texts, padding=True, return_tensors="pt")
            logits, made = of(batch)
            worst = max((x[m.bool()] - y[0]).abs().max().item()
                        for x, m, (y, _) in zip(logits, batch.attention_mask, alone))
            report(worst < LOGIT_LIMIT, f"padding on the {side} changes no logit of a text: {worst:.1e}")
            report(all(torch.equal(x, y[0]) for x, (_, y) in zip(made, alone)),
                   f"padding on the {side}: 40 greedy tokens of three prompts are those of each alone")
        ids, mask = torch.arange(6)[None], torch.tensor([[True, True, False, True, True, True]])
        worst = (model(ids, attention_mask=mask).logits[mask] - model(ids[mask][None]).logits[0]).abs().max()
        report(worst < LOGIT_LIMIT, f"a gap is as if it were not there: {worst:.1e}")
    tokenizer.padding_side = "left"


def check_refusals(model):
    ids = torch.arange(3)[None]
    unasked = {"return_dict": None, "output_attentions": None, "output_hidden_states": None}  # as PEFT passes them
    report("logits" in model(ids, **unasked), "None for what nobody asked for is taken")
    report(type(model).__name__ in SHIFTED.values(), "Trainer's label smoothing compares with the next token")
    for text, given in (("inputs_embeds", {"inputs_embeds": torch.zeros(1, 3, model.config.dim)}),
                        ("position_ids", {"input_ids": ids, "position_ids": ids}),
                        ("empty prompt", {"input_ids": ids[:, :0]}),
                        ("attention_mask", {"input_ids": ids, "attention_mask": ids[:, :2]})):
        try:
            model(**given)
            report(False, f"{text} is refused")
        except ValueError as e:
            report(text in str(e), f"{text} is refused")


def check_habits(model, tokenizer):
    """What callers of other models do by habit, and expect the same of."""
    settings = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None}
    prompt = tokenizer(tokenizer.bos_token + "a text that begins a document", return_tensors="pt")
    ids, (one, two) = prompt.input_ids, (model.generate(**prompt, **settings | {"max_new_tokens": n}) for n in (20, 40))
    report(torch.equal(model.generate(ids, **settings), one), "the first token is no padding where no mask is given")
    out = model.generate(**prompt, **settings, return_dict_in_generate=True)
    for name, given in (("all", one), ("the new", one[:, out.past_key_values.get_seq_length():])):
        made = model.generate(given, attention_mask=torch.ones_like(one), **settings,
                              past_key_values=copy.deepcopy(out.past_key_values))
        report(torch.equal(made, two[:, -made.shape[1]:]), f"generate goes on with a cache, given {name} ids")
    step, past, made = ids, None, []
    with torch.no_grad():
        for _ in range(20):
            out = model(step, past_key_values=past)
            step, past = out.logits[:, -1:].argmax(-1), out.past_key_values
            made.append(step)
    report(torch.equal(torch.cat(made, 1), one[:, ids.shape[1]:]), "a cache comes back, asked for or not")
    labels = ids.clone()
    labels[:, :5] = -100
    loss, sums = (model(ids, labels=labels, num_items_in_batch=n).loss for n in (None, 7))
    report(abs(sums * 7 - loss * (ids.shape[1] - 5)) < 1e-4, "num_items_in_batch divides the sum of the losses")
    states = model.base_model(ids, use_cache=False).last_hidden_state
    worst = (states @ model.get_output_embeddings().weight.T - model(ids).logits).abs().max()
    report(worst < LOGIT_LIMIT, f"states and head, as TRL takes them, make the logits: {worst:.1e}")
    gradients = []
    for checkpoints in (False, True):
        other = copy.deepcopy(model).train()
        if checkpoints:
            other.gradient_checkpointing_enable()
        other(tokens := torch.arange(200)[None], labels=tokens).loss.backward()
        gradients.append([x.grad for x in other.parameters()])
    report(all(map(torch.equal, *gradients)), "gradients are the same with gradient checkpointing")


def check_smallest_weights(model):
    """As in the program, weights below e^-87 are 0: PyTorch's denormals would choose other blocks among the last."""
    attend = sys.modules[type(model).__module__].attend
    q, k = torch.ones(1, 1, 1, 1, 1), torch.tensor([0.0, -86.0, -90.0]).view(1, 1, 3, 1)
    p = attend(q, k, k, torch.ones(1, 1, 1, 3, dtype=torch.bool))[1].flatten().tolist()
    report(p[1] > 0 and p[2] == 0, f"weights below e^-87 are 0: {p}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--program", default="./train_nsa")
    parser.add_argument("--vocab-dir")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        test(Program(arguments.program, folder), os.path.abspath(arguments.vocab_dir) if arguments.vocab_dir else None)
    print(f"{failures} failed" if failures else "all is the same")
    sys.exit(failures > 0)


def test(program, vocab_dir):
    text = "".join(open(os.path.join(HERE, name), encoding="utf-8").read() for name in ("MODEL.md", "GUIDE.md"))
    with open(program.file("text.txt"), "w", encoding="utf-8") as file:
        file.write(text)
    if not vocab_dir:
        vocab_dir = program.file("vocabulary")
        program("vocabulary", "--in", "text.txt", "--size", "3000", "--out", vocab_dir)
    awkward = text[:20000] + (
        "don't  stop\t\n\n  x \u00a0 \u0100\u0144 \u4f60\u597d \U0001f600 1234 '\u2019s\r\nI'LL we've !?... \x01\x7f "
    )
    for name, options in MODELS.items():
        run, export = (kind + "/" + name.replace(", ", "_").replace(" ", "_") for kind in ("runs", "exports"))
        gpt2 = "gpt2" in options
        shards = "text_gpt2" if gpt2 else "text_bytes"
        vocabulary = ["--tokenizer", "gpt2", "--vocab-dir", vocab_dir] if gpt2 else ["--tokenizer", "bytes"]
        if not os.path.exists(program.file(shards + "_train_000001.bin")):
            program("tokenize", "--in", "text.txt", "--out", shards, "--val-fraction", "0", *vocabulary)
        data = shards + "_train_*.bin"
        program(*options.split(), "--out", run, "--eval-every", "0", "--sample-tokens", "0", "--data", data,
                *(vocabulary[2:]))
        program("export", "--from", run, "--out", export)
        model = load(name, program.file(export))
        # No code of ours makes it, whichever class is asked for.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(program.file(export))
        same = AutoTokenizer.from_pretrained(program.file(export), trust_remote_code=True)
        report(same(awkward).input_ids == tokenizer(awkward).input_ids, f"{name}: AutoTokenizer has the same tokens")
        compare_logits(name, program, run, data, model)
        compare_chunks(name, model, tokens_of_shard(program.file(shards + "_train_000001.bin")))
        compare_greedy(name, program, run, model, tokenizer, text[:300])
        compare_tokens(name, program, tokenizer, awkward, vocabulary)
        compare_import(name, program, run, export, model, tokenizer)
    check_padding(model, tokenizer)
    check_refusals(model)
    check_habits(model, tokenizer)
    check_smallest_weights(model)


if __name__ == "__main__":
    main()
