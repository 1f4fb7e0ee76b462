"""Calibration: reading a text, artefacts and what is said of wrong ones, the command."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import pytest
import torch
from tiny import observation, tiny_model
from typer.testing import CliRunner

import kvframe
from kvframe.artefact import Artefact, load_artefact, rope_fingerprint
from kvframe.calibration import CalibratedEncoder
from kvframe.cli import app
from kvframe.errors import InputError
from kvframe.hf import model_info
from kvframe.hf.reading import read_text_windows, spread
from kvframe.types import Encoded, Entries, Needs, Reading


class Means(CalibratedEncoder):
    """Learns the mean of the keys, and codes nothing."""

    name: Literal["test.means"] = "test.means"
    shade: int = 0

    @property
    def learned_with(self):
        return {"shade": self.shade}

    @property
    def calibration_needs(self):
        return Needs(queries="all")

    def learn(self, observations, model):
        total, count = torch.zeros(model.layers), 0
        for seen in observations:
            count += int(seen.body.sum())
            total += torch.stack([layer.keys.transpose(1, 2)[seen.body].sum() for layer in seen.layers])
        return {"mean": total / count, "count": torch.tensor([count])}

    def states(self, learned, model):
        return [(float(m), int(learned["count"][0])) for m in learned["mean"]]

    def encode(self, entries: Entries, state: Any) -> Encoded:
        raise NotImplementedError

    def decode(self, encoded: Encoded, state: Any) -> Entries:
        raise NotImplementedError

    def bits_per_entry(self, model, itemsize, state=()):
        return 1.0


class Words:
    """A tokenizer of one token a letter."""

    bos_token_id = 1

    def __call__(self, text: str, **_: object):
        return type("Ids", (), {"input_ids": [3 + ord(c) % 90 for c in text]})()


@pytest.fixture
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KVFRAME_CACHE_DIR", str(tmp_path))
    return tmp_path


def reading(model, tokens: int = 1500, needs: Needs = Needs(), **more: Any) -> Reading:  # noqa: B008
    return read_text_windows(model, Words(), "the quick brown fox " * 200, "a fox", tokens, needs, **more)


def test_windows_are_spread_over_the_text():
    ids = torch.arange(10000)
    pieces = spread(ids, 2500)
    assert [len(piece) for piece in pieces] == [834, 833, 833]
    assert int(pieces[0][0]) == 0
    assert 9990 < int(pieces[-1][-1]) < 10000
    assert all(int(a[-1]) < int(b[0]) for a, b in pairwise(pieces))
    assert [len(piece) for piece in spread(ids[:7], 7)] == [7]


def test_reading_shows_what_was_asked_for():
    model = tiny_model("llama", max_position_embeddings=2048)
    told = []
    seen = list(reading(model, 1500, Needs(queries=9), listener=told.append).observations)
    assert told == [750, 1500]
    assert [tuple(o.valid.shape) for o in seen] == [(1, 750), (1, 750)]
    assert seen[0].body[0].tolist() == [False] * 4 + [True] * 746
    assert seen[0].layers[1].queries.shape == (1, 4, 9, 16)
    with torch.no_grad():
        again = list(reading(model, 1500).observations)
    assert again[0].layers[0].queries is None
    assert torch.equal(again[1].layers[2].keys, seen[1].layers[2].keys)


def test_a_text_that_is_too_short_is_refused(llama):
    with pytest.raises(InputError, match="has 4000 tokens, but 5000 are to be read"):
        reading(llama, 5000)
    with pytest.raises(InputError, match="at least 1, but is 0"):
        reading(llama, 0)


def test_fingerprints():
    info = model_info(tiny_model("llama"))
    assert info.fingerprint == model_info(tiny_model("llama").bfloat16()).fingerprint
    changed = tiny_model("llama")
    changed.model.layers[1].self_attn.o_proj.weight.data += 0.1
    assert model_info(changed).fingerprint != info.fingerprint
    llama3 = model_info(tiny_model("llama3"))
    assert rope_fingerprint(llama3.rope) != rope_fingerprint(info.rope)


def test_artefacts_round_trip(tmp_path):
    made = Artefact("a.b", "p", "m", "r", "t", 7, {"x": torch.arange(6).view(2, 3).T})
    made.save(tmp_path / "deep" / "file.safetensors")
    back = load_artefact(tmp_path / "deep" / "file.safetensors", "do that.")
    assert back.metadata == made.metadata
    assert torch.equal(back.tensors["x"], made.tensors["x"])
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["file.safetensors"], "nothing half-written is left"


def test_unusable_artefacts_are_refused_with_the_command(tmp_path, llama):
    encoder, info = Means(), model_info(llama)
    good = encoder.calibrate(reading(llama, 400), info)
    path = tmp_path / "means.safetensors"
    good.save(path)

    def bind(**changes: Any) -> Any:
        return Means(calibration=str(path), **changes).bind(info)

    assert bind()[0][1] == 396
    cases = [
        (replace(good, stage="aatc.transform"), "made for the stage 'aatc.transform', not 'test.means'"),
        (replace(good, model="0" * 12), "made for another model than this LlamaForCausalLM"),
        (replace(good, rope="0" * 12), "another RoPE"),
        (replace(good, tensors={"mean": torch.zeros(3)}), "lacks 'count'"),
    ]
    for wrong, message in cases:
        wrong.save(path)
        with pytest.raises(InputError, match=message) as caught:
            bind()
        assert "make it with: kvframe calibrate --model MODEL --spec SPEC --text FILE --out" in str(caught.value)
    good.save(path)
    with pytest.raises(InputError, match="other parameters"):
        bind(shade=3)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InputError, match="cannot be read"):
        bind()
    path.write_text("not tensors")
    with pytest.raises(InputError, match="cannot be read"):
        bind()
    path.unlink()
    with pytest.raises(InputError, match="There is no calibration at"):
        bind()
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(InputError, match="is no calibration"):
        bind()
    save_file({"x": torch.zeros(1)}, path, metadata={"kind": "kvframe calibration", "format": "99"})
    with pytest.raises(InputError, match="has format 99"):
        bind()


def test_auto_looks_in_the_cache_and_learns_from_a_text_of_the_models_own(cache_folder, llama, caplog):
    encoder, info = Means(), model_info(llama)
    with pytest.raises(InputError, match="was not calibrated for this LlamaForCausalLM"):
        encoder.bind(info)
    asked = []

    def read(needs: Needs) -> Reading:
        asked.append(needs)
        return reading(llama, 400, needs)

    with caplog.at_level(logging.WARNING, "kvframe"):
        states = encoder.bind(replace(info, read=read))
    assert "learns from 400 tokens of a fox, once" in caplog.text
    assert "teaches it better: kvframe calibrate --spec SPEC --text FILE" in caplog.text
    assert asked == [Needs(queries="all")]
    assert encoder.bind(info) == states, "now it is in the cache"
    assert encoder.artefact_path(info).parent == cache_folder / "calibration"
    with pytest.raises(InputError, match="was not calibrated"):
        Means(shade=1).bind(info)
    assert Means(calibration="prompt").bind(info) is None


def test_fitting_on_the_prompt_sees_what_was_asked_for():
    seen = observation([9, 5])
    assert Means(calibration="prompt").fit(seen)[0][1] == 14
    assert Means().fit(seen, bound=["kept"]) == ["kept"]


def test_the_command(tmp_path, cache_folder, monkeypatch):
    model = tiny_model("llama", max_position_embeddings=2048)
    monkeypatch.setattr("kvframe.hf.load_model", lambda *a, **k: (model, Words()))
    text = tmp_path / "text.txt"
    text.write_text("It was a dark and stormy night. " * 100)
    out = tmp_path / "aatc.safetensors"
    runner = CliRunner()
    command = ["calibrate", "--spec", "aatc", "--text", str(text), "--text", str(text), "--tokens", "2000"]
    done = runner.invoke(app, [*command, "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert f"--set encoder.calibration={out}" in done.output
    cache = kvframe.load("aatc", {"encoder.calibration": str(out), "protect.recent": 8}).cache(model)
    with torch.no_grad():
        model.generate(torch.randint(3, 90, (1, 80)), cache=cache, max_new_tokens=3, pad_token_id=0)
    assert cache.compressed_layers[0].parts
    assert runner.invoke(app, command).exit_code == 0
    assert kvframe.load("aatc").cache(model).bound is not None
    for arguments, message in (
        (["--spec", "snapkv"], "'dense' of the spec 'snapkv' learns nothing"),
        (["--spec", "aatc", "--text", str(tmp_path / "none")], "could not be read"),
        (["--spec", "aatc", "--text", str(text), "--tokens", "9999"], "are to be read for the calibration"),
    ):
        failed = runner.invoke(app, ["calibrate", *arguments])
        assert failed.exit_code == 2
        assert message in " ".join(failed.output.split())
