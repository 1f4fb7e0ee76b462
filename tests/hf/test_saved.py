"""Caches on disk: what comes back is what was written, or a sentence."""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tiny import LLAMA3, batch, tiny_model

import kvframe
from kvframe.errors import InputError, KvframeError
from kvframe.hf.saved import HEADER

SMALL = {"protect.recent": 5, "protect.sink": 2}
TOP_K = {"allocator": "top_k", "budget.ratio": 2, "scorer": {"name": "baselines.snapkv", "window": 7}, **SMALL}
ADA = {**TOP_K, "allocator": "baselines.ada", "decode.flush": 4}
CASES = {
    "top_k": ("llama", TOP_K),
    "flush": ("llama", ADA),
    "int8": ("llama3", {**TOP_K, "encoder": "int8"}),
    "blocks": ("qwen3", {**ADA, "encoder": {"name": "baselines.kivi", "bits": 4}}),
    "sliding": ("gemma3", ADA),
    "watched": ("llama", {**ADA, "segmenter": "gracekv.curvature"}),
    "merged": ("llama", {**TOP_K, "segmenter": "chunks", "allocator": "centroidkv.soft_matching"}),
    "graded": (
        "llama",
        {
            **ADA,
            "allocator": "graded",
            "budget": {"ratio": 4, "of": "bytes"},
            "encoder": {"name": "aatc.transform", "calibration": "prompt", "offers": [1, 2, 4]},
        },
    ),
    "fitted": (
        "llama",
        {**ADA, "encoder": {"name": "aatc.transform", "calibration": "prompt", "joint_heads": 1, "key_bits": 4}},
    ),
}


def prompted(model, overrides, inputs, compress=True):
    cache = kvframe.load("identity", overrides).cache(model)
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)
    model(**inputs, position_ids=positions, cache=cache)
    if compress:
        cache.compress()
    return cache


