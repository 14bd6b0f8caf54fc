#!/usr/bin/env python3
"""Dumps queries, keys and values of a Hugging Face transformers model for okv-calibrate.

  python3 calib/dump_hf.py --model NAME_OR_FOLDER --text FILE --out DUMP [--window 2048]
      [--tokens 32768] [--device cuda] [--dtype bfloat16] [--revision R] [--store bf16]

Any decoder with RoPE whose attention goes through transformers' attention interface (tested with
releases 4.57 and 5.24): Llama, Qwen2, Qwen3, Mistral, Gemma and most others, grouped heads or not.
The function that is registered there receives Q and K after RoPE and after any norm of theirs, and
V as it is projected: these are written down, and the model's own attention goes on. Nothing of a
model class is patched. A layer that does not call the interface (linear attention in a hybrid
model) is not in the dump, which then has gaps in its layer ids.

The text is cut into windows of --window tokens; each is prefilled by itself, without a cache, and
is one sequence of the dump. With --prompts in place of --text each line of the file is one.

Written is what calib/dump.h describes: layer_<id>.safetensors with q [tokens, query_heads, d],
k and v [tokens, kv_heads, d], seq_lens, and the names in __metadata__. Rows go to spool files as
they come: memory is the model and one window. Q of a model with another scale of its logits than
1 / sqrt(d) is stored times scale * sqrt(d): its products with K are then the model's own logits.
"""

import argparse
import contextlib
import hashlib
import json
import math
import os
import shutil
import struct
import sys

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

IMPLEMENTATION = "okv_dump"  # Our name in the attention interface.
TENSORS = ("q", "k", "v")
STORED = {"bf16": (torch.bfloat16, "BF16", 2), "f32": (torch.float32, "F32", 4)}
HEAD_DIMS = (64, 128, 256)


class DumpError(Exception):
    """What is wrong with a model, a text or a folder, in one line."""


