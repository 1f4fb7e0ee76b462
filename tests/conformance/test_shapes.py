"""Head sizes and group counts of all usual models go through every registered stage, its ways of attending, and every
spec; what a stage cannot serve it refuses in `bind`, when a cache is made."""

from __future__ import annotations

import pytest
import torch
from tiny import greedy, tiny_model

import kvframe
from kvframe.errors import KvframeError
from kvframe.ops import native, ragged_attention
from kvframe.registry import registry
from kvframe.stages import Encoder
from kvframe.testing import Geometry, Prompts, variants
from kvframe.testing.case import Case, arguments, as_given, fitted, invoke
from kvframe.testing.law import identifier, quiet_torch
from kvframe.testing.numerics import attention_tolerance
from kvframe.types import Part

KIND = ("segmenter", "scorer", "allocator", "encoder")
# (H, G): one KV head or several, odd counts, up to 64 query heads for one of them.
HEADS = [(1, 1), (2, 7), (3, 1), (4, 3), (5, 2), (8, 4), (1, 64), (2, 12), (7, 5), (9, 1), (12, 16), (3, 48)]
DIMS = [8, 16, 20, 24, 80, 96, 100, *range(64, 257, 8)]
EVERY = [Geometry(1, *HEADS[index % len(HEADS)], dim) for index, dim in enumerate(DIMS)]
# Some that are turned in part, and some whose sizes have nothing in common with a power of two.
SOME = [
    Geometry(2, 3, 7, 100),
    Geometry(2, 1, 64, 24),
    Geometry(2, 5, 1, 72),
    Geometry(2, 2, 6, 80, rotary=20),
    Geometry(2, 7, 2, 104, still=(0,)),
]
STAGES = {kind: [variants(stage) for stage in registry().stages[kind].values()] for kind in KIND}
FIRST = [family[0] for kind in KIND for family in STAGES[kind]]
MORE = [stage for kind in KIND for family in STAGES[kind] for stage in family[1:]]


def refused(stage, model):
    """Whether a stage says, when a cache is made, that it cannot serve a model. An artefact is none of this test's."""
    try:
        stage.model_copy(update={"calibration": "prompt"}).bind(model)
    except KvframeError as error:
        sentence = str(error)
    else:
        return False
    assert "\n" not in sentence
    return True


def serve(stage, geometry):
    """Whether a stage serves a model of this shape. Codes are attended in each way that the encoder has."""
    case = Case(Prompts((37, 5), geometry=geometry))
    if refused(stage, case.prompts.model):
        return False
    given = arguments(stage, case)
    if not isinstance(stage, Encoder):
        invoke(stage, given)
        return True
    query, states = case.query(), fitted(stage, given[0])
    for entries, state in zip(given[1], states, strict=True):
        entries = as_given(stage, entries, case.prompts.model)
        part = Part(stage.encode(entries, state), stage, state)
        back = part.decode()
        assert back.keys.shape == entries.keys.shape
        expected = ragged_attention(query.double(), back, case.scale, impl="reference")
        found = stage.attend(query, part.encoded, state, case.scale, "cpu") if native.available() else None
        if found is not None:
            for mine, theirs, limit in zip(
                found, expected, attention_tolerance(query, back, case.scale, coded=True), strict=True
            ):
                assert float((mine - theirs).abs().max()) <= limit
    return True


@pytest.mark.parametrize("stage", FIRST, ids=identifier)
def test_a_stage_serves_every_shape(stage):
    shapes = EVERY + SOME if isinstance(stage, Encoder) else SOME
    with quiet_torch():
        assert all(serve(stage, geometry) for geometry in shapes)


@pytest.mark.parametrize("stage", MORE, ids=identifier)
def test_its_choices_serve_some_or_say_when_a_cache_is_made(stage):
    with quiet_torch():
        for geometry in SOME[:2]:
            serve(stage, geometry)


def model_of(kv_heads, group, dim, vocabulary=97, tied=False):
    shape = {"num_key_value_heads": kv_heads, "num_attention_heads": kv_heads * group, "head_dim": dim}
    sizes = {"num_hidden_layers": 2, "hidden_size": 8 * kv_heads * group}
    return tiny_model("llama", **shape, **sizes, vocab_size=vocabulary, tie_word_embeddings=tied)


# An odd vocabulary, tied or not, is met by what reads surprisal.
MODELS = [(3, 7, 100, 131, True), (5, 1, 72, 101, False)]


@pytest.fixture(scope="module", params=MODELS, ids=str)
def model(request):
    return model_of(*request.param)


@pytest.mark.parametrize("name", sorted(registry().specs))
def test_a_spec_serves_models_of_odd_shapes(name, model):
    pipeline = kvframe.load(name)
    changes = {"protect.recent": 8, "protect.sink": 0}
    if "calibration" in type(pipeline.spec.encoder).model_fields:
        changes["encoder.calibration"] = "prompt"
    cache = kvframe.load(name, changes).cache(model)
    prompt = {"input_ids": torch.randint(3, 97, (1, 120), generator=torch.Generator().manual_seed(0))}
    prompt["attention_mask"] = torch.ones_like(prompt["input_ids"])
    assert greedy(model, prompt, cache, new=4).shape == (1, 4)
