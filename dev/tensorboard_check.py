#!/usr/bin/env python3
"""Opens the event files of a run with the tensorboard package and compares them with the run's log.jsonl.

usage: python3 dev/tensorboard_check.py RUN        (needs: pip install tensorboard; the run: --tensorboard)

Every scalar that TensorBoard shows must be the log's number rounded to a float, and none may be missing. Of steps that
a resume has done again the log has the second time only, and TensorBoard must show that one too.
"""
import json
import math
import struct
import sys


def as_float(x):
    return math.nan if x is None else struct.unpack("f", struct.pack("f", x))[0]


def logged_scalars(path):
    scalars = {}
    for line in open(path):
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # the last line of a run that was killed
        where = "val/" if any(key.startswith("val_loss") for key in entry) else "train/"
        numbers = {where + (key[4:] if key.startswith("val_loss") else key): x for key, x in entry.items()
                   if key not in ("step", "time") and not isinstance(x, (bool, str, list, dict))}
        for i, layer in enumerate(entry.get("layers", [])):
            for key, x in layer.items():
                for branch, y in zip(("_cmp", "_slc", "_win"), x) if isinstance(x, list) else (("", x),):
                    numbers[f"{key}{branch}/layer_{i}"] = y
        for tag, x in numbers.items():
            if x is not None or not tag.endswith("_z"):  # z-scores are unknown for the first 128 steps
                scalars.setdefault(tag, {})[entry["step"]] = as_float(x)
    return scalars


def main():
    if len(sys.argv) != 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        return 0 if "-h" in sys.argv or "--help" in sys.argv else 2
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator
    shown = EventAccumulator(sys.argv[1], size_guidance={SCALARS: 0})
    shown.Reload()
    logged = logged_scalars(sys.argv[1] + "/log.jsonl")
    faults, values = [], 0
    if set(shown.Tags()["scalars"]) != set(logged):
        faults.append(f"the tags differ: {set(shown.Tags()['scalars']) ^ set(logged)}")
    for tag in sorted(set(shown.Tags()["scalars"]) & set(logged)):
        last = max(logged[tag])
        found = {e.step: e.value for e in shown.Scalars(tag) if e.step <= last}
        values += len(found)
        if set(found) != set(logged[tag]):
            faults.append(f"{tag}: the steps differ: {sorted(set(found) ^ set(logged[tag]))[:10]}")
        faults += [f"{tag}, step {step}: {found[step]}, logged {x}" for step, x in logged[tag].items()
                   if step in found and found[step] != x and not (math.isnan(x) and math.isnan(found[step]))]
    for fault in faults[:20]:
        print(fault)
    print(f"{len(logged)} scalars, {values} values, {len(faults)} differences")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
