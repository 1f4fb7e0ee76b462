"""Every mistake of a stage shows in a dry run, with the stage's name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvframe.authoring.dryrun import dry_run
from kvframe.builtin.allocators import TopK
from kvframe.builtin.encoders import Dense
from kvframe.builtin.kernels import Reference
from kvframe.builtin.scorers import Uniform
from kvframe.builtin.segmenters import Whole
from kvframe.errors import InputError, ModelError, StageError
from kvframe.pipeline import Pipeline, load
from kvframe.registry import registry
from kvframe.spec import PipelineSpec, read_spec
from kvframe.types import Entries, Needs


def pipeline_with(**stages: Any) -> Pipeline:
    """A pipeline at ratio 2 with stages that are not registered."""
    plain = read_spec("snapkv", {"budget.ratio": 2, "scorer": "uniform"})
    fields = {name: getattr(plain, name) for name in type(plain).model_fields}
    return Pipeline(PipelineSpec(**{**fields, **stages}))


def changed(kind: type, **methods: Any) -> Any:
    """An instance of a stage class with other methods."""
    return type("Changed", (kind,), {"__doc__": "Broken.", "__module__": __name__, **methods})()


def clamped(entries: Entries) -> Entries:
    """The same entries, in which nothing was too large."""
    entries.keys.clamp_(-100, 100)
    return entries


@pytest.mark.parametrize("name", sorted(registry().specs))
def test_every_shipped_spec_runs(name):
    result = dry_run(load(name))
    if not result.done:
        # An encoder that wants a calibration for this very model says how to do without.
        assert "set encoder.calibration: prompt" in result.text
        result = dry_run(load(name, {"encoder.calibration": "prompt"}))
    assert result.done, result.text
    assert "157 tokens of two random prompts" in result.text


def test_blocks_of_a_streaming_spec_run_too():
    seen = []

    def score(self, observation, segments):
        seen.append(observation.valid.shape[1])
        return torch.ones(observation.shape)

    assert dry_run(pipeline_with(scorer=changed(Uniform, score=score), decode={"flush": 7})).done
    assert 7 in seen


SCORES = "scorer 'uniform'"


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ({"segmenter": changed(Whole, segment=lambda s, o: None)}, "segmenter 'whole' must return Segments, .* None"),
        (
            {"segmenter": changed(Whole, segment=lambda s, o: Whole.segment(s, o).ids)},
            "segmenter 'whole' must return Segments, but returned Tensor",
        ),
        (
            {"scorer": changed(Uniform, score=lambda s, o, g: None)},
            f"{SCORES} must return Tensor, .*is a return missing",
        ),
        (
            {"scorer": changed(Uniform, score=lambda s, o, g: torch.ones(o.shape[1:]))},
            rf"{SCORES}.scores must have shape \[2, 2, 2, 104\], but has \[2, 2, 104\]",
        ),
        (
            {"scorer": changed(Uniform, score=lambda s, o, g: torch.ones(o.shape).double())},
            f"{SCORES} must return finite fp32 scores >= 0, but returned torch.float64",
        ),
        (
            {"scorer": changed(Uniform, score=lambda s, o, g: torch.ones(o.shape) * torch.nan)},
            f"{SCORES} must return finite fp32 scores >= 0, .*nan",
        ),
        (
            {"scorer": changed(Uniform, score=lambda s, o, g: torch.ones(o.shape, device="meta"))},
            f"{SCORES} returned scores on meta, but the observation is on cpu",
        ),
        (
            {"scorer": changed(Uniform, score=lambda s, o, g: o.layers[0].keys.mul_(2)[None, ..., 0] * 0)},
            rf"{SCORES} changes layers\[0\].keys in place",
        ),
        (
            {"scorer": changed(Uniform, score=lambda s, o, g: (o.layers[0].keys.mul_(2), torch.ones(o.shape))[1])},
            rf"{SCORES} changes layers\[0\].keys in place, which other stages and the cache read too; work on a copy",
        ),
        (
            {"scorer": changed(Uniform, score=lambda s, o, g: o.layers[0].no_such_thing)},
            f"{SCORES} fails with AttributeError: .*no_such_thing",
        ),
        (
            {"allocator": changed(TopK, allocate=lambda s, o, g, scores, b: TopK.allocate(s, o, g, scores, b + 9999))},
            "allocator 'top_k'",
        ),
        (
            {"allocator": changed(TopK, allocate=lambda s, o, g, scores, b: TopK.allocate(s, o, g, scores.zero_(), b))},
            "allocator 'top_k' changes scores in place",
        ),
        (
            {"encoder": changed(Dense, encode=lambda s, e, state: Dense.encode(s, clamped(e), state))},
            "encoder 'dense' changes keys in place, which other stages and the cache read too",
        ),
        (
            {
                "encoder": changed(
                    Dense, decode=lambda s, e, state: (e.codes["keys"].mul_(2), Dense.decode(s, e, ()))[1]
                )
            },
            "encoder 'dense' changes keys in place",
        ),
        ({"encoder": changed(Dense, encode=lambda s, e, state: e)}, "encoder 'dense' must return Encoded, .*Entries"),
        (
            {"encoder": changed(Dense, decode=lambda s, e, state: 1 / 0)},
            "encoder 'dense' fails with ZeroDivisionError",
        ),
        (
            {"attention": changed(Reference, attend=lambda s, q, part, scale: (q.double(), q[..., 0].double()))},
            "attention 'reference' must return finite fp32 tensors, but returned torch.float64",
        ),
        (
            {"attention": changed(Reference, attend=lambda s, q, part, scale: (q[..., :3], q[..., 0]))},
            "attention 'reference'.out must have shape",
        ),
        (
            {"scorer": changed(Uniform, bind=lambda s, model: 1 / 0)},
            f"{SCORES} fails with ZeroDivisionError",
        ),
        ({"scorer": changed(Uniform, needs=property(lambda s: 1 / 0))}, f"{SCORES} fails with ZeroDivisionError"),
        ({"scorer": changed(Uniform, needs=property(lambda s: None))}, f"{SCORES} must return Needs, but .* None"),
    ],
)
def test_mistakes_are_blamed_on_their_stage(stages, message):
    with pytest.raises(StageError, match=message):
        dry_run(pipeline_with(**stages))


def test_the_innermost_stage_is_blamed():
    """A kernel that calls its encoder is not to blame for the encoder's mistake."""
    broken = changed(Dense, decode=lambda s, e, state: torch.ones(2) + torch.ones(3))
    with pytest.raises(StageError, match="encoder 'dense' fails"):
        dry_run(pipeline_with(encoder=broken, attention=Reference()))


def test_a_stage_for_one_model_only_is_no_mistake():
    def bind(self, model):
        raise ModelError("Made for another model.")

    result = dry_run(pipeline_with(scorer=changed(Uniform, bind=bind)))
    assert (result.done, result.text) == (False, "Made for another model.")


def test_a_kernel_for_another_device_is_no_mistake():
    def attend(self, query, part, scale):
        raise InputError("Runs elsewhere.")

    result = dry_run(pipeline_with(attention=changed(Reference, attend=attend)))
    assert (result.done, result.text) == (False, "Runs elsewhere.")


def test_stages_are_shown_what_they_need():
    def score(self, observation, segments):
        assert observation.layers[0].queries.shape[2] == 5
        assert observation.surprisal is not None
        return torch.ones(observation.shape)

    needs = property(lambda self: Needs(queries=5, surprisal=True))
    assert dry_run(pipeline_with(scorer=changed(Uniform, score=score, needs=needs))).done
