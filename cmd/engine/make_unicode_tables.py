#!/usr/bin/env python3
"""Prints unicode_tables.inc: the code points of \\p{L} and \\p{N} as ranges.

    cmd/engine/make_unicode_tables.py > cmd/engine/unicode_tables.inc
"""
import sys
import unicodedata


def ranges(category):
    found = []
    for point in range(sys.maxunicode + 1):
        if unicodedata.category(chr(point))[0] != category:
            continue
        if found and found[-1][1] == point - 1:
            found[-1][1] = point
        else:
            found.append([point, point])
    return found


def print_table(name, category):
    print(f"constexpr CodePointRange {name}[] = {{")
    line = "   "
    for first, last in ranges(category):
        item = f" {{0x{first:x}, 0x{last:x}}},"
        if len(line) + len(item) > 100:
            print(line)
            line = "   "
        line += item
    print(line)
    print("};")


print(f"// Printed by make_unicode_tables.py from Unicode {unicodedata.unidata_version}.")
print_table("kLetters", "L")
print_table("kNumbers", "N")
