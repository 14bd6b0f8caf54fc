"""One process of Mooncake Store for `okv-bench peer`: the one that stores or the one that asks it.

    mooncake_peer.py store --master HOST:PORT --segment_bytes N --directory DIR
    mooncake_peer.py client --master HOST:PORT --directory DIR --blocks N --block_bytes N
                            --request_blocks N --pids P,P

Speaks only the public Python API of the PyPI package mooncake-transfer-engine-non-cuda, over TCP,
with buffers registered in advance. Files in DIR are the whole protocol: `store` writes store.ready
and stays; `client` writes client.ready, then runs a round for each go.N that appears and writes its
result to done.N: seconds of every put and get request, CPU seconds of both phases over this process
and those of --pids. A round puts every block, gets every block into other memory, compares all
bytes, and removes them. Both run until they are killed.
"""

import argparse
import ctypes
import json
import mmap
import os
import sys
import time

from mooncake.store import MooncakeDistributedStore

TICKS = os.sysconf("SC_CLK_TCK")


def write(directory, name, text):
    path = os.path.join(directory, name)
    with open(path + ".new", "w") as file:
        file.write(text)
    os.rename(path + ".new", path)


def wait_for(directory, name):
    while not os.path.exists(os.path.join(directory, name)):
        time.sleep(0.005)


def open_store(args, segment_bytes):
    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, 64 << 20, "tcp", "", args.master)
    if code != 0:
        sys.exit(f"mooncake_peer: setup gave {code}")
    return store


def cpu_seconds(pids):
    """User and system time of these processes, all threads."""
    total = 0
    for pid in pids:
        with open(f"/proc/{pid}/stat") as file:
            words = file.read().rsplit(") ", 1)[1].split()
        total += int(words[11]) + int(words[12])
    return total / TICKS


class Buffer:
    """Registered memory of `blocks` blocks."""

    def __init__(self, store, blocks, block_bytes):
        self.memory = mmap.mmap(-1, blocks * block_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        ctypes.memset(self.base, 0, blocks * block_bytes)
        self.addresses = [self.base + i * block_bytes for i in range(blocks)]
        code = store.register_buffer(self.base, blocks * block_bytes)
        if code != 0:
            sys.exit(f"mooncake_peer: register_buffer gave {code}")


def timed(args, phase, call):
    """Seconds of each request, `call(first, end)` for its blocks."""
    seconds = []
    pids = args.pids + [os.getpid()]
    cpu = cpu_seconds(pids)
    for first in range(0, args.blocks, args.request_blocks):
        begin = time.perf_counter()
        call(first, min(args.blocks, first + args.request_blocks))
        seconds.append(time.perf_counter() - begin)
    return {f"{phase}_request_seconds": seconds, f"{phase}_cpu_seconds": cpu_seconds(pids) - cpu}


def run_round(args, store, source, target, number):
    keys = [f"round-{number}-block-{i}" for i in range(args.blocks)]
    sizes = [args.block_bytes] * args.blocks

    def put(first, end):
        codes = store.batch_put_from(keys[first:end], source.addresses[first:end], sizes[first:end])
        if any(code != 0 for code in codes):
            sys.exit(f"mooncake_peer: put gave {codes}")

    def get(first, end):
        codes = store.batch_get_into(keys[first:end], target.addresses[first:end], sizes[first:end])
        if any(code != args.block_bytes for code in codes):
            sys.exit(f"mooncake_peer: get gave {codes}")

    for i in range(args.blocks):  # Every block of every round is another one.
        stamp = f"{number}/{i}".encode()
        ctypes.memmove(source.addresses[i], stamp, len(stamp))
    result = timed(args, "put", put)
    ctypes.memset(target.base, 0, args.blocks * args.block_bytes)
    result |= timed(args, "get", get)
    if source.memory[:] != target.memory[:]:
        sys.exit("mooncake_peer: other bytes came back")
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("role", choices=["store", "client"])
    parser.add_argument("--master", required=True)
    parser.add_argument("--directory", required=True)
    parser.add_argument("--segment_bytes", type=int, default=0)
    parser.add_argument("--blocks", type=int, default=1)
    parser.add_argument("--block_bytes", type=int, default=1)
    parser.add_argument("--request_blocks", type=int, default=1)
    parser.add_argument("--pids", default="", help="other processes whose CPU time counts")
    args = parser.parse_args()
    args.pids = [int(pid) for pid in args.pids.split(",") if pid]
    store = open_store(args, args.segment_bytes)
    if args.role == "store":
        write(args.directory, "store.ready", "ready\n")
        while True:
            time.sleep(3600)
    source = Buffer(store, args.blocks, args.block_bytes)
    target = Buffer(store, args.blocks, args.block_bytes)
    for i in range(args.blocks):
        ctypes.memmove(source.addresses[i], os.urandom(args.block_bytes), args.block_bytes)
    write(args.directory, "client.ready", "ready\n")
    number = 0
    while True:
        wait_for(args.directory, f"go.{number}")
        result = run_round(args, store, source, target, number)
        write(args.directory, f"done.{number}", json.dumps(result) + "\n")
        if store.remove_all(True) < 0:
            sys.exit("mooncake_peer: remove_all failed")
        number += 1


if __name__ == "__main__":
    main()
