"""Models whose layers live on several devices: a cache gives what it gives on one device, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch
from accelerate.hooks import attach_align_device_hook
from curious import SEEN, Curious, curious_pipeline
from pretend import pretend_devices, spread_model
from tiny import batch, greedy, tiny_model
from transformers import DynamicCache

import kvframe
from kvframe.builtin.encoders import Dense, Int8
from kvframe.errors import InputError
from kvframe.hf import model_info
from kvframe.hf.devices import finish
from kvframe.hf.reader import Reader
from kvframe.pipeline import Pipeline
from kvframe.testing.checks.pipeline import held_tensors
from kvframe.types import Reading

HOME, AWAY = "pretend:0", "pretend:1"
SHORT = {"protect.recent": 5, "protect.sink": 2}
ADA = {"scorer": {"name": "baselines.snapkv", "window": 7}, "allocator": "baselines.ada", "budget.ratio": 3}
FITTED = {"name": "aatc.transform", "calibration": "prompt", "joint_heads": 1, "key_bits": 2, "value_bits": 2}
GRADES = {"name": "aatc.transform", "calibration": "prompt", "offers": [2, 4]}
BYTES = {"ratio": 3, "of": "bytes"}
AGAIN = {"name": "centroidkv.soft_matching", "recluster": True}
SPECS = {
    "identity": ("identity", {}),
    "snapkv": ("snapkv", {"budget.ratio": 3}),
    "adakv": ("identity", ADA),
    "gracekv": ("gracekv", {"budget.ratio": 3}),
    "centroidkv": ("centroidkv", {"budget.ratio": 3}),
    "aatc": ("identity", {**ADA, "encoder": FITTED, "decode.flush": 2}),
    "flush": ("snapkv", {"budget.ratio": 3, "decode.flush": 2, "encoder": "int8"}),
    "again": ("centroidkv", {"budget.ratio": 3, "decode.flush": 2, "allocator": AGAIN}),
    "grades": ("identity", {**ADA, "allocator": "graded", "budget": BYTES, "encoder": GRADES, "decode.flush": 2}),
    "widths": ("identity", {**ADA, "budget": BYTES}),
}
FOUR = {
    "num_hidden_layers": 4,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
}


@pytest.fixture(autouse=True)
def transfers():
    with pretend_devices() as counted:
        yield counted


@pytest.fixture(scope="module")
def models():
    """A model on one device, and the same on two."""
    with pretend_devices():
        yield spread_model("llama", 9), spread_model("llama", 2)


def at_home(inputs):
    return {name: tensor.to(HOME) for name, tensor in inputs.items()}


def places(value):
    return {str(tensor.device) for tensor in held_tensors(value)}


def test_pretended_devices_are_as_strict_as_real_ones(transfers):
    here, there = torch.arange(4, device="pretend:0"), torch.tensor([1.0, 2.0], device="pretend:1")
    assert (there * torch.tensor(2.0)).device == there[torch.tensor([0])].device == torch.device("pretend:1")
    for wrong in (lambda: here[:2] + there, lambda: there[here[:2]], lambda: torch.stack([there, torch.ones(2)])):
        with pytest.raises(RuntimeError, match="was given tensors on"):
            wrong()
    with pytest.raises(RuntimeError, match="numpy"):
        there.numpy()
    transfers.clear()
    there.zero_()
    assert here.to("pretend:0") is here
    assert torch.equal(here.to("pretend:1").cpu(), torch.arange(4))
    assert there.copy_(here[:2]) is there
    expected = {("pretend:0", "pretend:1"): 2, ("pretend:1", "cpu"): 1}
    assert there.tolist() == [0.0, 1.0]
    assert transfers == expected


def test_a_spread_model_answers_as_one_on_the_cpu():
    inputs = batch([20, 13])
    assert torch.equal(greedy(spread_model("llama", 2), at_home(inputs)).cpu(), greedy(tiny_model("llama"), inputs))


class Open(Int8):
    """Eight bits or all of them, whichever attention errs less with."""

    name: Literal["open"] = "open"  # type: ignore[assignment]

    def widths(self):
        return Int8(), Dense()


@pytest.mark.parametrize("name", SPECS)
def test_two_devices_give_what_one_gives(models, name):
    spec, changes = SPECS[name]
    inputs = at_home(batch([40, 29]))
    found = []
    for model in models:
        pipeline = kvframe.load(spec, {**SHORT, **changes})
        if name == "widths":
            pipeline = Pipeline(pipeline.spec.model_copy(update={"encoder": Open()}))
        cache = pipeline.cache(model)
        tokens = greedy(model, inputs, cache, new=4)
        if name == "flush":  # tokens that are taken back
            model(tokens[:, -3:], cache=cache)
            cache.crop(-3)
        found.append((tokens, model(tokens[:, -1:], cache=cache).logits.to(HOME), cache))
    for one, two in zip(found[0][:2], found[1][:2], strict=True):
        assert torch.equal(one, two)
    mine, theirs = (cache.report() for *_, cache in found)
    assert mine.entries == theirs.entries
    assert mine.bytes_by_part["compressed"] == theirs.bytes_by_part["compressed"] > 0
    for index, layer in enumerate(found[1][2].compressed_layers):
        assert places(vars(layer)) == {AWAY if index == 2 else HOME}


def test_a_cache_lives_as_on_one_device(tmp_path):
    """Chunks, turns, copies, picked rows, files; hidden states; layers of transformers' own."""
    lives = []
    spec = {**ADA, **SHORT, "segmenter": "gracekv.curvature", "encoder": "int8", "decode.flush": 2}
    for first in (9, 2):
        model, seen = spread_model("gemma3", first, **FOUR), []
        cache = kvframe.load("identity", spec).cache(model)
        first_turn, second_turn, third_turn = (at_home(batch([n, n], seed=n)) for n in (44, 30, 24))

        def step(cache, token, model=model, seen=seen):
            seen.append(model(torch.full((len(cache.valid), 1), token, device=HOME), cache=cache).logits)

        seen.append(cache.prefill(model, **first_turn, chunk=22))
        for token in range(5, 8):
            step(cache, token)
        fork = cache.fork()
        cache.reorder_cache(torch.tensor([1, 0], device=HOME))
        one = cache.select([1])
        step(one, 11)
        seen.append(model(second_turn["input_ids"], cache=cache).logits)
        step(cache, 12)
        step(cache, 13)
        path = tmp_path / f"{first}.safetensors"
        cache.save(path)
        later = kvframe.load_cache(path, model)
        assert later.to(AWAY if first == 2 else HOME) is later
        seen.append(model(third_turn["input_ids"], cache=later).logits)
        for token in range(14, 17):
            step(later, token)
            step(fork, token)
        lives.append([logits.to(HOME) for logits in seen])
    for mine, theirs in zip(*lives, strict=True):
        assert torch.equal(mine, theirs)
    ends = [layer for layer in later.layers if hasattr(layer, "recent") or getattr(layer, "keys", None) is not None]
    assert [places(vars(layer)) for layer in ends] == [{HOME}, {HOME}, *[{AWAY}] * (len(ends) - 2)]


