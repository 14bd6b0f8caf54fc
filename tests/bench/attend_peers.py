#!/usr/bin/env python3
"""Times BF16 decode attention of what is installed, for comparison with `okv-bench attend`: torch's
flash and cuDNN attention, and FlashInfer where it can be imported.

usage: attend_peers.py [--shapes 1x32768,...] [--query_heads 32] [--kv_heads 8] [--head_dim 128]

Contiguous BF16 keys and values, one query token; as many layers' data in rotation as take 300 MB or
more, at least 4; one CUDA graph over them; median of alternating rounds. Prints one JSON object.
"""
import argparse
import json
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


def copy_rate():
    """Bytes read and written per microsecond by a device-to-device copy."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = sorted(time_us(lambda: target.copy_(source)) for _ in range(9))
    return 2 * source.numel() / times[len(times) // 2]


def time_us(run):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3


def capture(run):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def sdpa(backend, query, layers):
    def run():
        with sdpa_kernel(backend):
            for key, value in layers:
                torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    return run


def flashinfer_decode(query, layers):
    import flashinfer
    batch, query_heads, _, dim = query.shape
    kv_heads, context = layers[0][0].shape[1:3]
    page = 64
    pages = context // page
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    wrapper.plan(torch.arange(batch + 1, dtype=torch.int32, device="cuda") * pages,
                 torch.arange(batch * pages, dtype=torch.int32, device="cuda"),
                 torch.full((batch,), page, dtype=torch.int32, device="cuda"),
                 query_heads, kv_heads, dim, page, q_data_type=query.dtype,
                 kv_data_type=query.dtype)
    paged = [tuple(x.view(batch, kv_heads, pages, page, dim).transpose(1, 2).reshape(
        batch * pages, kv_heads, page, dim).contiguous() for x in layer) for layer in layers]
    flat = query.squeeze(2)

    def run():
        for layer in paged:
            wrapper.run(flat, layer)
    return run


def time_shape(batch, context, args):
    layer_bytes = 2 * batch * args.kv_heads * context * args.head_dim * 2
    count = max(4, -(-300_000_000 // layer_bytes))
    query = torch.randn(batch, args.query_heads, 1, args.head_dim, device="cuda").bfloat16()
    layers = [tuple(torch.randn(batch, args.kv_heads, context, args.head_dim, device="cuda",
                                dtype=torch.bfloat16) for _ in range(2)) for _ in range(count)]
    graphs = {}
    contenders = {
        "torch flash": lambda: sdpa(SDPBackend.FLASH_ATTENTION, query, layers),
        "cuDNN": lambda: sdpa(SDPBackend.CUDNN_ATTENTION, query, layers),
        "FlashInfer": lambda: flashinfer_decode(query, layers),
    }
    for name, make in contenders.items():
        try:
            graphs[name] = capture(make())
        except Exception as error:  # A contender that is not there, or refuses: said, and left out.
            print(f"attend_peers: {name} left out at {batch}x{context}: "
                  f"{str(error).splitlines()[0] if str(error) else type(error).__name__}",
                  file=sys.stderr)
    times = {name: [] for name in graphs}
    for _ in range(args.rounds):
        for name, graph in graphs.items():
            times[name].append(time_us(graph.replay) / count)
    return {name: round(sorted(us)[len(us) // 2], 2) for name, us in times.items()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", default="1x32768,1x102400,8x32768,8x102400,32x32768")
    parser.add_argument("--query_heads", type=int, default=32)
    parser.add_argument("--kv_heads", type=int, default=8)
    parser.add_argument("--head_dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    rows = {}
    for shape in args.shapes.split(","):
        batch, context = (int(x) for x in shape.split("x"))
        rows[shape] = time_shape(batch, context, args)
        print(f"{shape:>12}  {rows[shape]}", file=sys.stderr)
        torch.cuda.empty_cache()
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__,
                      "copy_tb_per_s": round(copy_rate() * 1e-6, 3), "us_per_layer": rows}))


if __name__ == "__main__":
    main()
