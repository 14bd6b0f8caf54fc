#!/usr/bin/env python3
"""Tests torch.ops.okv.* on a GPU: quantize, dequantize and attend against torch in float64, under
torch.compile and in a CUDA graph. Prints the seed; exits 0, 1, or 77 without a GPU.

usage: torch_ops_test.py [SEED]
"""
import pathlib
import random
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "kernels" / "torch"))

HEADS, KV_HEADS, DIM, GROUP = 8, 2, 128, 128
WINDOWS = [1, 4, 5, 0]  # Sink and recent blocks, ring slots, no sliding window
RUN_BYTES = 32 * DIM + 512 * (DIM // GROUP)


def orthogonal():
    square = torch.randn(1, DIM, DIM, device="cuda", dtype=torch.float64)
    return torch.linalg.qr(square)[0].contiguous()


class Case:
    """One layer of a batch: history quantized by okv.quantize, windows in bf16 blocks."""

    def __init__(self, lengths):
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        self.r_k, self.r_v = orthogonal().bfloat16(), orthogonal().bfloat16()
        batch, longest = len(lengths), max(lengths)
        blocks = (longest + 63) // 64
        self.k = torch.randn(batch, blocks * 64, KV_HEADS, DIM, device="cuda").bfloat16()
        self.v = torch.randn(batch, blocks * 64, KV_HEADS, DIM, device="cuda").bfloat16()
        self.q = torch.randn(batch, 1, HEADS, DIM, device="cuda").bfloat16()
        self.pages = torch.full((batch * blocks, KV_HEADS, RUN_BYTES), 255, dtype=torch.uint8,
                                device="cuda")
        slots = torch.randperm(batch * blocks, device="cuda").int().view(batch, blocks)
        self.slots = slots
        self.table = slots[:, 1:].contiguous() if blocks > 1 else slots
        clip = torch.full((KV_HEADS,), 110, dtype=torch.int32, device="cuda")
        for i in range(batch):
            bad = torch.ops.okv.quantize(self.k[i], self.v[i], self.r_k, self.r_v, clip, clip,
                                         self.pages, slots[i], GROUP)
            assert bad.item() == -1
        self.bf16 = torch.full((batch * 6, KV_HEADS, 2, 64, DIM), float("nan"), device="cuda",
                               dtype=torch.bfloat16)
        self.bf16_table = torch.randperm(batch * 6, device="cuda").int().view(batch, 6)
        self.fill_windows()
        self.workspace = torch.ops.okv.decode_workspace(self.lengths, 1, HEADS, KV_HEADS, DIM,
                                                        GROUP, WINDOWS)

    def rotated(self, rows, rotation):
        return (rows.double() @ rotation[0].double()).bfloat16()

    def fill_windows(self):
        for i, length in enumerate(self.lengths.tolist()):
            last = (length - 1) // 64
            for block in {0} | set(range(max(1, last - 4), last + 1)):
                slot = self.bf16_table[i, 0 if block == 0 else 1 + (block - 1) % 5]
                rows = slice(block * 64, min(block * 64 + 64, length))
                count = rows.stop - rows.start
                for part, (x, r) in enumerate(((self.k, self.r_k), (self.v, self.r_v))):
                    self.bf16[slot, :, part, :count] = self.rotated(x[i, rows], r).transpose(0, 1)

    def attend(self):
        torch.ops.okv.plan_decode(self.lengths, self.workspace, 1, HEADS, KV_HEADS, DIM, GROUP,
                                  WINDOWS)
        return torch.ops.okv.attend(self.q, self.r_k, self.r_v, self.pages, self.table, self.bf16,
                                    self.bf16_table, self.lengths, self.workspace, GROUP, WINDOWS,
                                    DIM ** -0.5)

    def reference(self, i):
        length = self.lengths[i].item()
        last = (length - 1) // 64
        keys, values = torch.ops.okv.dequantize(self.pages, self.slots[i], DIM, GROUP)
        keys, values = keys[:length].double(), values[:length].double()
        for block in range(last + 1):
            if block == 0 or block >= last - 4:
                rows = slice(block * 64, min(block * 64 + 64, length))
                keys[rows] = self.rotated(self.k[i, rows], self.r_k).double()
                values[rows] = self.rotated(self.v[i, rows], self.r_v).double()
        q = self.q[i, 0].double() @ self.r_k[0].double()
        keys = keys.repeat_interleave(HEADS // KV_HEADS, 1)
        values = values.repeat_interleave(HEADS // KV_HEADS, 1)
        p = torch.softmax(torch.einsum("hd,thd->ht", q, keys) * DIM ** -0.5, -1)
        return torch.einsum("ht,thd->hd", p, values) @ self.r_v[0].double().T


def relative(a, b):
    error = ((a.double() - b).norm() / b.norm()).item()
    return error if error == error else float("inf")  # NaN is no small number


def test_attend_matches_float64(case):
    out, lse = case.attend()
    assert torch.isfinite(lse).all()
    for i in range(len(case.lengths)):
        # dequantize rounds to bf16, attend does not: 2^-9 of an element.
        assert relative(out[i, 0], case.reference(i)) < 5e-3, i


def test_dequantize_in_the_models_basis_is_near_the_rows(case):
    k, v = torch.ops.okv.dequantize(case.pages, case.slots[-1], DIM, GROUP, case.r_k, case.r_v)
    full = case.lengths[-1].item() // 64 * 64
    for got, want in ((k, case.k[-1]), (v, case.v[-1])):
        error = relative(got[:full], want[:full].double())
        assert 0.2 < error < 0.5, error  # What 2 bits of a Gaussian lose


def test_compiled_attend_gives_the_same_bits(case):
    expected = case.attend()[0]
    compiled = torch.compile(lambda q: torch.ops.okv.attend(
        q, case.r_k, case.r_v, case.pages, case.table, case.bf16, case.bf16_table, case.lengths,
        case.workspace, GROUP, WINDOWS, DIM ** -0.5)[0] * 2, fullgraph=True)
    assert torch.equal(compiled(case.q), expected * 2)


def test_a_cuda_graph_follows_the_query(case):
    case.attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = case.attend()
    case.q.copy_(torch.randn_like(case.q))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, case.attend()[0])


def test_bad_arguments_raise_naming_the_argument(case):
    for change, name in (({"int2_table": case.table.long()}, "int2_table"),
                         ({"q": case.q.float()}, "q"),
                         ({"int2_pages": case.pages[:, :, :-1]}, "int2_pages")):
        arguments = dict(q=case.q, r_k=case.r_k, r_v=case.r_v, int2_pages=case.pages,
                         int2_table=case.table, bf16_blocks=case.bf16, bf16_table=case.bf16_table,
                         lengths=case.lengths, workspace=case.workspace, group_size=GROUP,
                         windows=WINDOWS, softmax_scale=0.1)
        arguments.update(change)
        try:
            torch.ops.okv.attend(**arguments)
        except RuntimeError as error:
            assert name in str(error), error
        else:
            raise AssertionError(f"no error for {name}")


def main():
    if not torch.cuda.is_available():
        print("torch_ops_test: skipped: no GPU")
        return 77
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else random.randrange(1 << 32)
    print(f"seed {seed}")
    torch.manual_seed(seed)
    import okv_ops
    okv_ops.load()
    failed = 0
    for name, test in sorted(globals().items()):
        if not name.startswith("test_"):
            continue
        try:
            test(Case([1, 64, 65, 320, 321, 1000, 4097]))
            print(f"[ OK ] {name}")
        except (AssertionError, RuntimeError) as error:
            failed += 1
            print(f"[FAILED] {name}: {error!r}")
    print(f"torch_ops_test: {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
