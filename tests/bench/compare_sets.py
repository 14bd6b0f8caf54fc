#!/usr/bin/env python3
"""Compares the rotations and clip ranks of two rotation sets.

  tests/bench/compare_sets.py ONE OTHER

Exits 1 when more than one bf16 number of 1,000 differs, or a clip rank does.
"""

import array
import json
import struct
import sys


def tensors(path):
    with open(path, "rb") as file:
        raw = file.read()
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__")
    for name, one in header.items():
        begin, end = (8 + length + offset for offset in one["data_offsets"])
        yield name, raw[begin:end]


def main():
    one, other = (dict(tensors(path)) for path in sys.argv[1:])
    failed = False
    for name in ("r_k", "r_v"):
        a, b = array.array("H", one[name]), array.array("H", other[name])
        different = 0 if one[name] == other[name] else sum(x != y for x, y in zip(a, b))
        failed |= len(a) != len(b) or different * 1000 > len(a)
        print(f"{name}: {different} of {len(a)} bf16 numbers differ")
    for name in ("clip_rank_k", "clip_rank_v"):
        failed |= one[name] != other[name]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
