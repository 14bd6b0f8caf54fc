#!/usr/bin/env python3
"""Draws decode attention as measured by gpu.sh: time against context for every contender, and a
roofline. Plain SVG, no packages. Prints the figures as Markdown tables.

usage: plot_attend.py RESULTS_DIR OUT_DIR

Reads attend*.json (okv-bench attend --json) and peers*.json (attend_peers.py --json), writes
attend_time.svg and attend_roofline.svg. Files of one device; where two have the same contender and
shape, the first by name counts.
"""
import glob
import json
import math
import os
import re
import sys

OURS = "OscarKV INT2, windows and rotations"
LIMIT = "its bytes at the copy rate"
LOAD = "a kernel that only loads its bytes"
# Name: colour, dash, what a contender is called in the results.
STYLES = {
    "torch flash BF16": ("#b07aa1", ""),
    "cuDNN BF16": ("#4e79a7", ""),
    "FlashInfer BF16, tensor cores": ("#76b7b2", ""),
    "FlashInfer BF16, batch decode": ("#bab0ac", ""),
    "OSCAR Triton INT2": ("#f28e2b", ""),
    OURS: ("#d62728", ""),
    LOAD: ("#555555", "2 3"),
    LIMIT: ("#555555", "6 3"),
}
# mma.sync m16n8k32 of 8-bit integers: 6.9 clocks a warp instruction and SM quarter on an H200, at
# 1.98 GHz and 132 SMs. Queries and probabilities are two bytes each, so a product takes two.
INT8_TERA = 16 * 8 * 32 * 2 / 6.9 * 4 * 132 * 1.98e9 * 1e-12


class Svg:
    def __init__(self, width, height):
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="Helvetica, Arial, sans-serif" '
            'font-size="12">', f'<rect width="{width}" height="{height}" fill="#ffffff"/>']

    def line(self, points, color, dash="", width=2.0):
        text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        extra = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(f'<polyline points="{text}" fill="none" stroke="{color}" '
                          f'stroke-width="{width}"{extra}/>')

    def dot(self, x, y, color, radius=3.2):
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{color}"/>')

    def text(self, x, y, text, anchor="start", color="#222222", size=12, turn=0):
        escaped = text.replace("&", "&amp;").replace("<", "&lt;")
        extra = f' transform="rotate({turn} {x:.1f} {y:.1f})"' if turn else ""
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}" '
                          f'font-size="{size}"{extra}>{escaped}</text>')

    def write(self, path):
        with open(path, "w", encoding="utf-8") as file:
            file.write("\n".join(self.parts + ["</svg>"]) + "\n")


class Axes:
    """A log-log frame: `x` and `y` are (least, most) of the data."""

    def __init__(self, svg, box, x, y):
        self.svg, self.box = svg, box
        self.x, self.y = ([math.log10(v) for v in pair] for pair in (x, y))

    def at(self, x, y):
        left, top, width, height = self.box
        return (left + (math.log10(x) - self.x[0]) / (self.x[1] - self.x[0]) * width,
                top + height - (math.log10(y) - self.y[0]) / (self.y[1] - self.y[0]) * height)

    def frame(self, x_ticks, y_ticks):
        left, top, width, height = self.box
        for value, label in x_ticks:
            x = self.at(value, 10 ** self.y[0])[0]
            self.svg.line([(x, top), (x, top + height)], "#e6e6e6", width=1)
            self.svg.text(x, top + height + 16, label, "middle", "#444444", 11)
        for value, label in y_ticks:
            y = self.at(10 ** self.x[0], value)[1]
            self.svg.line([(left, y), (left + width, y)], "#e6e6e6", width=1)
            self.svg.text(left - 6, y + 4, label, "end", "#444444", 11)
        self.svg.line([(left, top), (left, top + height), (left + width, top + height)], "#888888",
                      width=1)


def read(folder):
    """Rows (contender, heads, batch, context, us, bytes), first found first, and the device."""
    rows, device, copy = {}, "", 0.0
    for path in sorted(glob.glob(os.path.join(folder, "attend*.json")) +
                       glob.glob(os.path.join(folder, "peers*.json"))):
        with open(path, encoding="utf-8") as file:
            report = json.load(file)
        heads = re.match(r"(\d+)/(\d+) heads, d (\d+)(?:, g (\d+))?", report["shape"])
        plain = "query sigma" not in report["shape"] or report["shape"].endswith("query sigma 1")
        if not heads or heads[3] != "128" or heads[4] not in (None, "128") or not plain:
            continue
        device = device or report["device"]
        for row in report["rows"]:
            # Ours: "8x102400, early history"; theirs have the shape apart.
            shape, _, variant = (row["name"] + ", ").partition(", ")
            name = {"early history, ": OURS, "load only, early, ": LOAD}.get(variant)
            if "shape" in row:
                shape, name = row["shape"], row["name"]
            if name not in STYLES or not re.fullmatch(r"\d+x\d+", shape):
                continue
            batch, context = (int(x) for x in shape.split("x"))
            key = (heads[1], batch, context)
            rows.setdefault((name, *key), (row["us"], row["bytes"]))
            if name == OURS:
                copy = copy or row["copy_gb_per_s"]
                rows.setdefault((LIMIT, *key), (row["copy_us"], row["bytes"]))
    return rows, device, copy


