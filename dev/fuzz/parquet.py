#!/usr/bin/env python3
"""parquet.py [CASES [FIRST]]: runs data/parquet_to_jsonl.py on damaged parquet files, one process each (needs pyarrow).

Either the script refuses a file with status 1, one printable line on stderr and nothing left behind, or it turns it
into JSON lines. Anything else is a finding: the file stays in the working folder as finding-CASE.parquet and the exit
status is 1. Case n is the same file in every run.
"""

import io
import json
import os
import random
import resource
import runpy
import signal
import sys
import tempfile

if {"-h", "--help"} & set(sys.argv[1:]):
    print("usage: " + __doc__)
    sys.exit()

import pyarrow
import pyarrow.parquet

SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "data", "parquet_to_jsonl.py")
SECONDS, MEGABYTES = 20, 2048


def whole_files():
    texts = ["one", "zwei \u00e4\u00f6", "", "line\nbreak \u2028", "long " * 300, "\U0001F600"] * 40
    tables = [
        pyarrow.table({"text": texts}),
        pyarrow.table({"id": list(range(len(texts))), "text": texts, "score": [0.5] * len(texts)}),
        pyarrow.table({"text": ["a", None, "b"]}),
        pyarrow.table({"text": [1, 2, 3]}),
        pyarrow.table({"text": pyarrow.array([b"\xff\xfe", b"ok"], pyarrow.binary())}),
        pyarrow.table({"text": pyarrow.array([{"a": "x"}, {"a": "y"}])}),
        pyarrow.table({"text": pyarrow.array([["x"], ["y", "z"]])}),
        pyarrow.table({"body\nof\x1b[31m text": ["a"], "other": ["b"]}),
        pyarrow.table({"text": pyarrow.array([], pyarrow.string())}),
        pyarrow.table({"text": pyarrow.array(["a", "b", "a"] * 50).dictionary_encode()}),
        pyarrow.table({"text": pyarrow.array(texts, pyarrow.large_string())}),
    ]
    files = []
    for number, table in enumerate(tables):
        for compression in ("none", "snappy", "zstd", "gzip") if number < 2 else ("none",):
            for version in ("1.0", "2.0"):
                out = io.BytesIO()
                pyarrow.parquet.write_table(
                    table,
                    out,
                    compression=compression,
                    data_page_version=version,
                    row_group_size=100,
                    use_dictionary=number % 2 == 0,
                    write_page_checksum=False,
                )
                files.append(out.getvalue())
    # Text that is not UTF-8 although the schema says so: bytes of the same length in place of the characters.
    files.append(files[-1].replace("zwei \u00e4\u00f6".encode(), b"zwei \xe4\xe4\xf6\xf6"))
    files.append(b"")
    files.append(b"PAR1PAR1")
    return files


def damaged(files, case):
    r = random.Random(case)
    data = bytearray(files[case % len(files)])
    if case < len(files):
        return bytes(data)
    for _ in range(r.choice((1, 1, 1, 2, 4, 16))):
        if not data:
            break
        # Most of what steers the reader is in the footer, at the end.
        at = r.randrange(len(data)) if r.random() < 0.5 else max(0, len(data) - 1 - r.randrange(min(len(data), 400)))
        kind = r.randrange(7)
        if kind == 0:
            data[at] ^= 1 << r.randrange(8)
        elif kind == 1:
            data[at] = r.choice((0, 1, 0x7F, 0x80, 0xFF, r.randrange(256)))
        elif kind == 2:
            data[at:at + 4] = r.choice((0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)).to_bytes(4, "little")
        elif kind == 3:
            del data[at:at + r.randrange(1, 64)]
        elif kind == 4:
            data[at:at] = data[at:at + r.randrange(1, 64)]
        elif kind == 5:
            data[at:at] = bytes(r.randrange(256) for _ in range(r.randrange(1, 8)))
        elif r.random() < 0.3:
            del data[at:]
    return bytes(data)


def run(source, target, messages):
    """Runs the script in a child process that has already loaded pyarrow; returns its wait status."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    resource.setrlimit(resource.RLIMIT_AS, (MEGABYTES << 20, MEGABYTES << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(SECONDS)
    os.dup2(messages.fileno(), 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.argv = [SCRIPT, source, target]
    status = 0
    try:
        runpy.run_path(SCRIPT, run_name="__main__")
    except SystemExit as end:  # as the interpreter does
        status = end.code if isinstance(end.code, int) else 1 if end.code else 0
        if isinstance(end.code, str):
            os.write(2, (end.code + "\n").encode("utf-8", "backslashreplace"))
    except BaseException as error:
        os.write(2, f"Traceback: {type(error).__name__}: {error}\n".encode("utf-8", "backslashreplace"))
        status = 1
    os._exit(status)


def judge(status, text, source, target, folder):
    """What is wrong with the outcome, or None."""
    if not os.WIFEXITED(status):
        return f"ended by signal {os.WTERMSIG(status)}"
    code = os.WEXITSTATUS(status)
    if code == 0:
        with open(target, encoding="utf-8", newline="\n") as lines:
            if not all(list(json.loads(line)) == ["text"] for line in lines):
                return "a line is not {\"text\": ...}"
        os.remove(target)
    elif code != 1:
        return f"exit status {code}"
    elif (
        not text.startswith("parquet_to_jsonl.py: ")
        or text.count("\n") != 1
        or not text.endswith("\n")
        or not text[:-1].isprintable()
    ):
        return f"no printable line: {text!r}"
    elif len(text) > 4000:
        return f"a message of {len(text)} characters"
    if left := [name for name in os.listdir(folder) if name not in ("in.parquet", "messages")]:
        return f"left behind: {left}"
    return None


def main():
    cases, first = [int(word) for word in sys.argv[1:]] + [3000, 0][len(sys.argv) - 1:]
    files, refused, findings = whole_files(), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        source, target = os.path.join(folder, "in.parquet"), os.path.join(folder, "out.jsonl")
        for case in range(first, first + cases):
            data = damaged(files, case)
            with open(source, "wb") as out:
                out.write(data)
            with open(os.path.join(folder, "messages"), "w+b") as messages:
                status = run(source, target, messages)
                messages.seek(0)
                text = messages.read().decode("utf-8", "backslashreplace")
            refused += os.WIFEXITED(status) and os.WEXITSTATUS(status) == 1
            if wrong := judge(status, text, source, target, folder):
                findings += 1
                with open(f"finding-{case}.parquet", "wb") as out:
                    out.write(data)
                print(f"case {case}: {wrong}")
                for name in ("out.jsonl", "out.jsonl.tmp"):
                    if os.path.exists(os.path.join(folder, name)):
                        os.remove(os.path.join(folder, name))
    print(f"{cases} damaged parquet files: {refused} refused, {cases - refused} others, {findings} findings")
    sys.exit(1 if findings else 0)


main()
