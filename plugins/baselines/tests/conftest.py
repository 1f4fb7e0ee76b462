"""Prompts made from one seed: rows of known tokens that can be padded in different ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvframe.rope import Rope
from kvframe.types import LayerObservation, ModelInfo, Observation, Segments

torch.set_num_threads(1)


@dataclass(frozen=True, eq=False)
class Row:
    """One prompt without padding: keys, values `[L, H, n, D]`, queries `[L, Hq, n, D]`, body bool `[n]`."""

    keys: Tensor
    values: Tensor
    queries: Tensor
    body: Tensor

    @property
    def length(self) -> int:
        return self.keys.shape[2]


@dataclass(frozen=True, eq=False)
class Prompts:
    """Rows and their model; `observe` puts them into one batch."""

    model: ModelInfo
    rows: tuple[Row, ...]

    @classmethod
    def make(
        cls,
        seed: int,
        lengths: Sequence[int],
        *,
        layers: int = 2,
        heads: int = 2,
        group: int = 2,
        dim: int = 8,
        rotary: int | None = None,
        scaling: float = 1.0,
        dtype: torch.dtype = torch.float32,
        sink: int = 0,
        recent: int = 0,
    ) -> Prompts:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            # A shared offset and different sizes of heads: real keys are neither centred nor alike.
            centre = torch.randn(*shape[:2], 1, shape[3], generator=generator)
            size = torch.rand(*shape[:2], 1, 1, generator=generator) * 2 + 0.1
            return ((torch.randn(shape, generator=generator) + centre) * size).to(dtype)

        rotary = dim if rotary is None else rotary
        rope = Rope(100.0 ** (-torch.arange(0, rotary, 2) / rotary), scaling)
        weight = torch.zeros(heads * group, dim, 4)
        model = ModelInfo(
            layers, heads * group, heads, dim, dim**-0.5, rope, lambda layer: weight, tuple(range(layers))
        )
        rows = []
        for length in lengths:
            place = torch.arange(length)
            rows.append(
                Row(
                    draw(layers, heads, length, dim),
                    draw(layers, heads, length, dim),
                    draw(layers, heads * group, length, dim),
                    (place >= sink) & (place < length - recent),
                )
            )
        return cls(model, tuple(rows))

    def observe(self, columns: Sequence[Tensor], tokens: int, observed: int | None = None) -> Observation:
        """Put row `i` at `columns[i]`; noise stands at the padding. `observed` = number of queries, from the end."""
        batch, model = len(self.rows), self.model
        generator = torch.Generator().manual_seed(7)

        def place(name: str, layer: int, heads: int) -> Tensor:
            dtype = self.rows[0].keys.dtype
            out = (torch.randn(batch, heads, tokens, model.head_dim, generator=generator) * 5).to(dtype)
            for index, (row, at) in enumerate(zip(self.rows, columns, strict=True)):
                out[index][:, at] = getattr(row, name)[layer]
            return out

        first = tokens - (tokens if observed is None else observed)
        layers = tuple(
            LayerObservation(
                place("keys", layer, model.kv_heads),
                place("values", layer, model.kv_heads),
                place("queries", layer, model.query_heads)[:, :, first:],
            )
            for layer in range(model.layers)
        )
        valid, body = torch.zeros(batch, tokens, dtype=torch.bool), torch.zeros(batch, tokens, dtype=torch.bool)
        positions = torch.ones(batch, tokens, dtype=torch.int64)
        for index, (row, at) in enumerate(zip(self.rows, columns, strict=True)):
            valid[index, at] = True
            body[index, at] = row.body
            positions[index, at] = torch.arange(row.length)
        return Observation(layers, positions, valid, body, model)

    def left_padded(self, extra: int = 0, observed: int | None = None) -> tuple[Observation, list[Tensor]]:
        """All rows, ending in the last column; and the columns of each."""
        tokens = max(row.length for row in self.rows) + extra
        columns = [torch.arange(tokens - row.length, tokens) for row in self.rows]
        return self.observe(columns, tokens, observed), columns

    def scattered(self, seed: int) -> tuple[Observation, list[Tensor]]:
        """All rows, with padding anywhere; and the columns of each."""
        tokens = max(row.length for row in self.rows) + 5
        generator = torch.Generator().manual_seed(seed)
        columns = [torch.randperm(tokens, generator=generator)[: row.length].sort().values for row in self.rows]
        return self.observe(columns, tokens), columns

    def alone(self, index: int) -> Observation:
        """One row without padding."""
        only = Prompts(self.model, (self.rows[index],))
        return only.left_padded()[0]


@pytest.fixture(scope="session")
def make_prompts() -> Callable[..., Prompts]:
    return Prompts.make


@pytest.fixture(scope="session")
def whole() -> Callable[[Observation], Segments]:
    """The segmenter `whole` as a function."""
    return lambda observation: Segments(torch.zeros_like(observation.valid, dtype=torch.int32))
