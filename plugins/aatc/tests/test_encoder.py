"""The encoder: the laws of the conformance kit, live models, bytes, and what is refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from tiny import MODELS, batch, greedy, info, observation, tiny_model

import kvframe
from kvframe.errors import SpecError, StageError
from kvframe.execute import execute
from kvframe.hf import model_info
from kvframe.testing import parametrize_with_checks
from kvframe.types import Encoded, Entries, LayerPlan, storage_bytes
from kvframe_aatc import Transform

PAPER = {
    "key_shift": 0,
    "count_scales": False,
    "basis": "pca",
    "center_keys": False,
    "query_rotation": "literal",
    "scope": "global",
    "normalise": True,
    "rd_model": "high_rate",
    "one_bit": "paper",
    "value_code": "max",
    "scale_over": "all",
}
STAGES = [
    Transform(),
    Transform(**PAPER, protected_layers=1, key_bits=3, value_bits=3),
    Transform(joint_heads=1, scale_bits=8, scope="group", key_bits=3, value_bits=3),
    Transform(offers=(1, 2, 4), key_bits=2, value_bits=2),
    Transform(joint_heads=2, rope="post", key_shift=0, calibration="prompt"),
    Transform(basis="pca", weights="none", key_code="lloyd", value_code="max", key_bits=9, value_bits=9, scope="layer"),
]
PROMPT = {"encoder.calibration": "prompt", "protect.recent": 16, "protect.sink": 2}


@parametrize_with_checks(STAGES)
def test_conformance(stage, check):
    check(stage)


def coded(stage: Transform, lengths: list[int], **geometry: int) -> tuple[Entries, Encoded, Entries]:
    """Entries of the first layer, their codes and what they decode to."""
    seen = observation(lengths, **geometry)
    state = stage.fit(seen)[0]
    plan = LayerPlan.keep(seen.body[:, None].expand(seen.shape[1:]))
    entries = execute(plan, seen.layers[0], seen.positions, seen.model.rope)
    encoded = stage.encode(entries, state)
    return entries, encoded, stage.decode(encoded, state)


@pytest.mark.parametrize("lengths", [[1], [2], [7], [33], [64, 3, 33]])
def test_full_width_is_the_identity_within_rounding(lengths):
    stage = Transform(key_bits=16, value_bits=16, key_shift=0, count_scales=False, value_code="max")
    entries, _, back = coded(stage, lengths)
    for name in ("keys", "values"):
        true, found = getattr(entries, name), getattr(back, name)
        # Sixteen bits of the largest latent, and fp32 sums through the transform and back.
        limit = 2**-13 * float(true.norm(dim=-1).max()) * true.shape[-1] ** 0.5
        assert (true - found).abs().max() <= limit


@pytest.mark.parametrize("rope", ["pre", "post"])
@pytest.mark.parametrize("heads", ["all", 1, 2])
def test_what_is_held_is_what_is_declared(rope, heads):
    stage = Transform(rope=rope, joint_heads=heads, key_bits=3, value_bits=3)
    seen = observation([64, 96], heads=4, query_heads=8, dim=16)
    entries, encoded, _ = coded(stage, [64, 96], heads=4, query_heads=8, dim=16)
    held = storage_bytes(encoded.codes.values())
    state = stage.fit(seen)[0]
    assert held * 8 == stage.bits_per_entry(seen.model, 4, state) * len(entries.keys), "whole blocks: to the bit"
    assert stage.bits_per_entry(seen.model, 4) == stage.bits_per_entry(seen.model, 4, state)


def test_bits_add_up_to_the_mean():
    seen = observation([90, 70], heads=4, query_heads=8, dim=16, layers=3)
    values = 4 * 16
    for scope in ("global", "layer", "group"):
        for mean in (1, 2.5, 4):
            stage = Transform(key_bits=mean, value_bits=mean, key_shift=0, count_scales=False, scope=scope)
            states = stage.fit(seen)
            spent = [sum(g.keys.channels.words for g in state.groups) for state in states]
            assert sum(spent) == mean * values * 3
            if scope != "global":
                assert set(spent) == {mean * values}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("spec", ["aatc", "aatc-paper", "aatc-heads", "aatc-codespace", "aatc-variance"])
def test_specs_generate_with_left_padding(name, spec):
    model, inputs = tiny_model(name), batch([70, 49, 20])
    pipeline = kvframe.load(spec, {**PROMPT, "encoder.key_bits": 4, "encoder.value_bits": 4, **layers_of(spec)})
    cache = pipeline.cache(model)
    assert greedy(model, inputs, cache, new=40).shape == (3, 40)
    report = cache.report()
    assert report.entry_ratio == 1
    learned = report.bytes_by_part["learned"]
    assert learned > 0, "what was fitted on the prompt is this cache's own"
    assert report.bytes - learned < report.full_bytes


def layers_of(spec: str) -> dict[str, int]:
    """The tiny models have three layers or fewer: not all may be protected."""
    return {"encoder.protected_layers": 1} if spec in ("aatc-paper", "aatc-variance") else {}


@pytest.mark.parametrize("name", ["llama", "llama3", "yarn", "qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("rope", ["pre", "post"])
def test_wide_codes_give_back_what_a_model_cached(name, rope):
    model, inputs = tiny_model(name), batch([70, 49])
    wide = {"encoder.key_bits": 15, "encoder.value_bits": 15, "encoder.key_shift": 0, "encoder.value_code": "max"}
    settings = {**PROMPT, **wide, "encoder.rope": rope, "protect.sink": 0, "protect.recent": 0}
    cache = kvframe.load("aatc", settings).cache(model)
    model(**inputs, cache=cache)
    seen = [(layer.recent.keys.clone(), layer.recent.values.clone()) for layer in cache.compressed_layers]
    cache.compress()
    valid = inputs["attention_mask"].bool()
    for layer, (keys, values) in zip(cache.compressed_layers, seen, strict=True):
        back = layer.parts[0].decode()
        for found, exact in ((back.keys, keys), (back.values, values)):
            true = torch.cat([exact[row, :, valid[row]].flatten(0, 1) for row in range(2)])
            # At least 12 bits for the channels that matter, and a basis that is not orthonormal.
            assert (found - true).norm() < 2**-10 * true.norm()


def test_a_row_is_the_same_alone_and_in_a_batch_with_the_same_states():
    seen = observation([70, 41, 33], heads=2, dim=16)
    stage = Transform()
    states = stage.fit(seen)
    plan = LayerPlan.keep(seen.body[:, None].expand(seen.shape[1:]))
    entries = execute(plan, seen.layers[0], seen.positions, seen.model.rope)
    together = stage.decode(stage.encode(entries, states[0]), states[0])
    for row in range(3):
        begin, end = entries.bounds[2 * row], entries.bounds[2 * row + 2]
        own = slice(begin, end)
        offsets = entries.offsets[2 * row : 2 * row + 3] - begin
        alone = Entries(offsets, entries.keys[own], entries.values[own], positions=entries.positions[own])
        back = stage.decode(stage.encode(alone, states[0]), states[0])
        assert torch.allclose(back.keys, together.keys[own], atol=1e-4)
        assert torch.allclose(back.values, together.values[own], atol=1e-4)


def test_a_projections_bias_stays_out_of_the_code():
    model = tiny_model("qwen2")
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.data.normal_(0, 40, generator=torch.Generator().manual_seed(1))
        layer.self_attn.v_proj.bias.data.normal_(0, 5, generator=torch.Generator().manual_seed(2))
    own = model_info(model).projection_bias(0)
    assert torch.equal(own[0], model.model.layers[0].self_attn.k_proj.bias)
    inputs = batch([120])
    error = {}
    for spec in ("aatc-paper", "int2"):
        settings = {"protect.recent": 8, "protect.sink": 0}
        settings |= {"encoder.calibration": "prompt", "encoder.protected_layers": 1} if spec == "aatc-paper" else {}
        cache = kvframe.load(spec, settings).cache(model)
        with torch.no_grad():
            model(**inputs, cache=cache)
        keys = cache.compressed_layers[0].recent.keys[0, :, :112].clone()
        cache.compress()
        part = cache.compressed_layers[0].parts[0]
        bias = own[0].view(2, 1, 16)
        turned = cache.info.rope.rotate(bias.expand(2, 112, 16), torch.arange(112))
        found = part.decode().keys.view(2, 112, 16)
        error[spec] = float((found - keys).square().sum() / (keys - turned).square().sum())
    # Relative to what is left without the bias, which is a thousandth of the whole.
    assert max(error.values()) < 0.5


@pytest.mark.parametrize("first", [[32, 64], [31, 33], [1, 40], [7, 0]])
@pytest.mark.parametrize("gap", [0, 1, 40])
def test_positions_of_joined_codes(first, gap):
    stage, seen = Transform(), observation([60])
    state = stage.fit(seen)[0]

    def coded_at(positions: list[range]) -> Encoded:
        counts = [len(p) for p in positions for _ in range(2)]
        where = torch.cat([torch.tensor(p, dtype=torch.int32) for p in positions for _ in range(2)])
        keys, values = torch.randn(2, len(where), 8)
        return stage.encode(Entries(torch.tensor([0, *counts]).cumsum(0), keys, values, positions=where), state)

    # The second row goes on where it ended, the first one after a gap.
    more = [range(first[0] + gap, first[0] + gap + 70), range(first[1], first[1] + 33)]
    joined = stage.join(coded_at([range(n) for n in first]), coded_at(more), state)
    if joined is not None:
        assert ("distances" in joined.codes) == (gap > 0 and first[0] % 32 > 0)
        expected = [torch.tensor([*range(n), *m]).repeat(2) for n, m in zip(first, more, strict=True)]
        assert torch.equal(stage.decode(joined, state).positions.long(), torch.cat(expected))
    else:
        assert gap > 0, "positions that go on take no more room together"


def test_decoding_keeps_the_bytes_of_a_token_constant():
    model = tiny_model("llama")
    cache = kvframe.load("aatc", {**PROMPT, "decode.flush": 32}).cache(model)
    inputs = batch([100])
    greedy(model, inputs, cache, new=97)
    sizes = []
    for _ in range(5):
        before = cache.report()
        held = sum(p.encoded.nbytes for layer in cache.compressed_layers for p in layer.parts)
        entries = sum(int(p.encoded.offsets[-1]) for layer in cache.compressed_layers for p in layer.parts)
        sizes.append((held, entries))
        assert all(len(layer.parts) <= 2 for layer in cache.compressed_layers), "sinks, and one part of codes"
        for _ in range(128):
            with torch.no_grad():
                model(torch.tensor([[5]]), cache=cache, use_cache=True)
        assert cache.report().tokens[0] == before.tokens[0] + 128
    grown = [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(sizes)]
    assert len(grown) == 4, "512 tokens"
    # 128 tokens more are as many bytes more, whatever came before.
    assert grown == [(grown[0][0], 128 * 3 * 2)] * 4


def test_no_more_than_a_tile_is_rebuilt_at_once():
    stage = Transform()
    seen = observation([3000], heads=2, dim=16, layers=1)
    state = stage.fit(seen)[0]
    plan = LayerPlan.keep(seen.body[:, None].expand(seen.shape[1:]))
    entries = execute(plan, seen.layers[0], seen.positions, seen.model.rope)
    encoded = stage.encode(entries, state)
    pieces = list(stage.tiles(encoded, state))
    assert len(pieces) == 3
    assert max(len(piece.keys) for piece in pieces) <= 1024 * 2
    whole = stage.decode(encoded, state)
    assert torch.equal(pieces[1].positions, whole.positions.view(2, 3000)[:, 1024:2048].reshape(-1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"key_bits": 17}, "less than or equal to 16"),
        ({"key_bits": 0.1}, "mean of -0.15 bits"),
        ({"value_bits": 16}, "mean of 16.25 bits, outside 0 to max_width 16"),
        ({"key_bits": 4, "max_width": 3}, "outside 0 to max_width 3"),
        ({"joint_heads": 0}, "joint_heads must be 'all' or at least 1"),
        ({"scale_bits": 12}, "8 or 16"),
        ({"rope": "both"}, "'pre' or 'post'"),
        ({"search": [2, 17]}, "17 of search with key_shift 0.25 makes a mean of 16.75 bits"),
        ({"offers": [-1]}, "-1 of offers with key_shift 0.25 makes a mean of -1.25 bits"),
        ({"search": [2, 3]}, "leaves its width open"),
    ],
)
def test_wrong_fields_are_refused(settings, message):
    with pytest.raises(SpecError, match=message):
        kvframe.load("aatc", {f"encoder.{key}": value for key, value in settings.items()})


def test_an_open_width_is_one_encoder_for_each_number():
    assert Transform().widths() == [Transform()]
    tried = Transform(search=(4, 2, 4), joint_heads=1).widths()
    assert tried == [Transform(key_bits=b, value_bits=b, joint_heads=1) for b in (2, 4)]
    assert len({stage.parameters for stage in tried}) == 1, "one calibration serves them all"
    assert Transform(offers=(4, 1, 4)).grades() == [Transform(key_bits=b, value_bits=b) for b in (1, 4)]


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_state_says_what_is_lost(bits):
    """Without weights the declared share is the squared error relative to the energy, keys' and values' on average. It
    is measured channel by channel on a sample, so it is near what the entries lose, not the same."""
    stage = Transform(
        key_bits=bits, value_bits=bits, key_shift=0, joint_heads=1, weights="none", basis="pca", center_keys=False
    )
    stage = stage.model_copy(update={"calibration": "prompt", "rope": "post"})
    seen = observation([200])
    state = stage.fit(seen)[0]
    entries, _, back = coded(stage, [200])
    lost = [
        float((getattr(entries, name) - getattr(back, name)).square().sum() / getattr(entries, name).square().sum())
        for name in ("keys", "values")
    ]
    assert stage.error(state) == pytest.approx(sum(lost) / 2, rel=0.35)


def test_heads_that_do_not_divide_are_refused_before_the_prefill():
    with pytest.raises(StageError, match="to code 3 KV heads jointly, but model has 2"):
        Transform(joint_heads=3, calibration="prompt").bind(info())
    with pytest.raises(StageError, match="cannot be met: the scales alone take 2 bits a value"):
        Transform(key_bits=0.3, value_bits=0.3, key_shift=0, calibration="prompt").bind(info(heads=1, query_heads=2))
    with pytest.raises(StageError, match="cannot be met: the 1 protected layers take 3 bits each"):
        Transform(key_bits=2, value_bits=2, key_shift=0, protected_layers=1, calibration="prompt").bind(
            info(heads=1, query_heads=2)
        )


def test_heads_with_different_tokens_cannot_be_joint():
    with pytest.raises(SpecError, match="joint_heads: 1"):
        kvframe.load("adakv", {"encoder": {"name": "aatc.transform"}})
    stage, seen = Transform(), observation([9])
    entries = Entries(torch.tensor([0, 3, 8]), torch.randn(8, 8), torch.randn(8, 8), positions=torch.arange(8).int())
    with pytest.raises(StageError, match=r"hold \[3, 5\] entries; set encoder.joint_heads: 1"):
        stage.encode(entries, stage.fit(seen)[0])


def test_a_hybrid_with_ragged_heads():
    model, inputs = tiny_model("llama"), batch([80, 61])
    heads = {"name": "aatc.transform", "joint_heads": 1, "calibration": "prompt", "scale_bits": 8, "key_bits": 4}
    settings = {"encoder": heads, "budget.ratio": 2, "protect.recent": 8, "protect.sink": 2, "scorer.window": 7}
    cache = kvframe.load("adakv", settings).cache(model)
    assert greedy(model, inputs, cache).shape == (2, 10)
    full = 80 * 2 * 2 * 16 * 4  # fp32 bytes of a row of 80 tokens, in one layer
    for layer in cache.compressed_layers:
        assert len(set(layer.parts[-1].encoded.offsets.diff().tolist())) > 1, "heads keep different numbers"
        assert sum(part.encoded.nbytes for part in layer.parts) < full / 4


def test_activations_that_are_not_finite_are_refused():
    stage, seen = Transform(), observation([40])
    state = stage.fit(seen)[0]
    keys = torch.randn(8, 8)
    keys[3, 2] = float("inf")
    entries = Entries(torch.tensor([0, 4, 8]), keys, torch.randn(8, 8), positions=torch.arange(8).int())
    with pytest.raises(StageError, match="infinities or NaN"):
        stage.encode(entries, state)


@pytest.mark.parametrize("rope", ["pre", "post"])
def test_what_float16_holds_only_just_stays_finite(rope):
    stage = Transform(rope=rope, key_bits=3, value_bits=3)
    seen = observation([60], heads=2, dim=16)
    state = stage.fit(seen)[0]
    generator = torch.Generator().manual_seed(5)
    largest = torch.finfo(torch.float16).max
    keys, values = (torch.randint(0, 2, (120, 16), generator=generator) * 2.0 - 1 for _ in range(2))
    keys, values = (largest * keys).half(), (largest * values).half()
    positions = torch.arange(60).repeat(2).int()
    back = stage.decode(
        stage.encode(Entries(torch.tensor([0, 60, 120]), keys, values, positions=positions), state), state
    )
    assert back.keys.dtype == torch.float16
    for name in ("keys", "values"):
        found = getattr(back, name)
        assert bool(found.isfinite().all())
        assert float(found.abs().max()) == largest, "codes err to both sides"


def test_channels_that_never_move_cost_nothing():
    seen = observation([60], heads=1, query_heads=2, dim=16)
    for layer in seen.layers:
        layer.values[..., 4:] = 0
        layer.values[..., 3] = 2.5
    stage = Transform(key_bits=4, value_bits=1, key_shift=0, count_scales=False, value_code="max")
    state = stage.fit(seen)[0]
    plan = LayerPlan.keep(seen.body[:, None].expand(seen.shape[1:]))
    entries = execute(plan, seen.layers[0], seen.positions, seen.model.rope)
    back = stage.decode(stage.encode(entries, state), state)
    # Sixteen bits for four channels that say something.
    assert ((back.values - entries.values).square().sum() / entries.values.square().sum()) < 0.02
