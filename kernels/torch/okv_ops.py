"""Builds and loads torch.ops.okv.* (okv_ops.cpp), with fake implementations for torch.compile.

    from kernels.torch import okv_ops   # or: sys.path has this folder, import okv_ops
    okv_ops.load()
    out, lse = torch.ops.okv.attend(...)

Needs torch with CUDA, nvcc and ninja; the first load compiles the kernels (about a minute on 16
cores), later ones find them in torch's extension cache.
"""
import pathlib

import torch
from torch.utils import cpp_extension

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_SOURCES = [
    "kernels/torch/okv_ops.cpp",
    "kernels/cuda/attend.cu",
    "kernels/cuda/attend_d64.cu",
    "kernels/cuda/attend_d128.cu",
    "kernels/cuda/attend_d256.cu",
    "kernels/cuda/attend_plan.cu",
    "kernels/cuda/attend_wide.cu",
    "kernels/cuda/dequantize.cu",
    "kernels/cuda/quantize.cu",
]
_loaded = False


def load(verbose=False):
    """Compiles where that was not done yet, and registers the operators. Raises what the compiler
    said when it fails."""
    global _loaded
    if _loaded:
        return
    major, minor = torch.cuda.get_device_capability()
    arch = f"{major}{minor}a" if major == 9 else f"{major}{minor}"
    cpp_extension.load(
        name="okv_ops",
        sources=[str(_ROOT / source) for source in _SOURCES],
        extra_include_paths=[str(_ROOT)],
        extra_cflags=["-O2", "-std=c++20"],
        # The codec's bytes must not depend on what a compiler fuses (proto/page_layout.md).
        extra_cuda_cflags=["-O3", "-std=c++20", "-fmad=false",
                           f"-gencode=arch=compute_{arch},code=sm_{arch}"],
        is_python_module=False,
        verbose=verbose,
    )
    _register_fakes()
    _loaded = True


def _register_fakes():
    @torch.library.register_fake("okv::plan_decode")
    def _(lengths, workspace, query_tokens, query_heads, kv_heads, head_dim, group_size, windows):
        return None

    @torch.library.register_fake("okv::attend")
    def _(q, r_k, r_v, int2_pages, int2_table, bf16_blocks, bf16_table, lengths, workspace,
          group_size, windows, softmax_scale, logit_softcap=0.0, sink_logits=None,
          early_history=False):
        return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)

    @torch.library.register_fake("okv::quantize")
    def _(k, v, r_k, r_v, clip_k, clip_v, pages, table, group_size):
        return k.new_empty((1,), dtype=torch.int64)

    @torch.library.register_fake("okv::dequantize")
    def _(pages, table, head_dim, group_size, r_k=None, r_v=None):
        shape = (64 * table.shape[0], pages.shape[1], head_dim)
        return (pages.new_empty(shape, dtype=torch.bfloat16),
                pages.new_empty(shape, dtype=torch.bfloat16))
