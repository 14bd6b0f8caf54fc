#!/usr/bin/env python3
"""Tests calib/dump_hf.py on tiny random models: shapes, hooks, and Q, K, V against the schoolbook.

Needs transformers and torch (CPU): `pip install transformers torch`. Without them it says so and
exits with 77, which CTest counts as skipped. With OKV_BIN_DIR set, as by CTest, okv-calibrate reads
what was dumped.
"""

import importlib.util
import json
import os
import struct
import subprocess
import sys
import tempfile
import unittest

try:
    import torch
    import transformers
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )
except ImportError as missing:
    print(f"SKIPPED: {missing}; pip install transformers torch")
    sys.exit(77)

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
spec = importlib.util.spec_from_file_location("dump_hf", os.path.join(ROOT, "calib", "dump_hf.py"))
dump_hf = importlib.util.module_from_spec(spec)
spec.loader.exec_module(dump_hf)

torch.set_num_threads(1)  # Tiny models: threads would only wait for each other.
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

NAMES = {"model": "tiny", "weights_revision": "r1", "text_source": "random tokens"}
HEADS, KV_HEADS, DIM, LAYERS, HIDDEN = 4, 2, 64, 2, 256
THETA = 10000.0


def tiny(kind, **changes):
    """A random model of a class; biases and norms too, so that a missed one shows."""
    torch.manual_seed(7)
    shape = dict(
        vocab_size=97,
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=DIM,
        max_position_embeddings=512,
        rope_theta=THETA,
    )
    shape.update(changes)
    config, model = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[kind]
    model = model(config(**shape)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.uniform_(-1, 1)
    return model


def sequences(*lengths):
    random = torch.Generator().manual_seed(5)
    return [torch.randint(0, 97, (length,), generator=random).tolist() for length in lengths]


def read_layer(folder, layer):
    """A safetensors file as its header and {name: tensor}."""
    with open(os.path.join(folder, f"layer_{layer}.safetensors"), "rb") as file:
        raw = file.read()
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    metadata = header.pop("__metadata__")
    types = {"BF16": torch.bfloat16, "F32": torch.float32, "I32": torch.int32}
    tensors = {}
    for name, one in header.items():
        begin, end = (8 + length + offset for offset in one["data_offsets"])
        flat = torch.frombuffer(bytearray(raw[begin:end]), dtype=types[one["dtype"]])
        tensors[name] = flat.reshape(one["shape"])
    return metadata, tensors


def rms_norm(x, weight, epsilon):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + epsilon) * weight


