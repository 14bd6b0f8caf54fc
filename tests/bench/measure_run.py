#!/usr/bin/env python3
"""Runs a program and writes what it took, and its last line if that is JSON, as one JSON line.

  tests/bench/measure_run.py FILE PROGRAM [ARGUMENTS...]

Seconds by the clock and of the CPU, and peak memory with and without mapped files. What the program
says on stderr is shown only if it fails; its exit code is the result.
"""

import json
import os
import subprocess
import sys
import threading
import time


def watch(process, peaks):
    """The largest anonymous memory, which the kernel does not keep a maximum of."""
    while process.poll() is None:
        try:
            with open(f"/proc/{process.pid}/status", encoding="ascii") as file:
                fields = dict(line.split(":", 1) for line in file)
            peaks["anonymous"] = max(peaks["anonymous"], int(fields["RssAnon"].split()[0]))
            peaks["all"] = max(peaks["all"], int(fields["VmHWM"].split()[0]))
        except (OSError, KeyError, ValueError):
            pass  # It has just ended.
        time.sleep(0.05)


def main():
    out, command = sys.argv[1], sys.argv[2:]
    peaks = {"anonymous": 0, "all": 0}
    begin, before = time.monotonic(), os.times()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    watcher = threading.Thread(target=watch, args=(process, peaks))
    watcher.start()
    stdout, stderr = process.communicate()
    watcher.join()
    after = os.times()
    if process.returncode != 0:
        sys.stderr.write(stderr)
        return process.returncode
    facts = {
        "wall_s": round(time.monotonic() - begin, 1),
        "cpu_s": round(
            after.children_user + after.children_system
            - before.children_user - before.children_system, 1),
        "peak_gib": round(peaks["all"] / 2**20, 2),
        "peak_anonymous_gib": round(peaks["anonymous"] / 2**20, 2),
    }
    lines = stdout.splitlines()
    try:
        said = json.loads(lines[-1])
        facts.update({key: said[key] for key in ("hash", "layers", "ranks", "gpus") if key in said})
    except (IndexError, ValueError):
        pass
    with open(out, "w", encoding="ascii") as file:
        json.dump(facts, file)
        file.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
