#!/usr/bin/env python3
"""Counts what CTest's JUnit files say and names what failed or was skipped, and why.

  tests/junit_counts.py STAGE FILE

Prints a line per failed and per skipped test to standard error, the end of a failed one's output
with it, and "PASSED FAILED SKIPPED" to standard output.
"""

import sys
import xml.etree.ElementTree

# Lines of a failed test's output that are shown: the failed assertions, not a whole server's log.
SHOWN_LINES = 40


def skip_reason(output):
    """What a test gave to GTEST_SKIP(), the line after "file:line: Skipped", or printed behind
    "SKIPPED: "."""
    lines = output.splitlines()
    for line in lines:
        if line.startswith("SKIPPED: "):
            return line.removeprefix("SKIPPED: ")
    for index, line in enumerate(lines[:-1]):
        if line.endswith(": Skipped"):
            return lines[index + 1].strip()
    return "no reason given"


def shown_output(output):
    """The last lines of a failed test's output, and before them where an assertion failed."""
    lines = output.splitlines()
    first = max(0, len(lines) - SHOWN_LINES)
    asserted = [line for line in lines[:first] if ": Failure" in line or ": error:" in line]
    return asserted[:SHOWN_LINES] + lines[first:]


def main():
    stage, path = sys.argv[1:3]
    passed = failed = skipped = 0
    for case in xml.etree.ElementTree.parse(path).getroot().iter("testcase"):
        status, output = case.get("status"), case.findtext("system-out") or ""
        marker = case.find("skipped")
        # One that is "not run" for another reason, as when its program was not built, has failed.
        message = "" if marker is None else marker.get("message", "")
        was_skipped = "REGULAR_EXPRESSION" in message or "SKIP_RETURN_CODE" in message
        if status == "run":
            passed += 1
        elif status == "disabled" or was_skipped:
            skipped += 1
            reason = "disabled" if status == "disabled" else skip_reason(output)
            print(f"{stage}: skipped: {case.get('name')}: {reason}", file=sys.stderr)
        else:
            failed += 1
            print(f"{stage}: FAILED: {case.get('name')}", file=sys.stderr)
            for line in shown_output(output):
                print(f"  | {line}", file=sys.stderr)
    print(passed, failed, skipped)


if __name__ == "__main__":
    main()
