#!/usr/bin/env python3
"""Times BF16 prefill attention of what is installed, for comparison with `okv-bench prefill`:
torch's flash and cuDNN attention on contiguous keys and values, which a history in INT2 must first
be dequantized to.

usage: prefill_peers.py [--shapes 1x8192,1x2048+32768,...] [--query_heads 32] [--kv_heads 8]
                        [--head_dim 128]

A shape is REQUESTSxNEW or REQUESTSxNEW+HISTORY tokens. Causal, aligned to the end of the sequence;
several layers' data in rotation, one CUDA graph over them, median of alternating rounds. Prints one
JSON object.
"""
import argparse
import json
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right


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


def contender(backend, query, layers, causal):
    """`causal` None: every query sees every key, which is all but the chunk's own triangle."""
    new, context = query.shape[2], layers[0][0].shape[2]
    mask = None if not causal or new == context else causal_lower_right(new, context)

    def run():
        with sdpa_kernel(backend):
            for key, value in layers:
                torch.nn.functional.scaled_dot_product_attention(
                    query, key, value, attn_mask=mask, is_causal=causal and mask is None,
                    enable_gqa=True)
    return run


def time_shape(requests, new, history, args):
    context = new + history
    query = torch.randn(requests, args.query_heads, new, args.head_dim, device="cuda").bfloat16()
    layers = [tuple(torch.randn(requests, args.kv_heads, context, args.head_dim, device="cuda",
                                dtype=torch.bfloat16) for _ in range(2))
              for _ in range(args.layers)]
    graphs = {}
    contenders = [("torch flash", SDPBackend.FLASH_ATTENTION, True),
                  ("cuDNN", SDPBackend.CUDNN_ATTENTION, True)]
    if history:
        contenders.append(("cuDNN, not causal", SDPBackend.CUDNN_ATTENTION, False))
    for name, backend, causal in contenders:
        try:
            graphs[name] = capture(contender(backend, query, layers, causal))
        except Exception as error:  # A contender that refuses: said, and left out.
            print(f"prefill_peers: {name} left out at {requests}x{new}+{history}: "
                  f"{str(error).splitlines()[0] if str(error) else type(error).__name__}",
                  file=sys.stderr)
    pairs = requests * (new * history + new * (new + 1) / 2)
    operations = 4 * pairs * args.query_heads * args.head_dim
    times = {name: [] for name in graphs}
    for _ in range(args.rounds):
        for name, graph in graphs.items():
            times[name].append(time_us(graph.replay) / args.layers)
    medians = {name: sorted(us)[len(us) // 2] for name, us in times.items()}
    return {name: {"us": round(us, 1), "tflop_per_s": round(operations / us * 1e-6, 1)}
            for name, us in medians.items()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", default="1x8192,1x2048+32768,1x8192+32768,1x512+32768,8x1024")
    parser.add_argument("--query_heads", type=int, default=32)
    parser.add_argument("--kv_heads", type=int, default=8)
    parser.add_argument("--head_dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    rows = {}
    for shape in args.shapes.split(","):
        requests, tokens = shape.split("x")
        new, history = (tokens.split("+") + ["0"])[:2]
        rows[shape] = time_shape(int(requests), int(new), int(history), args)
        print(f"{shape:>14}  {rows[shape]}", file=sys.stderr)
        torch.cuda.empty_cache()
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__,
                      "us_per_layer": rows}))


if __name__ == "__main__":
    main()
