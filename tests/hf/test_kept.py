"""A GGUF file is dequantised once: what is kept is what the file says, whole or not at all, and no other file's."""

from __future__ import annotations

import logging
import shutil

import numpy as np
import pytest
import torch

from kvframe.errors import ModelError
from kvframe.hf import kept
from kvframe.hf.checkpoint import Checkpoint
from kvframe.hf.models import load_model

DIM, HEADS, KV_HEADS, WIDE, LAYERS = 32, 4, 2, 48, 2


def write_gguf(path, seed=0):
    """A tiny Llama with a byte-level tokenizer."""
    from gguf import GGUFWriter

    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    tokens = [chr(byte) for byte in plain] + [chr(256 + index) for index in range(256 - len(plain))]
    tokens += ["th", "<s>", "</s>", "<pad>"]
    random = np.random.default_rng(seed)

    def weight(*shape):
        return (0.1 * random.standard_normal(shape)).astype(np.float32)

    file = GGUFWriter(path, "llama")
    for name, value in {
        "context_length": 128,
        "embedding_length": DIM,
        "block_count": LAYERS,
        "feed_forward_length": WIDE,
        "head_count": HEADS,
        "head_count_kv": KV_HEADS,
        "layer_norm_rms_eps": 1e-5,
        "rope_dimension_count": DIM // HEADS,
        "rope_freq_base": 1e4,
        "vocab_size": len(tokens),
        "tokenizer_model": "gpt2",
        "tokenizer_pre": "gpt-2",
        "token_list": tokens,
        "token_types": [1] * 257 + [3] * 3,
        "token_merges": ["t h"],
        "bos_token_id": 257,
        "eos_token_id": 258,
        "pad_token_id": 259,
    }.items():
        getattr(file, f"add_{name}")(value)
    shapes = {"token_embd": (len(tokens), DIM), "output": (len(tokens), DIM)}
    for layer in range(LAYERS):
        wide = {"attn_q": DIM, "attn_k": DIM // 2, "attn_v": DIM // 2, "attn_output": DIM, "ffn_gate": WIDE}
        shapes |= {f"blk.{layer}.{name}": (rows, DIM) for name, rows in {**wide, "ffn_up": WIDE}.items()}
        shapes[f"blk.{layer}.ffn_down"] = (DIM, WIDE)
    for name, shape in shapes.items():
        file.add_tensor(f"{name}.weight", weight(*shape))
    for name in ("output_norm", *(f"blk.{i}.{part}_norm" for i in range(LAYERS) for part in ("attn", "ffn"))):
        file.add_tensor(f"{name}.weight", np.ones(DIM, np.float32))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setenv("KVFRAME_CACHE_DIR", str(tmp_path / "cache"))
    return write_gguf(tmp_path / "tiny.gguf")


@pytest.fixture
def reads(monkeypatch):
    """Which checkpoints were read."""
    found, read = [], Checkpoint.read

    def noted(self, dtype):
        found.append(self)
        return read(self, dtype)

    monkeypatch.setattr(Checkpoint, "read", noted)
    return found


def folders():
    return sorted(kept.cache_dir().iterdir()) if kept.cache_dir().is_dir() else []


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_a_second_load_gives_the_same_from_what_was_kept(path, reads, caplog, dtype):
    with caplog.at_level(logging.WARNING, "kvframe"):
        first, its_tokenizer = load_model(path, dtype=dtype)
        again, tokenizer = load_model(str(path), dtype=dtype)
    assert [bool(read.gguf_file) for read in reads] == [True, False]
    direct, _ = Checkpoint(str(path.parent), path.name).read(dtype)
    for model in (first, again):
        assert model.dtype == direct.dtype
        held = model.state_dict()
        assert all(torch.equal(weight, held[name]) for name, weight in direct.state_dict().items())
        assert model.config.rope_parameters == direct.config.rope_parameters
        assert model.generation_config.eos_token_id == direct.generation_config.eos_token_id
    text = "the caf\u00e9 </s>\n\t<pad>"
    assert tokenizer(text).input_ids == its_tokenizer(text).input_ids
    assert tokenizer.padding_side == its_tokenizer.padding_side == "left"
    (folder,) = folders()
    said = [record.message for record in caplog.records if "is kept in" in record.message]
    assert len(said) == 1
    assert str(folder) in said[0]


def test_each_dtype_is_kept_by_itself_and_auto_is_float32(path, reads):
    for dtype in ("auto", "bfloat16", "float32", "float16"):
        load_model(path, dtype=dtype)
    assert len(folders()) == 3
    assert sum(bool(read.gguf_file) for read in reads) == 3


def test_a_file_that_changed_is_read_anew(path, reads):
    old, _ = load_model(path)
    write_gguf(path, seed=1)
    new, _ = load_model(path)
    assert sum(bool(read.gguf_file) for read in reads) == 2
    assert not torch.equal(new.lm_head.weight, old.lm_head.weight)
    shutil.copy(path, path.with_name("renamed.gguf"))
    renamed, _ = load_model(path.with_name("renamed.gguf"))
    assert sum(bool(read.gguf_file) for read in reads) == 2
    assert torch.equal(renamed.lm_head.weight, new.lm_head.weight)


def test_a_damaged_file_is_not_taken_for_the_one_that_was_kept(path):
    load_model(path)
    path.write_bytes(path.read_bytes()[:-20_000])
    with pytest.raises(ModelError, match="name a complete GGUF file"):
        load_model(path)
    assert len(folders()) == 1


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_copy_says_to_delete_it(path, damage):
    load_model(path)
    weights = folders()[0] / "model.safetensors"
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:5000])
    else:
        weights.unlink()
    with pytest.raises(ModelError, match="delete that folder, which is written anew at the next load"):
        load_model(path)


def test_a_model_that_cannot_be_kept_is_there_all_the_same(path, monkeypatch, caplog):
    blocked = path.with_name("blocked")
    blocked.write_text("in the way")
    monkeypatch.setenv("KVFRAME_CACHE_DIR", str(blocked))
    with caplog.at_level(logging.WARNING, "kvframe"):
        model, _ = load_model(path)
    assert model.config.num_hidden_layers == LAYERS
    assert "The model of tiny.gguf could not be kept in" in caplog.text
    assert "set KVFRAME_CACHE_DIR" in caplog.text