def rope(x):
    """[tokens, heads, dim]: channels i and i + dim / 2 turn by t * theta^(-2 i / dim)."""
    tokens, _, dim = x.shape
    frequencies = THETA ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.arange(tokens, dtype=torch.float64)[:, None] * frequencies[None]
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    low, high = x[..., : dim // 2], x[..., dim // 2 :]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def by_hand(model, tokens, layer):
    """Q, K, V of a layer in float64, from the layer's input and its weights alone."""
    with torch.no_grad():
        states = model(input_ids=torch.tensor([tokens]), output_hidden_states=True).hidden_states
    block = model.model.layers[layer]
    attention = block.self_attn
    epsilon = model.config.rms_norm_eps
    x = rms_norm(states[layer][0].double(), block.input_layernorm.weight.double(), epsilon)
    rows = {}
    for name, linear in (
        ("q", attention.q_proj),
        ("k", attention.k_proj),
        ("v", attention.v_proj),
    ):
        y = x @ linear.weight.double().T
        if linear.bias is not None:
            y = y + linear.bias.double()
        rows[name] = y.reshape(len(tokens), -1, attention.head_dim)
        norm = getattr(attention, f"{name}_norm", None)
        if norm is not None:
            rows[name] = rms_norm(rows[name], norm.weight.double(), epsilon)
    return {"q": rope(rows["q"]), "k": rope(rows["k"]), "v": rows["v"]}


class DumpHfTest(unittest.TestCase):
    def setUp(self):
        self.temporary = tempfile.TemporaryDirectory()
        self.fresh_folder("dump")

    def fresh_folder(self, name):
        self.folder = os.path.join(self.temporary.name, name)

    def tearDown(self):
        self.temporary.cleanup()

    def dump(self, model, texts, **more):
        return dump_hf.dump_sequences(model, texts, self.folder, NAMES, **more)

    def test_rows_are_those_of_the_schoolbook(self):
        for kind in ("llama", "qwen2", "qwen3"):
            with self.subTest(kind):
                self.fresh_folder(kind)
                model = tiny(kind)
                texts = sequences(33, 70)
                self.dump(model, texts, store="f32")
                for layer in range(LAYERS):
                    metadata, found = read_layer(self.folder, layer)
                    self.assertEqual(metadata["layer_ids"], "0,1")
                    self.assertEqual(metadata["layer"], str(layer))
                    self.assertEqual(metadata["model"], "tiny")
                    self.assertEqual(found["seq_lens"].tolist(), [33, 70])
                    self.assertEqual(list(found["q"].shape), [103, HEADS, DIM])
                    self.assertEqual(list(found["k"].shape), [103, KV_HEADS, DIM])
                    expected = [by_hand(model, text, layer) for text in texts]
                    for name in dump_hf.TENSORS:
                        right = torch.cat([one[name] for one in expected])
                        error = (found[name] - right).abs().max() / right.abs().max()
                        self.assertLess(error.item(), 1e-5, f"{name} of layer {layer}")
                # What makes the classes differ is in the rows.
                if kind == "qwen2":
                    self.assertIsNotNone(model.model.layers[0].self_attn.k_proj.bias)
                if kind == "qwen3":
                    self.assertTrue(hasattr(model.model.layers[0].self_attn, "k_norm"))

    def test_one_and_as_many_kv_heads_as_query_heads(self):
        for kv_heads in (1, HEADS):
            with self.subTest(kv_heads):
                self.fresh_folder(str(kv_heads))
                model = tiny("llama", num_key_value_heads=kv_heads)
                texts = sequences(20)
                self.dump(model, texts, store="f32")
                found = read_layer(self.folder, 1)[1]
                self.assertEqual(list(found["v"].shape), [20, kv_heads, DIM])
                right = by_hand(model, texts[0], 1)["k"]
                self.assertLess((found["k"] - right).abs().max().item(), 1e-4)

    def test_heads_of_128_whose_sum_is_not_the_hidden_size(self):
        self.dump(tiny("qwen3", head_dim=128, num_attention_heads=6), sequences(9))
        self.assertEqual(list(read_layer(self.folder, 0)[1]["q"].shape), [9, 6, 128])

    def test_the_model_computes_as_before(self):
        for before in ("sdpa", "eager"):
            with self.subTest(before):
                self.fresh_folder(before)
                model = tiny("qwen3")
                model.set_attn_implementation(before)
                tokens = torch.tensor(sequences(50))
                with torch.no_grad():
                    plain = model(input_ids=tokens).logits
                    dump = dump_hf.Dump(self.folder, NAMES)
                    with dump_hf.recording(model, dump):
                        recorded = model(input_ids=tokens, use_cache=False).logits
                    dump.discard()
                    again = model(input_ids=tokens).logits
                self.assertTrue(torch.equal(plain, recorded))
                self.assertTrue(torch.equal(plain, again))
                self.assertEqual(model.config._attn_implementation, before)

    def test_bf16_is_the_rounding_of_f32(self):
        self.dump(tiny("llama"), sequences(30))
        rounded = read_layer(self.folder, 0)[1]
        self.fresh_folder("another")
        self.dump(tiny("llama"), sequences(30), store="f32")
        exact = read_layer(self.folder, 0)[1]
        for name in dump_hf.TENSORS:
            self.assertTrue(torch.equal(rounded[name], exact[name].to(torch.bfloat16)))

    def test_another_scale_goes_into_the_queries(self):
        model = tiny("llama")
        self.dump(model, sequences(10), store="f32")
        plain = read_layer(self.folder, 0)[1]
        self.fresh_folder("another")
        model.model.layers[0].self_attn.scaling *= 3
        self.dump(model, sequences(10), store="f32")
        scaled = read_layer(self.folder, 0)[1]
        self.assertTrue(torch.allclose(scaled["q"], 3 * plain["q"]))
        self.assertTrue(torch.equal(scaled["k"], plain["k"]))

    def test_layers_without_attention_leave_gaps(self):
        model = tiny("llama", num_hidden_layers=3)
        model.model.layers[1].self_attn.layer_idx = None
        self.dump(model, sequences(12, 8))
        self.assertEqual(
            sorted(os.listdir(self.folder)), ["layer_0.safetensors", "layer_2.safetensors"]
        )
        self.assertEqual(read_layer(self.folder, 2)[0]["layer_ids"], "0,2")

    def assert_refused(self, what, call):
        with self.assertRaises(dump_hf.DumpError) as caught:
            call()
        self.assertIn(what, str(caught.exception))
        left = os.listdir(self.folder) if os.path.isdir(self.folder) else []
        self.assertEqual([name for name in left if "spool" in name or "tmp" in name], [])

    def test_refuses_heads_that_no_page_holds(self):
        model = tiny("llama", head_dim=32)
        self.assert_refused("heads of 32", lambda: self.dump(model, sequences(9)))

    def test_refuses_what_is_not_finite(self):
        model = tiny("llama")
        with torch.no_grad():
            model.model.layers[1].self_attn.v_proj.weight[0, 0] = float("nan")
        self.assert_refused("NaN or Inf in v of layer 1", lambda: self.dump(model, sequences(9)))

    def test_refuses_a_folder_that_holds_a_dump(self):
        model = tiny("llama")
        self.dump(model, sequences(9))
        self.assert_refused("already holds layer_0", lambda: self.dump(model, sequences(9)))
        self.assertEqual(read_layer(self.folder, 1)[1]["seq_lens"].tolist(), [9])

    def test_refuses_a_model_with_attention_of_its_own(self):
        model = tiny("llama")
        for layer in model.model.layers:
            layer.self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
        self.assert_refused("attention interface", lambda: self.dump(model, sequences(9)))

    def test_refuses_two_layers_of_one_number(self):
        model = tiny("llama")
        model.model.layers[1].self_attn.layer_idx = 0
        self.assert_refused("attends twice", lambda: self.dump(model, sequences(9)))

    def test_refuses_a_batch_and_a_cache(self):
        model = tiny("llama")
        dump = dump_hf.Dump(self.folder, NAMES)
        with torch.no_grad(), dump_hf.recording(model, dump):
            batch = torch.tensor(sequences(9, 9))
            with self.assertRaisesRegex(dump_hf.DumpError, "one sequence at a time"):
                model(input_ids=batch)
        with torch.no_grad():
            cache = model(input_ids=batch[:1], use_cache=True).past_key_values
            with dump_hf.recording(model, dump):
                with self.assertRaisesRegex(dump_hf.DumpError, "without a cache"):
                    model(input_ids=batch[:1, :3], past_key_values=cache)

    def test_refuses_an_empty_name(self):
        with self.assertRaisesRegex(dump_hf.DumpError, "weights_revision is empty"):
            dump_hf.Dump(self.folder, dict(NAMES, weights_revision=None))

    def test_windows_reach_over_the_whole_text(self):
        windows = dump_hf.windows_of(list(range(100)), 20, 60)
        self.assertEqual([one[0] for one in windows], [0, 40, 80])
        self.assertTrue(all(len(one) == 20 for one in windows))
        self.assertEqual(dump_hf.windows_of(list(range(25)), 20, 60), [list(range(20))])
        with self.assertRaises(dump_hf.DumpError):
            dump_hf.windows_of([1, 2, 3], 20, 60)

    def save_model(self):
        """A folder as from_pretrained reads it, with a tokenizer of single words."""
        from tokenizers import Tokenizer, models, pre_tokenizers

        words = {f"w{i}": i for i in range(96)}
        tokenizer = Tokenizer(models.WordLevel(dict(words, unknown=96), unk_token="unknown"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        folder = os.path.join(self.temporary.name, "model")
        tiny("qwen3").save_pretrained(folder)
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, unk_token="unknown"
        ).save_pretrained(folder)
        return folder

    def test_the_program_dumps_what_okv_calibrate_reads(self):
        model = self.save_model()
        text = os.path.join(self.temporary.name, "text")
        with open(text, "w", encoding="utf-8") as file:
            file.write(" ".join(f"w{i * i % 96}" for i in range(500)))
        flags = ["--model", model, "--text", text, "--out", self.folder, "--device", "cpu"]
        flags += ["--window", "100", "--tokens", "400", "--dtype", "float32"]
        self.assertEqual(dump_hf.main(flags), 0)
        metadata, tensors = read_layer(self.folder, 1)
        self.assertEqual(tensors["seq_lens"].tolist(), [100] * 4)
        self.assertEqual(metadata["model"], "model")
        self.assertEqual(len(metadata["weights_revision"]), 64)
        self.assertEqual(dump_hf.main(flags), 1)  # The dump is there.
        if "OKV_BIN_DIR" not in os.environ:
            self.skipTest("OKV_BIN_DIR is not set: okv-calibrate was not run")
        out = os.path.join(self.temporary.name, "set")
        fit = [os.path.join(os.environ["OKV_BIN_DIR"], "okv-calibrate"), "fit", "--json"]
        fit += ["--dump", self.folder, "--out", out, "--refine_steps", "2"]
        done = subprocess.run(fit, capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        summary = json.loads(done.stdout.splitlines()[-1])
        self.assertEqual(summary["layers"], LAYERS)
        self.assertEqual(summary["tokens"], 400)
        self.assertGreater(summary["logit_error_mean"], 0)

    def test_each_line_of_prompts_is_a_sequence(self):
        model = self.save_model()
        prompts = os.path.join(self.temporary.name, "prompts")
        with open(prompts, "w", encoding="utf-8") as file:
            file.write("w1 w2 w3\n\nw4 w5\n" + "w6 " * 50 + "\n")
        flags = ["--model", model, "--prompts", prompts, "--out", self.folder, "--device", "cpu"]
        self.assertEqual(dump_hf.main(flags + ["--window", "40"]), 0)
        self.assertEqual(read_layer(self.folder, 0)[1]["seq_lens"].tolist(), [3, 2, 40])


if __name__ == "__main__":
    unittest.main()
