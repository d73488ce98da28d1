#!/usr/bin/env python3
"""Writes lib/data/unicode_classes.h: the letters, numbers and white space of Unicode, for GPT-2's pre-tokeniser.

    python3 dev/make_unicode_classes.py > lib/data/unicode_classes.h

The version of Unicode is that of Python's unicodedata module, or of the package unicodedata2 if it is installed
(unicodedata2==16.0.0 made the file in the repository). tiktoken 0.14 uses Unicode 16.0 too: the two agree on every code
point.
"""
import sys

if {"-h", "--help"} & set(sys.argv[1:]):
    print(__doc__)
    sys.exit()

try:
    import unicodedata2 as unicodedata
except ImportError:
    import unicodedata


def is_letter(code):
    return unicodedata.category(chr(code)).startswith("L")


def is_number(code):
    return unicodedata.category(chr(code)).startswith("N")


def is_white_space(code):
    # The property White_Space, which is not str.isspace(): the separators, tab to carriage return, and next line.
    return unicodedata.category(chr(code)) in ("Zs", "Zl", "Zp") or 0x09 <= code <= 0x0D or code == 0x85


def ranges(member):
    """The maximal runs [first, last] of code points that `member` accepts."""
    found = []
    for code in range(0x110000):
        if member(code):
            if found and found[-1][1] == code - 1:
                found[-1][1] = code
            else:
                found.append([code, code])
    return found


def table(name, member):
    print(f"\ninline constexpr UnicodeRange {name}[] = {{")
    line = "   "
    for first, last in ranges(member):
        item = f" {{0x{first:X}, 0x{last:X}}},"
        if len(line) + len(item) > 120:
            print(line)
            line = "   "
        line += item
    print(line)
    print("};")


print(f"""\
// unicode_classes.h: the letters (general category L), numbers (N) and white space (property White_Space) of Unicode
// {unicodedata.unidata_version}, for the pre-tokeniser in tokenizer.h. Written by dev/make_unicode_classes.py; do not
// edit.
#pragma once
#include <cstdint>

struct UnicodeRange {{
    uint32_t first, last;  // both belong to the range; ranges are sorted and do not touch
}};

// clang-format off""")
table("unicode_letters", is_letter)
table("unicode_numbers", is_number)
table("unicode_white_space", is_white_space)
print("\n// clang-format on")