def print_shapes(folder, heads, suffix):
    """A row a shape: limit, ours, a kernel that only loads, and the fastest of the others."""
    ours, others = {}, {}
    try:
        with open(os.path.join(folder, f"attend{suffix}.json"), encoding="utf-8") as file:
            report = json.load(file)
        for row in report["rows"]:
            shape, _, variant = row["name"].partition(", ")
            ours.setdefault(shape, {})[variant] = row
        with open(os.path.join(folder, f"peers{suffix}.json"), encoding="utf-8") as file:
            for row in json.load(file)["rows"]:
                others.setdefault(row["shape"], {})[row["name"]] = row
    except FileNotFoundError as error:
        print(f"plot_attend: no {error.filename}: its table is left out", file=sys.stderr)
        return
    copy = report["rows"][0]["copy_gb_per_s"]
    print(f"\n{report['device']}; {report['shape']}; copy {copy:.0f} GB/s\n\n"
          f"| {heads}/8 heads | limit us | us | early us | of the limit | load only us | "
          "fastest BF16 us | ratio | OSCAR INT2 us | 36 layers ms | BF16 ms |")
    print("|---" * 11 + "|")
    for shape, rows in ours.items():
        early, load = rows["early history"], rows.get("load only, early")
        bf16 = [row for name, row in others.get(shape, {}).items() if "BF16" in name]
        best = min(bf16, key=lambda row: row["us"], default=None)
        oscar = others.get(shape, {}).get("OSCAR Triton INT2")
        cells = [shape.replace("x", " x ").replace("r", " ragged to "),
                 f"{early['copy_us']:.1f}", f"{rows['']['us']:.1f}", f"{early['us']:.1f}",
                 f"{early['limit_share']:.0%}", f"{load['us']:.1f}" if load else "",
                 f"{best['us']:.1f} ({best['name']})" if best else "",
                 f"{best['us'] / early['us']:.1f}" if best else "",
                 f"{oscar['us']:.1f}" if oscar else "", f"{early['step_us'] * 1e-3:.2f}",
                 f"{best['step_us'] * 1e-3:.2f}" if best else ""]
        print("| " + " | ".join(cells) + " |")


def print_shares(folder):
    """Every other measurement of ours: share of the limit, early history."""
    print("\n| measurement | shape | us | of the limit |\n|---|---|---|---|")
    for path in sorted(glob.glob(os.path.join(folder, "*.json"))):
        name = os.path.basename(path)[:-5]
        if name.startswith(("peers", "prefill")) or name in ("attend", "attend_heads64"):
            continue
        with open(path, encoding="utf-8") as file:
            report = json.load(file)
        for row in report["rows"]:
            if name.startswith("attend") and not row["name"].endswith(", early history"):
                continue
            print(f"| {name} | {row['name'].replace(', early history', '')} | {row['us']:.2f} | "
                  f"{row['limit_share']:.0%} |")


def legend(svg, left, top, names, columns, step):
    for i, name in enumerate(names):
        x, y = left + i % columns * step, top + i // columns * 20
        color, dash = STYLES[name]
        svg.line([(x, y), (x + 26, y)], color, dash, 2.4)
        if not dash:
            svg.dot(x + 13, y, color)
        svg.text(x + 32, y + 4, name)


def power_ticks(low, high):
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [(m * 10.0 ** p, f"{m * 10 ** p:,}" if p >= 0 else f"{m * 10.0 ** p:g}")
            for p in powers for m in (1, 3) if low <= m * 10.0 ** p <= high]


