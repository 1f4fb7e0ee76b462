"""Attention in code space: that of rebuilt entries, without rebuilding them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny import observation

from kvframe.execute import execute
from kvframe.ops import native, ragged_attention
from kvframe.types import LayerPlan
from kvframe_aatc import Transform


@pytest.mark.parametrize(
    ("rope", "heads", "code", "scale_bits", "bits"),
    [
        ("post", "all", "max", 16, 3.0),
        ("post", 1, "lloyd", 8, 3.0),
        ("pre", "all", "max", 16, 3.0),
        ("pre", 1, "max", 8, 0.6),
    ],
)
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_code_space_gives_what_rebuilt_entries_give(rope, heads, code, scale_bits, bits, softcap):
    stage = Transform(
        rope=rope,
        joint_heads=heads,
        key_code=code,
        scale_bits=scale_bits,
        key_bits=bits,
        value_bits=bits,
        key_shift=0,
    )
    seen = observation([70, 33], heads=2, query_heads=4, dim=16)
    state = stage.fit(seen)[0]
    plan = LayerPlan.keep(seen.body[:, None].expand(seen.shape[1:]))
    entries = execute(plan, seen.layers[0], seen.positions, seen.model.rope)
    entries = replace(entries, log_multiplicity=torch.rand(len(entries.keys)))
    encoded = stage.encode(entries, state)
    back = stage.decode(encoded, state)
    query = torch.randn(2, 4, 1, 16, generator=torch.Generator().manual_seed(1))
    wanted = ragged_attention(query.double(), back, 0.25, "reference", softcap)
    norms = [float(x.abs().sum()) for group in state.groups for x in (group.keys.synthesis, group.values.synthesis)]
    # Two orders of summing over channels and over heads' dimensions, each in fp32.
    limit = 1e2 * torch.finfo(torch.float32).eps * max(norms) * float(query.norm(dim=-1).max())
    for impl in ("reference", *(["cpu"] if native.available() else [])):
        for got, expected in zip(stage.attend(query, encoded, state, 0.25, impl, softcap), wanted, strict=True):
            assert float((got - expected).abs().max()) <= limit, impl
    if rope == "pre":
        assert stage.attend(query, encoded, state, 0.25, "triton") is None