def answer(model, cache, inputs, new=9):
    out, seen = [], inputs["attention_mask"].shape[1]
    for n in range(new):
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, n + 1), value=1)
        token = torch.full((len(mask), 1), 5 + n)
        positions = mask.sum(1, keepdim=True) - 1
        out.append(model(token, attention_mask=mask, position_ids=positions, cache=cache).logits)
    assert cache.get_seq_length() == seen + new
    return torch.cat(out, 1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("compressed", [True, False], ids=["compressed", "waiting"])
def test_a_loaded_cache_goes_on_as_the_saved_one(tmp_path, case, compressed):
    name, overrides = CASES[case]
    model, inputs = tiny_model(name), batch([70, 41])
    cache = prompted(model, overrides, inputs, compressed)
    before = cache.report()
    cache.save(tmp_path / "new folder" / "cache.safetensors")
    assert cache.report() == before
    fresh = tiny_model(name)
    loaded = kvframe.load_cache(tmp_path / "new folder" / "cache.safetensors", fresh)
    report = loaded.report()
    assert (report.tokens, report.entries, report.entry_ratio, report.notes) == (
        before.tokens, before.entries, before.entry_ratio, before.notes
    )  # fmt: skip
    for part in ("compressed", "recent"):
        assert report.bytes_by_part[part] <= before.bytes_by_part[part]
    assert torch.equal(answer(model, cache, inputs), answer(fresh, loaded, inputs))


def test_another_process_reads_it(tmp_path, llama):
    inputs = batch([44])
    cache = prompted(llama, ADA, inputs)
    cache.save(tmp_path / "cache.safetensors")
    code = f"""
import sys, torch, kvframe
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from tiny import tiny_model
model = tiny_model("llama")
cache = kvframe.load_cache({str(tmp_path / "cache.safetensors")!r}, model)
with torch.no_grad():
    print(model(torch.tensor([[5]]), cache=cache).logits[0, -1, :8].tolist())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    expected = llama(torch.tensor([[5]]), cache=cache).logits[0, -1, :8]
    assert torch.allclose(torch.tensor(json.loads(done.stdout)), expected, atol=2e-5)


def test_two_loads_and_the_file_do_not_touch_each_other(tmp_path, llama):
    inputs, path = batch([44, 30]), tmp_path / "cache.safetensors"
    prompted(llama, ADA, inputs).save(path)
    before = hashlib.sha256(path.read_bytes()).digest()
    first, second = (kvframe.load_cache(path, llama) for _ in range(2))
    expected = answer(llama, first.fork(), inputs)
    for one in (first, second):
        assert torch.equal(answer(llama, one, inputs), expected)
    assert torch.equal(answer(llama, kvframe.load_cache(path, llama), inputs), expected)
    row = kvframe.load_cache(path, llama).select([1])
    last = {name: tensor[1:] for name, tensor in inputs.items()}
    assert torch.allclose(answer(llama, row, last), expected[1:], atol=2e-5)
    assert hashlib.sha256(path.read_bytes()).digest() == before


def test_damaged_files_are_never_loaded(tmp_path, llama):
    path = tmp_path / "cache.safetensors"
    prompted(llama, {**ADA, "encoder": "int8"}, batch([30])).save(path)
    whole, draw = path.read_bytes(), random.Random(0)
    kvframe.load_cache(path, llama)
    header = int.from_bytes(whole[:8], "little") + 8
    places = [draw.randrange(header) for _ in range(60)] + [draw.randrange(header, len(whole)) for _ in range(60)]
    damaged = [whole[:at] + bytes([whole[at] ^ (1 << draw.randrange(8))]) + whole[at + 1 :] for at in places]
    damaged += [whole[: draw.randrange(len(whole))] for _ in range(40)] + [b"", whole + b"\0" * 8]
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(KvframeError, match=r"cache\.safetensors"):
            kvframe.load_cache(path, llama)


def test_files_that_do_not_fit(tmp_path, llama):
    path = tmp_path / "cache.safetensors"

    class Tokenizer:
        def __init__(self, **vocabulary):
            self.vocabulary = vocabulary

        def get_vocab(self):
            return self.vocabulary

    prompted(llama, TOP_K, batch([30])).save(path, Tokenizer(a=1))
    kvframe.load_cache(path, llama, Tokenizer(a=1))
    kvframe.load_cache(path, llama)
    wider = tiny_model("llama", num_attention_heads=8)
    scaled = tiny_model("llama", rope_parameters=LLAMA3)
    for model, tokenizer, said in (
        (wider, None, "another model"),
        (scaled, None, "another RoPE"),
        (tiny_model("llama").to(torch.bfloat16), None, "made in float32, but the model is in bfloat16"),
        (llama, Tokenizer(a=2), "another tokenizer"),
    ):
        with pytest.raises(InputError, match=said):
            kvframe.load_cache(path, model, tokenizer)
    with pytest.raises(InputError, match="There is no cache at"):
        kvframe.load_cache(tmp_path / "nothing", llama)
    save_file({"x": torch.ones(2)}, tmp_path / "foreign")
    with pytest.raises(InputError, match="is no kvframe cache"):
        kvframe.load_cache(tmp_path / "foreign", llama)
    (tmp_path / "text").write_text("hello")
    with pytest.raises(InputError, match="cannot be read"):
        kvframe.load_cache(tmp_path / "text", llama)
    with pytest.raises(InputError, match="cannot be read"):
        kvframe.load_cache(tmp_path, llama)


def rewritten(path, change):
    """The file with another header, whose checksum holds."""
    from kvframe.hf.saved import _checksum

    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        header = json.loads(file.metadata()[HEADER])
    change(header)
    text = json.dumps(header)
    save_file(tensors, path, metadata={HEADER: text, "sha256": _checksum(text, tensors)})


def test_newer_and_crafted_files(tmp_path, llama):
    fitted = CASES["fitted"][1]
    for overrides, change, said in (
        (TOP_K, lambda header: header.update(format=99), "has format 99"),
        (TOP_K, lambda header: header.pop("layers"), "cannot be understood"),
        (TOP_K, lambda header: header["layers"].pop(), "cannot be understood"),
        (TOP_K, lambda header: header["spec"].update(scorer={"name": "gone.scorer"}), "there is no scorer named"),
        (
            fitted,
            lambda header: header["states"]["list" if "list" in header["states"] else "tuple"][0].update(
                dataclass="subprocess:Popen"
            ),
            "'subprocess:Popen', which is no dataclass",
        ),
    ):
        path = tmp_path / "cache.safetensors"
        prompted(llama, overrides, batch([70])).save(path)
        rewritten(path, change)
        with pytest.raises(KvframeError, match=said):
            kvframe.load_cache(path, llama)


def test_nothing_is_written_by_halves(tmp_path, llama):
    empty = kvframe.load("identity", TOP_K).cache(llama)
    with pytest.raises(InputError, match="nothing to save"):
        empty.save(tmp_path / "empty")
    inputs, path = batch([70]), tmp_path / "cache.safetensors"
    cache = prompted(llama, TOP_K, inputs)
    cache.save(path)
    before, expected = path.read_bytes(), answer(llama, cache.fork(), inputs)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, hard))  # as a full disk
    try:
        with pytest.raises(InputError, match="could not be written"):
            cache.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(InputError, match="could not be written"):
        cache.save(path / "below a file")
    assert torch.equal(answer(llama, cache, inputs), expected)


def test_only_files_are_replaced(tmp_path, llama):
    cache = prompted(llama, TOP_K, batch([30]))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for target in (pipe, tmp_path, ".", "", "a\0b"):
        with pytest.raises(InputError, match="cannot be written to"):
            cache.save(target)
    assert pipe.is_fifo()
    cache.save(tmp_path / "cache")
    (tmp_path / "plain").touch()
    assert (tmp_path / "cache").stat().st_mode == (tmp_path / "plain").stat().st_mode
