"""The coder: a row's bits are its own, and so is what a code is measured to lose."""

from __future__ import annotations

import pytest
import torch
from tiny import observation

from kvframe.execute import execute
from kvframe.ops import bitpack
from kvframe.types import LayerPlan
from kvframe_aatc import Transform
from kvframe_aatc.coder import Coder
from kvframe_aatc.quantiser import Channels


@pytest.mark.parametrize("code", ["max", "lloyd"])
@pytest.mark.parametrize(("size", "coded"), [(16, 13), (192, 110), (1024, 700)])
def test_a_row_gives_the_same_bits_whatever_stands_beside_its_block(size, coded, code):
    """Products of more rows are added up in another order, from some size on."""
    generator = torch.Generator().manual_seed(1)
    analysis, synthesis = (torch.randn(coded, size, generator=generator) for _ in range(2))
    widths = tuple(sorted((1 + index % 4 for index in range(coded)), reverse=True))
    coder = Coder(Channels(widths, code, None, 16, 1.0), analysis, synthesis, None)
    rows = torch.randn(32 * 9 + 5, size, generator=generator)
    words, scales = coder.encode(rows, bitpack.Runs((len(rows),)))
    back = coder.decode(words, scales, bitpack.Runs((len(rows),)))
    for begin, end in ((0, 32), (32, 33), (64, 67), (64, 256), (288, 293)):
        alone = bitpack.Runs((end - begin,))
        own, scale = coder.encode(rows[begin:end], alone)
        assert torch.equal(scale, scales[begin:end])
        assert torch.equal(coder.decode(own, scale, alone), back[begin:end])


@pytest.mark.parametrize("tokens", [2, 3, 5, 9])
@pytest.mark.parametrize("rope", ["pre", "post"])
def test_channels_that_never_moved_do_not_say_what_a_code_loses(tokens, rope):
    """A few tokens span as many channels; what the others hold is rounding. Twelve bits for each that moves lose next
    to nothing, on any processor."""
    stage = Transform(calibration="prompt", rope=rope, key_bits=12, value_bits=12, count_scales=False, key_shift=0)
    assert all(state.error < 1e-4 for state in stage.fit(observation([tokens])))


@pytest.mark.parametrize("tokens", [2, 5, 9])
def test_what_few_queries_did_not_look_at_is_not_lost_beyond_measure(tokens):
    """The queries of a few tokens span as many directions; a later one may look along another, where a key must not be
    off by many times its own size."""
    stage = Transform(calibration="prompt", rope="post", joint_heads=2, key_shift=0)
    seen = observation([tokens], dim=32)
    state = stage.fit(seen)[0]
    plan = LayerPlan.keep(seen.body[:, None].expand(seen.shape[1:]))
    entries = execute(plan, seen.layers[0], seen.positions, seen.model.rope[0])
    back = stage.decode(stage.encode(entries, state), state)
    assert (back.keys - entries.keys).square().sum() < 0.5 * entries.keys.square().sum()
