"""Streaming moments: the same as from everything at once, in memory that does not grow."""

from __future__ import annotations

import logging

import pytest
import torch
from tiny import observation

from kvframe.errors import StageError
from kvframe_aatc import Transform
from kvframe_aatc import moments as module
from kvframe_aatc.moments import Moments
from kvframe_aatc.tables import Tables


@pytest.mark.parametrize("before_rope", [True, False])
@pytest.mark.parametrize("heads", [1, 2])
def test_moments_of_a_stream_are_those_of_the_whole(before_rope, heads):
    seen = [observation([40, 17], seed=s, dim=8) for s in range(3)]
    sums = Moments(seen[0].model, heads, before_rope)
    for each in seen:
        sums.add(each)
    assert sums.tokens == sums.query_tokens == 3 * 57
    for index in range(2):
        keys, values, queries = [], [], []
        for each in seen:
            for row in range(2):
                valid = each.valid[row]
                layer = each.layers[index]
                where = each.positions[row, valid]
                k, q = layer.keys[row][:, valid], layer.queries[row][:, valid]
                if before_rope:
                    k, q = (each.model.rope.unrotate(x, where) for x in (k, q))
                keys.append(k)
                queries.append(q)
                values.append(layer.values[row][:, valid])
        whole_keys = torch.cat(keys, 1).transpose(0, 1).reshape(171, 2 // heads, -1).double()
        expected = torch.einsum("tge,tgf->gef", whole_keys, whole_keys)
        # fp32 products of each portion, summed in fp64.
        assert torch.allclose(sums.layers[index].keys, expected, rtol=1e-4, atol=1e-3)
        assert torch.allclose(sums.layers[index].key_sum, whole_keys.sum(0), rtol=1e-4, atol=1e-3)
        whole = torch.cat(queries, 1).reshape(2, -1, 8).double()
        assert torch.allclose(sums.layers[index].queries, whole.transpose(1, 2) @ whole, rtol=1e-4, atol=1e-3)


def test_the_sample_stays_small_and_even(monkeypatch):
    monkeypatch.setattr(module, "SAMPLE", 16)
    seen = observation([50], dim=8)
    for layer in seen.layers:
        layer.values[0, 0, :, 0] = torch.arange(50.0)
    sums = Moments(seen.model, 2, True)
    held = []
    for index in range(20):
        for layer in seen.layers:
            layer.values[0, 0, :, 0] = torch.arange(50.0) + 50 * index
        sums.add(seen)
        held.append(sum(len(piece) for piece in sums.layers[0].sample_values))
    assert max(held) <= 2 * 16
    numbers = torch.cat(sums.layers[1].sample_values)[:, 0]
    assert numbers.diff().unique().numel() == 1, "every so many tokens one"
    assert float(numbers[-1]) > 900


def test_nothing_to_learn_from_is_refused():
    seen = observation([5], body=torch.zeros(1, 5, dtype=torch.bool))
    with pytest.raises(StageError, match="no token to learn its transform from"):
        Transform().fit(seen)


@pytest.mark.parametrize("part", ["keys", "values", "queries"])
def test_a_calibration_that_overflows_is_refused(part):
    seen = observation([20])
    getattr(seen.layers[1], part)[0, 0, 11, 3] = float("inf")
    with pytest.raises(StageError, match="in layer 1 keys, values or queries hold infinities"):
        Transform(calibration="prompt").fit(seen)


def test_too_few_tokens_are_said_and_coded_all_the_same(caplog):
    seen = observation([9], heads=2, dim=16)
    with caplog.at_level(logging.WARNING, "kvframe"):
        states = Transform(calibration="prompt").fit(seen)
    assert "32 channels from 9 tokens, so some were never seen to move; give it at least 128." in caplog.text
    assert all(bool(state.groups[0].keys.analysis.isfinite().all()) for state in states)


def test_tables_go_through_a_file():
    learned = Transform().learn([observation([40])], observation([40]).model)
    tables = Tables.from_tensors(learned)
    assert tables.tokens == 40
    assert set(tables.tensors()) == set(learned)
    with pytest.raises(KeyError, match=r"values\.gain"):
        Tables.from_tensors({name: t for name, t in learned.items() if name != "values.gain"})