def draw_time(rows, device, path):
    batches = sorted({key[2] for key in rows if key[1] == "32"})
    batches = [b for b in (1, 8, 32) if b in batches]
    svg = Svg(60 + 340 * len(batches), 470)
    svg.text(20, 24, "Decode attention of one layer, microseconds by context", size=16)
    svg.text(20, 42, f"32 query heads, 8 KV heads, d 128; {device}", color="#666666")
    legend(svg, 20, 64, list(STYLES), 4, 262)
    for panel, batch in enumerate(batches):
        ours = {key[3]: value[0] for key, value in rows.items()
                if key[:3] == (OURS, "32", batch)}
        values = [(key[3], value[0]) for key, value in rows.items()
                  if key[1:3] == ("32", batch) and key[3] in ours]
        contexts = sorted(ours)
        low, high = min(v for _, v in values) / 1.3, max(v for _, v in values) * 1.3
        axes = Axes(svg, (60 + 340 * panel, 125, 280, 290),
                    (contexts[0] / 1.1, contexts[-1] * 1.1), (low, high))
        axes.frame([(c, f"{c // 1024}K") for c in contexts if c != contexts[-1] or
                    c / contexts[-2] > 1.5], power_ticks(low, high))
        svg.text(200 + 340 * panel, 115, f"batch {batch}", "middle", size=13)
        for name, (color, dash) in STYLES.items():
            points = [axes.at(c, rows[(name, "32", batch, c)][0]) for c in contexts
                      if (name, "32", batch, c) in rows]
            svg.line(points, color, dash, 3.0 if name == OURS else 1.8)
            if not dash:
                for x, y in points:
                    svg.dot(x, y, color)
    svg.text(60 + 340 * len(batches) / 2 - 30, 455, "tokens of context a request", "middle",
             "#444444")
    svg.text(16, 270, "us a layer", "middle", "#444444", turn=-90)
    svg.write(path)


def draw_roofline(rows, device, copy, path):
    svg = Svg(1000, 560)
    svg.text(20, 24, "Decode attention against its roofs", size=16)
    svg.text(20, 42, "operations: multiply and add of q k and p v, once each; bytes: keys and "
             f"values as stored; {device}", color="#666666")
    axes = Axes(svg, (70, 70, 600, 430), (2, 300), (5, 1000))
    axes.frame([(x, f"{x:,}") for x in (3, 10, 30, 100, 300)], power_ticks(5, 1000))
    roof = INT8_TERA / 2
    ridge = roof / copy * 1e3
    memory = [axes.at(2, 2e-3 * copy), axes.at(ridge, roof)]
    svg.line([*memory, axes.at(300, roof)], "#222222", width=2.2)
    (x0, y0), (x1, y1) = memory
    svg.text(x0 + 0.3 * (x1 - x0), y0 + 0.3 * (y1 - y0) - 8,
             f"copy rate of the run, {copy / 1000:.2f} TB/s",
             turn=math.degrees(math.atan2(y1 - y0, x1 - x0)))
    x, y = axes.at(300, roof)
    svg.text(x, y - 8, f"8-bit mma.sync, two bytes a number: {roof:.0f} T/s", "end")
    entries = []
    for (name, heads, batch, context), (us, size) in rows.items():
        if name in (LIMIT, LOAD, "FlashInfer BF16, batch decode", "torch flash BF16"):
            continue
        if (batch, context) not in ((1, 32768), (1, 102400), (8, 102400), (32, 32768)):
            continue
        operations = 4.0 * int(heads) * 128 * batch * context
        entries.append((name, heads, batch, context, operations / size, operations / us * 1e-6))
    entries.sort(key=lambda entry: (entry[0] != OURS, entry[0], -entry[5]))
    for i, (name, heads, batch, context, intensity, tera) in enumerate(entries):
        color = STYLES[name][0]
        x, y = axes.at(intensity, tera)
        svg.dot(x, y, color, 4.2 if name == OURS else 3.4)
        line = 84 + 15.2 * i
        svg.dot(696, line - 4, color, 3.4)
        short = "OscarKV INT2" if name == OURS else name
        svg.text(704, line, f"{short}, {heads}/8, {batch} x {context:,}: {tera:.1f}", size=11)
    svg.text(690, 64, "T operations a second", color="#444444", size=11)
    svg.text(370, 535, "operations a byte", "middle", "#444444")
    svg.text(20, 285, "T operations a second", "middle", "#444444", turn=-90)
    svg.write(path)


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    rows, device, copy = read(sys.argv[1])
    if not any(key[0] == OURS for key in rows):
        sys.exit(f"plot_attend: error: {sys.argv[1]} has no results of okv-bench attend")
    os.makedirs(sys.argv[2], exist_ok=True)
    draw_time(rows, device, os.path.join(sys.argv[2], "attend_time.svg"))
    draw_roofline(rows, device, copy, os.path.join(sys.argv[2], "attend_roofline.svg"))
    print_shapes(sys.argv[1], 32, "")
    print_shapes(sys.argv[1], 64, "_heads64")
    print_shares(sys.argv[1])


if __name__ == "__main__":
    main()
