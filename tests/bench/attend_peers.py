#!/usr/bin/env python3
"""Times decode attention of others, for comparison with `okv-bench attend`: torch's flash and cuDNN
attention, FlashInfer's two decode kernels, and the INT2 Triton kernel that OSCAR's authors publish.

usage: attend_peers.py [--shapes 1x32768,64r4096,...] [--query_heads 32] [--kv_heads 8]
       [--head_dim 128] [--rounds 9] [--only NAME,NAME] [--json FILE]
       [--flashinfer_library FILE.so | --flashinfer_include DIR] [--oscar_kernel FILE.py]

torch's kernels are in PyTorch. Nothing of the others is part of this repository:
- FlashInfer: DIR is the include/ folder of its sources; 0.6.8 (commit f00ce36) compiles with CUDA
  13.0. Given that, the script compiles flashinfer_peer.cu itself, which takes 20 s; the target
  okv_flashinfer_peer of tests/bench/CMakeLists.txt builds the same library beforehand.
- OSCAR: FILE.py is triton_ops/decode_attention.py of its SGLang tree (FutureMLS-Lab/OSCAR,
  sglang-research/python/sglang/srt/layers/attention).

One query token a request. Every layer launched has data of its own, as far as memory allows, at
least 4 layers and 300 MB, in pages of 64 tokens in random order (8 for OSCAR), contiguous for
torch. 36 launches are one CUDA graph; the time is the median of alternating rounds. Every
contender's first layer is compared with float64 before it is timed. The published kernel gets the
number of splits that is fastest for it, and neither windows nor rotations. Lengths of a ragged
shape are those of okv-bench with the same seed; torch's kernels are left out there.
"""
import argparse
import ctypes
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import types

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

LAUNCHES = 36
PAGE = 64
OSCAR_PAGE = 8
DATA_BYTES_MAX = 24 << 30  # Of one kind of data
HERE = os.path.dirname(os.path.abspath(__file__))


def mt19937_64(seed, count):
    """The first numbers of C++'s std::mt19937_64."""
    mask, size, middle = (1 << 64) - 1, 312, 156
    state = [seed & mask]
    for i in range(1, size):
        state.append((6364136223846793005 * (state[-1] ^ state[-1] >> 62) + i) & mask)
    result = []
    while len(result) < count:
        for i in range(size):
            x = (state[i] & ~0x7fffffff & mask) | (state[(i + 1) % size] & 0x7fffffff)
            state[i] = state[(i + middle) % size] ^ x >> 1 ^ (0xb5026f5aa96619e9 if x & 1 else 0)
        for x in state:
            x ^= x >> 29 & 0x5555555555555555
            x ^= x << 17 & 0x71d67fffeda60000
            x ^= x << 37 & 0xfff7eee000000000
            result.append((x ^ x >> 43) & mask)
    return result[:count]