class Dump:
    """Spools rows by layer, then joins them into safetensors files."""

    def __init__(self, folder, names, store="bf16"):
        """`names`: model, weights_revision, text_source."""
        for name in ("model", "weights_revision", "text_source"):
            if not names.get(name):
                raise DumpError(f"{name} is empty")
        os.makedirs(folder, exist_ok=True)
        there = sorted(name for name in os.listdir(folder) if name.startswith("layer_"))
        if there:
            raise DumpError(f"{folder} already holds {there[0]}")
        self.folder = folder
        self.names = dict(names)
        self.dtype, self.dtype_name, self.value_bytes = STORED[store]
        self.seq_lens = []
        self.shapes = {}  # Layer id -> {"q": (heads, dim), ...}
        self.tokens = {}  # Layer id -> tokens so far.
        self.open_tokens = {}  # Layer id -> tokens of the sequence at hand.

    def add(self, layer, rows):
        """`rows`: q, k, v as [heads, tokens, dim] of one sequence's prefill."""
        if layer in self.open_tokens:
            raise DumpError(
                f"layer {layer} attends twice in one pass: two parts of the model share its number"
            )
        shapes = {name: (rows[name].shape[0], rows[name].shape[2]) for name in TENSORS}
        self._check_shapes(layer, rows, shapes)
        for name in TENSORS:
            tensor = rows[name].to(self.dtype).transpose(0, 1).contiguous()
            if not bool(torch.isfinite(tensor).all()):
                raise DumpError(f"NaN or Inf in {name} of layer {layer}")
            raw = tensor.view(torch.uint8 if self.value_bytes == 4 else torch.int16).cpu().numpy()
            with open(self._spool(layer, name), "ab") as spool:
                spool.write(raw.tobytes())
        self.open_tokens[layer] = rows["q"].shape[1]

    def _check_shapes(self, layer, rows, shapes):
        (query_heads, dim), (kv_heads, _) = shapes["q"], shapes["k"]
        if shapes["v"] != shapes["k"] or shapes["k"][1] != dim:
            raise DumpError(f"layer {layer} has q, k, v of {shapes}: heads of one size are needed")
        if dim not in HEAD_DIMS:
            raise DumpError(f"layer {layer} has heads of {dim}, not 64, 128 or 256 channels")
        if query_heads % kv_heads:
            raise DumpError(f"{query_heads} query heads do not divide over {kv_heads} KV heads")
        if rows["k"].shape[1] != rows["q"].shape[1]:
            raise DumpError("a prefill without a cache is needed: there are more keys than queries")
        if self.shapes and shapes != next(iter(self.shapes.values())):
            raise DumpError(f"layer {layer} has other heads than the layers before it: {shapes}")
        if self.seq_lens and layer not in self.shapes:
            raise DumpError(f"layer {layer} was not there in the sequences before")
        self.shapes[layer] = shapes

    def end_sequence(self):
        """What was added since the last call is one sequence."""
        if not self.open_tokens:
            raise DumpError(
                "no layer called the attention interface: the model class has its own attention"
            )
        lengths = set(self.open_tokens.values())
        if len(lengths) != 1 or set(self.open_tokens) != set(self.shapes):
            raise DumpError(f"the layers saw different tokens: {self.open_tokens}")
        for layer, count in self.open_tokens.items():
            self.tokens[layer] = self.tokens.get(layer, 0) + count
        self.seq_lens.append(lengths.pop())
        self.open_tokens = {}

    def finish(self):
        """Puts the files in place."""
        if not self.seq_lens:
            raise DumpError("the dump has no tokens")
        for layer in sorted(self.shapes):
            self._join(layer)

    def discard(self):
        """Removes the spool files."""
        for layer in self.shapes:
            for name in TENSORS:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._spool(layer, name))

    def _spool(self, layer, name):
        return os.path.join(self.folder, f"layer_{layer}.{name}.spool")

    def _join(self, layer):
        names = dict(self.names, layer=str(layer))
        names["layer_ids"] = ",".join(str(one) for one in sorted(self.shapes))
        header = {"__metadata__": names}
        offset = 0

        def describe(name, dtype, shape, size):
            nonlocal offset
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
            offset += size

        for name in TENSORS:
            shape = [self.tokens[layer], *self.shapes[layer][name]]
            describe(name, self.dtype_name, shape, math.prod(shape) * self.value_bytes)
        describe("seq_lens", "I32", [len(self.seq_lens)], 4 * len(self.seq_lens))
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        path = os.path.join(self.folder, f"layer_{layer}.safetensors")
        with open(path + ".tmp", "wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            for name in TENSORS:
                with open(self._spool(layer, name), "rb") as spool:
                    shutil.copyfileobj(spool, out, 1 << 24)
                os.unlink(self._spool(layer, name))
            out.write(struct.pack(f"<{len(self.seq_lens)}i", *self.seq_lens))
            out.flush()
            os.fsync(out.fileno())
        os.rename(path + ".tmp", path)


@contextlib.contextmanager
def recording(model, dump):
    """Within the block every prefill of `model` goes into `dump`."""
    before = model.config._attn_implementation
    def attention(module, query, key, value, attention_mask, *args, **kwargs):
        layer = getattr(module, "layer_idx", None)
        if layer is not None:
            if query.shape[0] != 1:
                raise DumpError("one sequence at a time: padding would count as tokens")
            scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
            factor = scale * math.sqrt(query.shape[-1])
            q = query[0] if abs(factor - 1) < 1e-6 else query[0].float() * factor
            dump.add(layer, {"q": q, "k": key[0], "v": value[0]})
        inner = function_of(module, before)
        return inner(module, query, key, value, attention_mask, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attention)
    masks = ALL_MASK_ATTENTION_FUNCTIONS  # A mask is made by the attention's name.
    masks.register(IMPLEMENTATION, masks[before if before in masks else "sdpa"])
    set_implementation(model, IMPLEMENTATION)
    try:
        yield
    finally:
        set_implementation(model, before)


def function_of(module, name):
    """What computes a module's attention when ours does not stand in its place."""
    if name in ALL_ATTENTION_FUNCTIONS:
        return ALL_ATTENTION_FUNCTIONS[name]
    # "eager" is a function beside the class. Another one will not do: it may lack the class's
    # attention sinks or soft cap, and the layers above would see other activations.
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if own is None:
        raise DumpError(f"{type(module).__name__} has no attention called {name}")
    return own


def set_implementation(model, name):
    """Of the model and of the parts that have a config of their own."""
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise DumpError(f"{type(model).__name__} does not use transformers' attention interface")


def dump_sequences(model, sequences, folder, names, store="bf16", progress=None):
    """Prefills each of `sequences`, lists of token ids, and writes the dump of all of them."""
    dump = Dump(folder, names, store)
    device = next(model.parameters()).device
    try:
        with torch.no_grad(), recording(model, dump):
            for count, tokens in enumerate(sequences):
                model(input_ids=torch.tensor([tokens], device=device), use_cache=False)
                dump.end_sequence()
                if progress:
                    progress(count + 1)
        dump.finish()
    finally:
        dump.discard()
    return dump


def windows_of(tokens, window, tokens_max):
    """Windows spread evenly over the text: one part of it is not like another."""
    count = min(tokens_max // window, len(tokens) // window)
    if count == 0:
        raise DumpError(f"{len(tokens)} tokens of text do not fill a window of {window}")
    room = len(tokens) - window
    starts = [i * room // (count - 1) if count > 1 else 0 for i in range(count)]
    return [tokens[start : start + window] for start in starts]


def revision_of(model, name):
    """What names the weights' bytes: the hub's commit, or a hash of a folder's files."""
    commit = getattr(model.config, "_commit_hash", None)
    if commit:
        return commit
    if not os.path.isdir(name):
        return None
    digest = hashlib.sha256()
    for file in sorted(os.listdir(name)):
        if file.endswith((".safetensors", ".bin")):
            with open(os.path.join(name, file), "rb") as weights:
                for part in iter(lambda: weights.read(1 << 24), b""):
                    digest.update(part)
    return digest.hexdigest()


def load(flags):
    """The model and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(flags.model, revision=flags.revision)
    model = AutoModelForCausalLM.from_pretrained(
        flags.model, revision=flags.revision, dtype=getattr(torch, flags.dtype)
    )
    return model.to(flags.device).eval(), tokenizer


def read_sequences(flags, tokenizer):
    """Lists of token ids."""
    with open(flags.prompts or flags.text, encoding="utf-8") as file:
        text = file.read()
    if flags.prompts:
        prompts = [tokenizer(line)["input_ids"] for line in text.splitlines() if line.strip()]
        return [prompt[: flags.window] for prompt in prompts]
    return windows_of(tokenizer(text)["input_ids"], flags.window, flags.tokens)


def parse_flags(arguments):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="a folder, or a name on the hub")
    parser.add_argument("--revision", default=None, help="of a model on the hub")
    parser.add_argument("--out", required=True, help="the dump's folder")
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--text", help="a file that is cut into windows")
    text.add_argument("--prompts", help="a file with a sequence a line")
    parser.add_argument("--window", type=int, default=2048, help="tokens of a sequence at most")
    parser.add_argument("--tokens", type=int, default=32768, help="of --text, all windows together")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", help="in which the model computes")
    parser.add_argument("--store", choices=sorted(STORED), default="bf16", help="type of the rows")
    parser.add_argument("--name", default=None, help="the model's name in the dump")
    parser.add_argument("--weights_revision", default=None, help="default: commit or hash")
    return parser.parse_args(arguments)


def main(arguments=None):
    flags = parse_flags(arguments)
    try:
        model, tokenizer = load(flags)
        names = {
            "model": flags.name or os.path.basename(os.path.normpath(flags.model)),
            "weights_revision": flags.weights_revision or revision_of(model, flags.model),
            "text_source": flags.prompts or flags.text,
        }
        sequences = read_sequences(flags, tokenizer)
        dump = dump_sequences(
            model,
            sequences,
            flags.out,
            names,
            flags.store,
            lambda done: print(f"{done} of {len(sequences)} sequences", file=sys.stderr),
        )
    except (DumpError, OSError, ValueError) as error:
        print(f"dump_hf: {error}", file=sys.stderr)
        return 1
    print(f"{flags.out}: {len(dump.shapes)} layers, {sum(dump.seq_lens)} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
