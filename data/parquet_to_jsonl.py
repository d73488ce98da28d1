#!/usr/bin/env python3
"""parquet_to_jsonl.py IN.parquet OUT.jsonl: writes the column `text` as one {"text": ...} per line.

Reads the file batch by batch, so memory does not grow with its size. OUT.jsonl gets its name only when it is whole.
"""
import json
import os
import sys


def fail(text):
    # One line of bounded length that leaves the terminal as it was, whatever the file contains.
    sys.exit("parquet_to_jsonl.py: " + "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:2000]))


def main():
    if {"-h", "--help"} & set(sys.argv[1:]):
        print("usage: " + __doc__)
        sys.exit()
    if len(sys.argv) != 3:
        print("usage: parquet_to_jsonl.py IN.parquet OUT.jsonl (--help says more)", file=sys.stderr)
        sys.exit(2)
    source, target = sys.argv[1:]
    if os.path.lexists(target):  # a rename would replace whatever this is, even a device
        fail(f"{target} exists already: remove it or choose another name")
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        fail(f"pyarrow is not installed: run {os.path.basename(sys.executable)} -m pip install pyarrow")

    unfinished = target + ".tmp"
    rows = 0
    try:
        parquet = pyarrow.parquet.ParquetFile(source)
        if "text" not in parquet.schema_arrow.names:
            fail(f"{source} has no column 'text', only: {', '.join(parquet.schema_arrow.names)}")
        with open(unfinished, "w", encoding="utf-8", newline="\n") as out:
            for batch in parquet.iter_batches(batch_size=1000, columns=["text"]):
                for text in batch.column(0).to_pylist():
                    if not isinstance(text, str):
                        fail(f"{source}: row {rows} has no text but {repr(text)[:80]}")
                    out.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                    rows += 1
            out.flush()
            os.fsync(out.fileno())
        if rows != parquet.metadata.num_rows:
            fail(f"{source}: {rows} rows came, its footer counts {parquet.metadata.num_rows}: fetch it again")
        os.rename(unfinished, target)
    except Exception as error:  # damaged data causes errors of Arrow, but also of decoding, memory and others
        fail(f"{source} -> {target}: after {rows} rows: {type(error).__name__}: {' '.join(str(error).split())}")
    finally:
        if os.path.exists(unfinished):
            os.remove(unfinished)
    print(f"{target}: {rows} documents")


main()