class Shape:
    def __init__(self, text, args):
        self.text = text
        self.ragged = "r" in text
        batch, context = (int(x) for x in text.split("r" if self.ragged else "x"))
        self.lengths = ([1 + x % context for x in mt19937_64(args.seed, batch)] if self.ragged
                        else [context] * batch)
        self.batch = batch
        self.tokens = sum(self.lengths)
        self.query_heads, self.kv_heads = args.query_heads, args.kv_heads
        self.dim = args.head_dim
        self.scale = 1 / math.sqrt(self.dim)
        self.query = normal(batch, self.query_heads, self.dim)

    def layers(self, layer_bytes):
        """How many layers have data of their own."""
        return max(4, -(-300_000_000 // layer_bytes),
                   min(LAUNCHES, DATA_BYTES_MAX // layer_bytes))

    def bf16_bytes(self):
        return 4 * self.tokens * self.kv_heads * self.dim


def normal(*size):
    return torch.randn(*size, device="cuda", dtype=torch.bfloat16)


def int32(values):
    return torch.tensor(values, device="cuda", dtype=torch.int32)


def time_us(run):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3


def median(values):
    return sorted(values)[len(values) // 2]


def copy_rate():
    """Bytes read and written per microsecond by a device-to-device copy."""
    source = torch.zeros(2 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / median([time_us(lambda: target.copy_(source)) for _ in range(9)])


def capture(contender, launches=LAUNCHES):
    def run():
        for launch in range(launches):
            contender.launch(launch % contender.layers)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        contender.launch(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    torch.cuda.synchronize()
    return graph


class Sdpa:
    """torch over contiguous keys and values [batch, kv_heads, context, dim]."""
    tolerance = 1e-2

    def __init__(self, name, backend, shape, data):
        self.name, self.backend, self.data, self.layers = name, backend, data, len(data)
        self.query = shape.query.unsqueeze(2)
        self.bytes = shape.bf16_bytes()

    @staticmethod
    def make_data(shape):
        size = (shape.batch, shape.kv_heads, shape.lengths[0], shape.dim)
        return [(normal(*size), normal(*size)) for _ in range(shape.layers(shape.bf16_bytes()))]

    def launch(self, layer):
        key, value = self.data[layer]
        with sdpa_kernel(self.backend):
            self.out = torch.nn.functional.scaled_dot_product_attention(
                self.query, key, value, enable_gqa=True)

    def output(self):
        return self.out.squeeze(2)

    def rows(self, request):
        key, value = self.data[0]
        return key[request], value[request]


class FlashInferData:
    """Pages [pages, kv_heads, PAGE, dim] in random order, and where the requests' pages are."""

    def __init__(self, shape):
        counts = [-(-length // PAGE) for length in shape.lengths]
        self.starts = [0]
        for count in counts:
            self.starts.append(self.starts[-1] + count)
        pages = self.starts[-1]
        self.indptr = int32(self.starts)
        self.indices = torch.randperm(pages, device="cuda").int()
        self.last = int32([length - (count - 1) * PAGE
                           for length, count in zip(shape.lengths, counts)])
        size = (pages, shape.kv_heads, PAGE, shape.dim)
        layer_bytes = 4 * pages * PAGE * shape.kv_heads * shape.dim
        self.layers = [(normal(*size), normal(*size)) for _ in range(shape.layers(layer_bytes))]


class FlashInfer:
    tolerance = 1e-2

    def __init__(self, name, library, tensor_cores, shape, data):
        self.name, self.library, self.shape, self.data = name, library, shape, data
        self.layers = len(data.layers)
        self.bytes = shape.bf16_bytes()
        self.out = torch.full_like(shape.query, math.nan)
        host = (ctypes.c_int32 * len(data.starts))(*data.starts)
        self.plan = library.okv_flashinfer_plan(tensor_cores, shape.batch, shape.query_heads,
                                                shape.kv_heads, PAGE, host)
        if not self.plan:
            raise RuntimeError("no plan")

    def __del__(self):
        if getattr(self, "plan", None):
            self.library.okv_flashinfer_free(self.plan)

    def launch(self, layer):
        key, value = self.data.layers[layer]
        error = self.library.okv_flashinfer_run(
            self.plan, self.shape.query.data_ptr(), key.data_ptr(), value.data_ptr(),
            self.data.indptr.data_ptr(), self.data.indices.data_ptr(), self.data.last.data_ptr(),
            self.shape.scale, self.out.data_ptr(), torch.cuda.current_stream().cuda_stream)
        if error != 0:
            raise RuntimeError(f"CUDA error {error}")

    def output(self):
        return self.out

    def rows(self, request):
        pages = self.data.indices[self.data.starts[request]:self.data.starts[request + 1]].long()
        length = self.shape.lengths[request]
        return tuple(x[pages].transpose(0, 1).flatten(1, 2)[:, :length]
                     for x in self.data.layers[0])


class Oscar:
    """The published kernel: codes [tokens, kv_heads, dim / 4], channel i in byte i % (dim / 4),
    bits 2 (i / (dim / 4)), and fp32 (scale, zero) a row: x = (code - zero) scale. Without
    rotations."""
    tolerance = 2e-2
    name = "OSCAR Triton INT2"

    def __init__(self, kernel, shape):
        self.kernel, self.shape = kernel, shape
        self.bytes = shape.tokens * shape.kv_heads * 2 * (shape.dim // 4 + 8)
        pages = [-(-length // OSCAR_PAGE) for length in shape.lengths]
        pool = sum(pages) * OSCAR_PAGE
        slots = (torch.randperm(sum(pages), device="cuda")[:, None] * OSCAR_PAGE +
                 torch.arange(OSCAR_PAGE, device="cuda")).flatten()
        self.indices, self.starts, at = [], [0], 0
        for length, count in zip(shape.lengths, pages):
            self.indices.append(slots[at:at + length])
            self.starts.append(self.starts[-1] + length)
            at += count * OSCAR_PAGE
        self.indices = torch.cat(self.indices)
        self.indptr = int32(self.starts)
        self.data = [self.make_layer(pool) for _ in range(shape.layers(self.bytes))]
        self.layers = len(self.data)
        self.out = torch.full_like(shape.query, math.nan)
        self.use_splits(32)

    def make_layer(self, pool):
        size = (pool, self.shape.kv_heads, self.shape.dim // 4)
        codes = [torch.randint(256, size, dtype=torch.uint8, device="cuda") for _ in range(2)]
        params = []
        for _ in range(2):
            scale = 0.3 + 0.5 * torch.rand(*size[:2], device="cuda")
            zero = 1.5 + 0.15 * torch.randn(*size[:2], device="cuda")
            params.append(torch.stack((scale, zero), dim=-1))
        return (*codes, *params)

    def use_splits(self, splits):
        shape = self.shape
        self.splits = splits
        self.split_counts = int32([splits] * shape.batch)
        self.partial = torch.empty(shape.batch, shape.query_heads, splits, shape.dim,
                                   device="cuda", dtype=torch.float32)
        self.partial_lse = torch.empty(shape.batch, shape.query_heads, splits, device="cuda",
                                       dtype=torch.float32)

    def choose_splits(self):
        def us(splits):
            self.use_splits(splits)
            graph = capture(self, 4)
            return min(time_us(graph.replay) for _ in range(3))
        self.use_splits(min((8, 16, 32, 64, 128), key=us))

    def launch(self, layer):
        key, value, key_params, value_params = self.data[layer]
        self.kernel.decode_attention_fwd_quantized(
            self.shape.query, key, value, key_params, value_params, self.out, self.indptr,
            self.indices, self.partial, self.partial_lse, self.split_counts, self.splits,
            self.shape.scale, "int2")

    def output(self):
        return self.out

    def rows(self, request):
        slots = self.indices[self.starts[request]:self.starts[request + 1]]
        key, value, key_params, value_params = (x[slots] for x in self.data[0])

        def dequantize(codes, params):
            both = torch.cat([codes >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1).double()
            return ((both - params[..., 1:].double()) * params[..., :1].double()).transpose(0, 1)
        return dequantize(key, key_params), dequantize(value, value_params)


def worst_error(contender, shape):
    """Relative L2 error of the first layer's output against float64, of the worst request."""
    contender.launch(0)
    torch.cuda.synchronize()
    output = contender.output().double()
    worst = 0.0
    for request in range(shape.batch):
        key, value = (x.double() for x in contender.rows(request))
        query = shape.query[request].double().view(shape.kv_heads, -1, shape.dim)
        weights = torch.softmax(query @ key.transpose(1, 2) * shape.scale, dim=-1)
        expected = (weights @ value).view(shape.query_heads, shape.dim)
        error = ((output[request] - expected).norm() / expected.norm()).item()
        worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst


def load_flashinfer(args):
    path = args.flashinfer_library
    if not path and args.flashinfer_include:
        path = os.path.join(tempfile.mkdtemp(), "flashinfer_peer.so")
        subprocess.run(["nvcc", "-std=c++17", "-O3", "-arch=sm_90a", "-shared", "-Xcompiler",
                        "-fPIC", "--expt-relaxed-constexpr", f"-DOKV_HEAD_DIM={args.head_dim}",
                        "-I", args.flashinfer_include, os.path.join(HERE, "flashinfer_peer.cu"),
                        "-o", path], check=True)
    if not path:
        return None
    library = ctypes.CDLL(path)
    pointer, word = ctypes.c_void_p, ctypes.c_uint32
    library.okv_flashinfer_plan.restype = pointer
    library.okv_flashinfer_plan.argtypes = [ctypes.c_int, word, word, word, word, pointer]
    library.okv_flashinfer_run.restype = ctypes.c_int
    library.okv_flashinfer_run.argtypes = [pointer] * 7 + [ctypes.c_float, pointer, pointer]
    library.okv_flashinfer_free.argtypes = [pointer]
    return library


def load_oscar(path):
    """The kernel file alone: what it imports of SGLang besides Triton are two names."""
    if not path:
        return None
    for name, members in (("sglang", {}), ("sglang.srt", {}),
                          ("sglang.srt.utils", {"is_hip": lambda: False}),
                          ("sglang.srt.environ", {"envs": types.SimpleNamespace()})):
        module = types.ModuleType(name)
        module.__dict__.update(members)
        sys.modules[name] = module
    spec = importlib.util.spec_from_file_location("oscar_decode_attention", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def contenders_of(shape, flashinfer, oscar):
    """(name, function that makes it), data shared where they can."""
    shared = {}

    def data(key, make):
        if key not in shared:
            shared[key] = make(shape)
        return shared[key]

    result = []
    if not shape.ragged:
        for name, backend in (("torch flash BF16", SDPBackend.FLASH_ATTENTION),
                              ("cuDNN BF16", SDPBackend.CUDNN_ATTENTION)):
            result.append((name, lambda name=name, backend=backend: Sdpa(
                name, backend, shape, data("dense", Sdpa.make_data))))
    if flashinfer is not None:
        for name, cores in (("FlashInfer BF16, tensor cores", 1),
                            ("FlashInfer BF16, batch decode", 0)):
            result.append((name, lambda name=name, cores=cores: FlashInfer(
                name, flashinfer, cores, shape, data("paged", FlashInferData))))
    if oscar is not None:
        result.append((Oscar.name, lambda: Oscar(oscar, shape)))
    return result


def time_shape(shape, args, flashinfer, oscar):
    rows, graphs, alive = [], {}, []
    for name, make in contenders_of(shape, flashinfer, oscar):
        if args.only and not any(word in name for word in args.only.split(",")):
            continue
        try:
            contender = make()
            error = worst_error(contender, shape)
            if not error < contender.tolerance:
                raise RuntimeError(f"its output is wrong: relative error {error:.3g}")
            if isinstance(contender, Oscar):
                contender.choose_splits()
            graphs[name] = capture(contender)
        except Exception as problem:  # One that is not there, or refuses: said, and left out.
            text = str(problem).splitlines()
            print(f"attend_peers: {name} left out at {shape.text}: "
                  f"{text[0] if text else type(problem).__name__}", file=sys.stderr)
            continue
        alive.append(contender)
        rows.append({"name": name, "shape": shape.text, "bytes": contender.bytes,
                     "layers": contender.layers, "relative_error": error})
        if isinstance(contender, Oscar):
            rows[-1]["splits"] = contender.splits
    times = {name: [] for name in graphs}
    for _ in range(args.rounds):
        for name, graph in graphs.items():
            times[name].append(time_us(graph.replay))
    for row in rows:
        row["step_us"] = round(median(times[row["name"]]), 1)  # LAUNCHES layers
        row["us"] = round(row["step_us"] / LAUNCHES, 3)
    return rows


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes",
                        default="1x32768,1x102400,8x32768,8x102400,32x32768,64r4096,256r4096")
    parser.add_argument("--query_heads", type=int, default=32)
    parser.add_argument("--kv_heads", type=int, default=8)
    parser.add_argument("--head_dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seed", type=int, default=1, help="of ragged lengths")
    parser.add_argument("--only", default="", help="contenders whose name has one of these words")
    parser.add_argument("--flashinfer_library", default="")
    parser.add_argument("--flashinfer_include", default="")
    parser.add_argument("--oscar_kernel", default="")
    parser.add_argument("--json", default="", help="file for the results")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    flashinfer = load_flashinfer(args)
    oscar = load_oscar(args.oscar_kernel)
    rate = copy_rate()
    report = {"device": torch.cuda.get_device_name(), "torch": torch.__version__,
              "shape": f"{args.query_heads}/{args.kv_heads} heads, d {args.head_dim}",
              "launches": LAUNCHES, "copy_gb_per_s": round(rate * 1e-3, 1), "rows": []}
    print(f"{report['device']}, torch {report['torch']}; {report['shape']}; copy "
          f"{report['copy_gb_per_s']} GB/s\n{'':44} {'us':>10} {'of copy':>8} {'error':>9}")
    for text in args.shapes.split(","):
        for row in time_shape(Shape(text, args), args, flashinfer, oscar):
            row["limit_share"] = round(row["bytes"] / rate / row["us"], 4)
            report["rows"].append(row)
            splits = f", {row['splits']} splits" if "splits" in row else ""
            print(f"{row['shape'] + ' ' + row['name'] + splits:44} {row['us']:10.2f} "
                  f"{row['limit_share']:8.1%} {row['relative_error']:9.1e}", flush=True)
        torch.cuda.empty_cache()
        if args.json:  # After every shape: a run that is ended keeps what it has.
            with open(args.json, "w", encoding="utf-8") as file:
                json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
