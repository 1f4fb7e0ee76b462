"""A budget of bytes shared out between entries and bits."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

import pytest
from tiny import batch, tiny_model

import kvframe
from kvframe.budget import entry_budget, split_regions
from kvframe.builtin.encoders import Dense
from kvframe.errors import SpecError
from kvframe.hf import Prefill
from kvframe.pipeline import Pipeline
from kvframe.spec import Budget
from kvframe.split import attention_error

SMALL = {
    "protect.recent": 3,
    "protect.sink": 1,
    "allocator": "top_k",
    "scorer": {"name": "baselines.snapkv", "window": 7},
}


class Rounded(Dense):
    """Keys and values rounded to `bits` bits of the largest one."""

    views: ClassVar[bool] = False
    name: Literal["rounded"] = "rounded"  # type: ignore[assignment]
    bits: int = 4
    open: tuple[int, ...] = ()

    def widths(self):
        return [self.model_copy(update={"bits": b, "open": ()}) for b in self.open] or [self]

    def encode(self, entries, state):
        def rounded(rows):
            step = rows.abs().amax() / 2 ** (self.bits - 1)
            return (rows / step).round() * step

        return super().encode(replace(entries, keys=rounded(entries.keys), values=rounded(entries.values)), state)

    def bits_per_entry(self, model, itemsize, state=()):
        return 2 * self.bits * model.head_dim


def pipeline_of(encoder, ratio=9.0):
    spec = kvframe.load("identity", SMALL).spec
    return Pipeline(spec.model_copy(update={"encoder": encoder, "budget": Budget(ratio=ratio, of="bytes")}))


def test_the_width_that_attention_errs_least_with_is_kept():
    """Each width by itself, judged by hand, says which one the open encoder must go on with."""
    model, inputs, widths = tiny_model("llama"), batch([60, 41]), (1, 4, 16)
    open_pipeline = pipeline_of(Rounded(open=widths))
    prefill = Prefill(model, [open_pipeline])
    model(**inputs, cache=prefill)
    errors = []
    for bits in widths:
        pipeline = pipeline_of(Rounded(bits=bits))
        seen = prefill.fork(pipeline)
        regions = split_regions(seen.valid, pipeline.spec.protect)
        cost = pipeline.entry_bits(seen.info, 4)
        budget, _ = entry_budget(pipeline.spec.budget, regions, seen.info, 4, cost)
        observation = seen.observe(regions, open_pipeline.needs)
        made = pipeline.run(observation, budget, regions.sinks)
        errors.append(attention_error(observation, regions, made.parts, pipeline.spec.attention))
    best = widths[errors.index(min(errors))]
    assert best == 4, "few entries of 16 bits and many of 1 are both worse"
    cache = prefill.fork(open_pipeline)
    cache.compress()
    assert all(part.encoder.bits == best for part in (layer.parts[-1] for layer in cache.compressed_layers))
    assert "of 3 widths of the encoder attention errs least with bits 4" in cache.report().notes
    fork = cache.fork()
    assert fork.pipeline == cache.pipeline
    fork.reset()
    assert fork.pipeline is open_pipeline
    cache.reset()
    assert cache.pipeline is open_pipeline


def test_what_is_held_exactly_has_no_error():
    model, inputs = tiny_model("qwen3"), batch([40, 23])
    pipeline = kvframe.load("identity", {"protect.recent": 5, "scorer": {"name": "baselines.snapkv", "window": 7}})
    cache = pipeline.cache(model)
    model(**inputs, cache=cache)
    regions = split_regions(cache.valid, pipeline.spec.protect)
    observation = cache.observe(regions, pipeline.needs)
    budget, _ = entry_budget(Budget(ratio=1), regions, cache.info, 4, 1024)
    made = pipeline.run(observation, budget, regions.sinks)
    # Squared, and relative: a few units in the last place, squared.
    assert attention_error(observation, regions, made.parts, pipeline.spec.attention) < 1e-10
    none = replace(observation, layers=tuple(replace(layer, queries=None) for layer in observation.layers))
    assert attention_error(none, regions, made.parts, pipeline.spec.attention) == 0


def test_an_open_width_needs_a_budget_of_bytes(monkeypatch):
    monkeypatch.setattr(Dense, "widths", lambda self: (self, self))
    with pytest.raises(SpecError, match=r"leaves its width open.*set budget: \{ratio: 8, of: bytes\}"):
        kvframe.load("identity", {**SMALL, "budget.ratio": 2})


def test_a_ratio_of_bytes_is_kept_by_overrides_and_met():
    model, inputs = tiny_model("llama"), batch([80])
    pipeline = kvframe.load("identity", {**SMALL, "encoder": "int8", "budget.of": "bytes", "budget.ratio": 5})
    assert pipeline.spec.budget == Budget(ratio=5, of="bytes")
    cache = pipeline.cache(model)
    model(**inputs, cache=cache)
    cache.compress()
    report = cache.report()
    units, exact = 3 * 2, 2 * 16 * 4
    entries = int(sum(layer.parts[-1].encoded.offsets[-1] for layer in cache.compressed_layers))
    spent = units * 4 * exact + entries * pipeline.entry_bits(cache.info, 4) / 8
    assert report.full_bytes / 5 - pipeline.entry_bits(cache.info, 4) / 8 * units <= spent <= report.full_bytes / 5
    assert report.entry_ratio < 5
