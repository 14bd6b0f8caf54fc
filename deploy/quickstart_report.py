#!/usr/bin/env python3
"""Turns the quickstart's JSON lines and metrics into a table and one JSON line; exits 1 when a
figure that must hold does not.

usage: quickstart_report.py RUN_DIR
"""
import json
import re
import sys


def read_json(path):
    with open(path, encoding="utf-8") as file:
        return json.loads(file.read())


def read_metric(path, name):
    """Sum of a metric over its labels."""
    total = 0.0
    with open(path, encoding="utf-8") as file:
        for line in file:
            if re.match(re.escape(name) + r"[{ ]", line):
                total += float(line.rsplit(" ", 1)[1])
    return int(total)


def bits(stored_bytes, bf16_bytes):
    """Bits per element of what takes bf16_bytes in BF16."""
    return round(16 * stored_bytes / bf16_bytes, 4)


def main():
    run = sys.argv[1]
    cold = read_json(f"{run}/worker-a.json")
    warm = read_json(f"{run}/worker-b.json")
    alone = read_json(f"{run}/worker-alone.json")
    nll = read_json(f"{run}/nll.json")
    stored, logical = (
        sum(read_metric(f"{run}/node{n}.metrics", f"okv_node_{kind}_bytes") for n in (1, 2))
        for kind in ("stored", "logical"))

    exact = all(warm[key] == alone[key] for key in ("tokens", "logits_sha256", "objects_sha256"))
    report = {
        "prompt_tokens": warm["prompt_tokens"],
        "hit_tokens": warm["hit_tokens"],
        "fetched_objects": warm["fetched_objects"],
        "stored_bytes": cold["stored_bytes"],
        "bf16_bytes": cold["bf16_bytes"],
        "bits_per_element": bits(cold["stored_bytes"], cold["bf16_bytes"]),
        "history_bits_per_element": bits(cold["history_bytes"], cold["history_bf16_bytes"]),
        "ttft_cold_s": round(cold["ttft_s"], 3),
        "ttft_warm_s": round(warm["ttft_s"], 3),
        "nll_bf16": round(nll["nll"]["bf16"], 5),
        "nll_int2_oscar": round(nll["nll"]["oscar"], 5),
        "nll_int2_hadamard": round(nll["nll"]["hadamard"], 5),
        "nll_int2_none": round(nll["nll"]["none"], 5),
        "exact_match": exact,
    }
    failures = []
    if not exact:
        failures.append("worker B differs from a run without network and hit")
    if warm["hit_tokens"] < 4096:
        failures.append(f"worker B hit only {warm['hit_tokens']} tokens")
    if stored != report["stored_bytes"] or logical != report["bf16_bytes"]:
        failures.append(f"metrics say stored {stored}, logical {logical}; the worker stored "
                        f"{report['stored_bytes']}, {report['bf16_bytes']}")

    mib = 1 << 20
    metrics_agree = stored == report["stored_bytes"] and logical == report["bf16_bytes"]
    rows = [
        ("prompt of worker B", f"{report['prompt_tokens']} tokens"),
        ("resumed from the cache",
         f"{report['hit_tokens']} tokens, {report['fetched_objects']} objects"),
        ("stored, sink and tail included", f"{report['stored_bytes'] / mib:.1f} MiB = "
         f"{report['bits_per_element']:.2f} bits per element"),
        ("the same in BF16", f"{report['bf16_bytes'] / mib:.1f} MiB"),
        ("history alone", f"{report['history_bits_per_element']:.2f} bits per element"),
        ("metrics of both nodes agree", "yes" if metrics_agree else "NO"),
        ("time to first token, cold", f"{report['ttft_cold_s']:.2f} s"),
        ("time to first token, warm", f"{report['ttft_warm_s']:.2f} s"),
        ("bits equal to a run without cache", "yes" if exact else "NO"),
        ("NLL, BF16 KV", f"{report['nll_bf16']:.4f} nats/token"),
        ("NLL, INT2 history, OSCAR rotation", f"{report['nll_int2_oscar']:.4f}"),
        ("NLL, INT2 history, Hadamard only", f"{report['nll_int2_hadamard']:.4f}"),
        ("NLL, INT2 history, no rotation", f"{report['nll_int2_none']:.4f}"),
    ]
    print()
    for name, value in rows:
        print(f"  {name:<36} {value}")
    print()
    for failure in failures:
        print(f"quickstart: error: {failure}", file=sys.stderr)
    print(json.dumps(report))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
