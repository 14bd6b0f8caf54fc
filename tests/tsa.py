#!/usr/bin/env python3
"""Runs clang's thread-safety analysis over the host code of every library and program.

  tests/tsa.py BUILD_DIR [--jobs N]

BUILD_DIR was configured with clang++ (preset "tsa"). Each command of its compile_commands.json is
run with -fsyntax-only: the analysis needs no object file, and half the time of a compilation is
saved. Tests and generated files are left out. Exits 1 when a file has an error.
"""

import argparse
import concurrent.futures
import json
import os
import shlex
import subprocess
import sys
import time


def syntax_command(command):
    """The compile command without its output, its dependency file and a compiler launcher."""
    words = shlex.split(command)
    start = next(i for i, word in enumerate(words) if os.path.basename(word).startswith("clang"))
    kept, skip_next = [], False
    for word in words[start:]:
        if skip_next:
            skip_next = False
        elif word in ("-o", "-MF", "-MT", "-MQ"):
            skip_next = True
        elif word not in ("-c", "-MD", "-MMD"):
            kept.append(word)
    return kept + ["-fsyntax-only"]


# Breaks the rule on purpose: an analysis that lets this pass sees nothing.
UNGUARDED_ACCESS = """
#include "proto/mutex.h"
struct Counter {
  int Read() { return value_; }
  okv::Mutex mu_;
  int value_ ABSL_GUARDED_BY(mu_) = 0;
};
"""


def sees_unguarded_access(entry):
    command = [word for word in syntax_command(entry["command"]) if word != entry["file"]]
    done = subprocess.run(command + ["-x", "c++", "-"], input=UNGUARDED_ACCESS, text=True,
                          cwd=entry["directory"], stderr=subprocess.PIPE, check=False)
    return done.returncode != 0 and "value_" in done.stderr and "thread-safety" in done.stderr


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("build_dir")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()

    build = os.path.realpath(args.build_dir)
    root = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    with open(os.path.join(build, "compile_commands.json"), encoding="utf-8") as stream:
        entries = json.load(stream)

    skipped = (build + os.sep, os.path.join(root, "tests") + os.sep)
    entries = [entry for entry in entries
               if entry["file"].endswith(".cc") and not entry["file"].startswith(skipped)]
    if not entries:
        print(f"tsa: error: {build} compiles no library or program", file=sys.stderr)
        return 1

    if not sees_unguarded_access(entries[0]):
        print("tsa: error: clang does not report an unguarded access", file=sys.stderr)
        return 1

    def check(entry):
        started = time.monotonic()
        done = subprocess.run(syntax_command(entry["command"]), cwd=entry["directory"], text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        return done.returncode, done.stdout, time.monotonic() - started

    failed = 0
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        futures = {pool.submit(check, entry): entry for entry in entries}
        for count, future in enumerate(concurrent.futures.as_completed(futures), start=1):
            code, output, seconds = future.result()
            name = os.path.relpath(futures[future]["file"], root)
            failed += code != 0
            verdict = "FAILED" if code else "ok"
            print(f"[{count}/{len(entries)}] {name} {seconds:.1f} s {verdict}", flush=True)
            if output:
                print(output, end="", flush=True)
    print(f"tsa: {len(entries)} files checked, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
