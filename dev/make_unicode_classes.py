#!/usr/bin/env python3
"""Writes lib/data/unicode_classes.h: the letters, numbers and white space of Unicode, for GPT-2's pre-tokeniser.

    python3 dev/make_unicode_classes.py > lib/data/unicode_classes.h

The version of Unicode is that of Python's unicodedata module, or of the package unicodedata2 if it is installed
(unicodedata2==16.0.0 made the file in the repository). tiktoken 0.14 uses Unicode 16.0 too: the two agree on every code
point.
"""
import sys
import textwrap

if {"-h", "--help"} & set(sys.argv[1:]):
    print(__doc__)
    sys.exit()

try:
    import unicodedata2 as unicodedata
except ImportError:
    import unicodedata


def category(code):
    return unicodedata.category(chr(code))


def is_white_space(code):
    # The property White_Space, which is not str.isspace(): the separators, tab to carriage return, and next line.
    return category(code) in ("Zs", "Zl", "Zp") or 0x09 <= code <= 0x0D or code == 0x85


def table(name, member):
    """The maximal runs FIRST-LAST of code points that `member` accepts."""
    found = []
    for code in filter(member, range(0x110000)):
        if found and found[-1][1] == code - 1:
            found[-1][1] = code
        else:
            found.append([code, code])
    items = " ".join(f"{first:X}-{last:X}" if first < last else f"{first:X}" for first, last in found)
    lines = [f'    "{line} "' for line in textwrap.wrap(items, 113, break_on_hyphens=False)]
    print(f"\ninline constexpr char {name}[] =\n" + "\n".join(lines) + ";")


print(f"""\
// unicode_classes.h: the letters (general category L), numbers (N) and white space (property White_Space) of Unicode
// {unicodedata.unidata_version}, for the pre-tokeniser in tokenizer.h: runs of code points, FIRST-LAST or one alone, \
in hexadecimal digits.
// Written by dev/make_unicode_classes.py; do not edit.
#pragma once

// clang-format off""")
table("unicode_letters", lambda code: category(code).startswith("L"))
table("unicode_numbers", lambda code: category(code).startswith("N"))
table("unicode_white_space", is_white_space)
print("\n// clang-format on")
