"""Prompts with everything that GraceKV's stages look at, in rows that can be padded on the left."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from kvframe.rope import Rope
from kvframe.types import LayerObservation, ModelInfo, Observation

torch.set_num_threads(1)
DEPTHS = (0.33, 0.5, 0.67)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def observe(
    lengths: Sequence[int],
    *,
    seed: int = 0,
    layers: int = 2,
    heads: int = 2,
    group: int = 2,
    dim: int = 8,
    sink: int = 0,
    recent: int = 0,
    suffix: int = 0,
    extra: int = 0,
    dtype: torch.dtype = torch.float32,
    only: int | None = None,
) -> Observation:
    """Rows of these lengths, each drawn from its own seed, ending in the last column; `extra` columns of padding more.
    `only` gives that row alone."""
    rope = Rope(100.0 ** (-torch.arange(0, dim, 2) / dim), 1.25)
    weight = torch.randn(heads * group, dim, 6, generator=torch.Generator().manual_seed(99))
    model = ModelInfo(layers, heads * group, heads, dim, dim**-0.5, rope, lambda layer: weight, tuple(range(layers)))
    chosen = [(i, n) for i, n in enumerate(lengths) if only in (None, i)]
    batch, tokens = len(chosen), max(n for _, n in chosen) + extra
    valid = torch.zeros(batch, tokens, dtype=torch.bool)
    body, question = valid.clone(), valid.clone()
    positions = torch.ones(batch, tokens, dtype=torch.int64)
    noise = torch.Generator().manual_seed(7)

    def empty(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=noise) * 5

    parts = [
        {
            "keys": empty(batch, heads, tokens, dim),
            "values": empty(batch, heads, tokens, dim),
            "queries": empty(batch, heads * group, tokens, dim),
            "head_outputs": empty(batch, heads * group, tokens, dim),
        }
        for _ in range(layers)
    ]
    hidden = {depth: empty(batch, tokens, 5) for depth in DEPTHS}
    surprisal = empty(batch, tokens).abs()
    for row, (index, n) in enumerate(chosen):
        generator = torch.Generator().manual_seed(1000 * seed + index)
        at = slice(tokens - n, tokens)
        place = torch.arange(n)
        valid[row, at] = True
        question[row, at] = place >= n - suffix
        body[row, at] = (place >= sink) & (place < n - recent - suffix)
        positions[row, at] = place
        for part in parts:
            for name, tensor in part.items():
                plain = torch.randn(tensor.shape[1], n, dim, generator=generator)
                centre = torch.randn(tensor.shape[1], 1, dim, generator=generator)
                both = plain + 2 * centre
                tensor[row][:, at] = rope.rotate(both, place) if name in ("keys", "queries") else both
        for tensor in hidden.values():
            tensor[row, at] = torch.randn(n, 5, generator=generator)
        surprisal[row, at] = torch.rand(n, generator=generator) * 5
    seen = tuple(LayerObservation(**{name: tensor.to(dtype) for name, tensor in part.items()}) for part in parts)
    return Observation(seen, positions, valid, body, model, hidden, surprisal, question)


@pytest.fixture(scope="session")
def make() -> Callable[..., Observation]:
    return observe