def test_beams_and_padding(models):
    inputs = at_home(batch([33, 18]))
    settings = {"num_beams": 3, "max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0, "do_sample": False}
    pipeline = kvframe.load("snapkv", {**SHORT, "budget.ratio": 2, "decode.flush": 4})
    one, two = (model.generate(**inputs, cache=pipeline.cache(model), **settings) for model in models)
    assert torch.equal(one, two)


class CuriousAtHome(Curious):
    """Expects everything at home, weights and rotation included."""

    def score(self, observation, segments):
        for layer in range(3):
            weights = (observation.model.output_weight(layer), *observation.model.projection_bias(layer))
            assert places([*weights, observation.model.rope]) == {HOME}
        return super().score(observation, segments)


def test_stages_see_everything_on_the_first_layers_device(transfers):
    SEEN.clear()
    spec = kvframe.load("identity", SHORT).spec
    pipeline = curious_pipeline(scorer=CuriousAtHome(), protect=spec.protect, budget=spec.budget)
    for first in (9, 2):
        model = spread_model("qwen2", first)
        cache = pipeline.cache(model)
        model(**at_home(batch([30, 21])), cache=cache)
        transfers.clear()
        cache.compress()
    one, two = ({**vars(seen), "model": None} for seen in SEEN)
    assert places(two) == {HOME}
    for mine, theirs in zip(held_tensors(one), held_tensors(two), strict=True):
        assert torch.equal(mine, theirs)
    # Keys, values, queries and outputs of the one layer that is elsewhere, its weight and biases, hidden states at two
    # depths (the hook stands before the layer, so that of the third is still at home) and surprisal.
    assert transfers["pretend:1", "pretend:0"] == 4 + 3 + 1
    # The third layer's plan, its positions, and where its sinks are.
    assert transfers["pretend:0", "pretend:1"] == 2 + 1 + 1


def test_a_step_costs_no_transfer_of_ours(models, transfers):
    """Beyond those that the model makes with transformers' own cache; none at all on one device."""
    counts = []
    for model in models:
        pipeline = kvframe.load("snapkv", {**SHORT, "budget.ratio": 3})
        for cache in (pipeline.cache(model), DynamicCache(config=model.config)):
            model(**at_home(batch([40])), cache=cache)
            token = torch.tensor([[5]], device=HOME)
            model(token, cache=cache)
            transfers.clear()
            model(token, cache=cache)
            counts.append({way: n for way, n in transfers.items() if "cpu" not in way})
    assert counts[0] == counts[1] == {}
    assert counts[2] == counts[3] != {}


def test_one_device_is_left_as_it_is(models):
    cache = kvframe.load("identity", {**SHORT, **ADA, "encoder": FITTED}).cache(models[0])
    models[0](**at_home(batch([40])), cache=cache)
    cache.compress()
    parts, states = [layer.parts for layer in cache.compressed_layers], cache.states
    cache.to(HOME)
    for mine, theirs in zip(parts, (layer.parts for layer in cache.compressed_layers), strict=True):
        assert all(one is two for one, two in zip(mine, theirs, strict=True))
    assert all(one is two for one, two in zip(states, cache.states, strict=True))


def test_what_was_calibrated_lies_with_its_layer(models, tmp_path):
    """Once for a model, not once a cache."""
    encoder = kvframe.load("identity", {"encoder": {**FITTED, "calibration": "auto"}}).spec.encoder
    artefacts = []
    for model in models:
        reader = Reader(model, encoder.calibration_needs)
        model(batch([40])["input_ids"].to(HOME), cache=reader)
        reading = Reading([reader.observation(2)], "text", "a text", 40)
        artefacts.append(encoder.calibrate(reading, model_info(model)))
    for name, tensor in artefacts[0].tensors.items():
        assert torch.equal(tensor, artefacts[1].tensors[name])
    learned = {name: tensor.cpu() for name, tensor in artefacts[0].tensors.items()}
    replace(artefacts[0], tensors=learned).save(path := tmp_path / "learned.safetensors")
    pipeline = kvframe.load("identity", {**SHORT, **ADA, "encoder": {**FITTED, "calibration": str(path)}})
    inputs, answers = at_home(batch([40])), []
    for model in models:
        one, two = pipeline.cache(model), pipeline.cache(model)
        answers.append(greedy(model, inputs, one, new=3))
        greedy(model, inputs, two, new=2)
        for mine, theirs, layer in zip(one.states, two.states, one.compressed_layers, strict=True):
            assert mine is theirs is layer.parts[-1].state
        one.save(tmp_path / "cache.safetensors")
        assert kvframe.load_cache(tmp_path / "cache.safetensors", model).states[2] is one.states[2]
    assert torch.equal(*answers)


def test_what_was_fitted_comes_back_to_its_layer(models, tmp_path):
    cache = kvframe.load("identity", {**SHORT, **ADA, "encoder": FITTED}).cache(models[1])
    models[1](**at_home(batch([40])), cache=cache)
    cache.compress()
    cache.save(tmp_path / "cache.safetensors")
    later, token = kvframe.load_cache(tmp_path / "cache.safetensors", models[1]), torch.tensor([[5]], device=HOME)
    assert [places(state) for state in later.states] == [{HOME}, {HOME}, {AWAY}]
    assert torch.equal(*(models[1](token, cache=each).logits for each in (later, cache)))


def test_a_cache_cannot_be_where_its_model_is_not(models):
    cache = kvframe.load("identity").cache(models[1])
    with pytest.raises(InputError, match=r"on pretend:0, pretend:1, .* not on cpu; name one of them"):
        cache.to("cpu")


def test_waiting_covers_every_device(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    finish(torch.device(name) for name in ("cuda:1", "cpu", "cuda:0", "cuda:1"))
    assert sorted(map(str, waited)) == ["cuda:0", "cuda:1"]


def test_weights_kept_elsewhere_are_found():
    """accelerate holds them back and brings them for each call."""
    inputs, answers = batch([30]), []
    plain, held_back = tiny_model("qwen2"), tiny_model("qwen2")
    cpu = torch.device("cpu")
    weights = {name: tensor.clone() for name, tensor in held_back.state_dict().items()}
    attach_align_device_hook(held_back, cpu, True, weights, skip_keys=held_back._skip_keys_device_placement)
    assert held_back.model.layers[0].self_attn.o_proj.weight.is_meta
    infos = [model_info(model) for model in (plain, held_back)]
    assert infos[0].fingerprint == infos[1].fingerprint != ""
    assert infos[1].devices == (cpu,) * 3
    for index in range(3):
        assert torch.equal(*(info.output_weight(index) for info in infos))
        for one, two in zip(*(info.projection_bias(index) for info in infos), strict=True):
            assert torch.equal(one, two)
    for model in (plain, held_back):
        cache = kvframe.load("snapkv", {**SHORT, "budget.ratio": 3}).cache(model)
        answers.append(greedy(model, inputs, cache, 3))
    assert torch.equal(*answers)
