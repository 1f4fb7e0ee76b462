"""Random prompts that a few small numbers describe, so that a failing case can be printed and made again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from kvframe.rope import Rope, of_layers
from kvframe.types import LayerObservation, ModelInfo, Needs, Observation

Content = Literal["random", "constant", "zero", "tiny", "huge"]
HIDDEN = 12  # width of the residual stream
# Halfway to the largest fp16 (65504), so that a coder whose error is below the signal cannot overflow.
HUGE = 3e4
TINY = 1e-6


@dataclass(frozen=True)
class Geometry:
    """A model's shape without a model: `L`, `H`, `G = Hq / H`, `D`, how many of the `D` channels RoPE turns, and the
    layers (0 to L-1) where it turns none. The angles fall from 1 towards 1 / `theta`. Two channels of each key, those
    that RoPE turns least, contain `bias` and -0.7 of it, as trained models have it, and one of each value `bias`."""

    layers: int = 1
    kv_heads: int = 1
    group: int = 1
    head_dim: int = 8
    rotary: int | None = None
    still: tuple[int, ...] = ()
    theta: float = 100.0
    bias: float = 0.0

    @cached_property
    def biases(self) -> tuple[Tensor | None, Tensor | None]:
        """The biases `[H * D]` of keys and values; None for none."""
        if not self.bias:
            return None, None
        keys, values = torch.zeros(2, self.kv_heads, self.head_dim)
        turned = (self.head_dim if self.rotary is None else self.rotary) // 2
        keys[:, turned - 1], keys[:, 2 * turned - 1], values[:, 0] = -0.7 * self.bias, self.bias, self.bias
        return keys.flatten(), values.flatten()

    @cached_property
    def model(self) -> ModelInfo:
        """The ModelInfo, with random output weights."""
        rotary = self.head_dim if self.rotary is None else self.rotary
        turned = Rope(self.theta ** (-torch.arange(0, rotary, 2) / max(1, rotary)))
        still = Rope(torch.empty(0))
        rope = of_layers([still if layer in self.still else turned for layer in range(self.layers)])

        def output_weight(layer: int) -> Tensor:
            generator = torch.Generator().manual_seed(layer)
            return torch.randn(self.kv_heads * self.group, self.head_dim, HIDDEN, generator=generator)

        heads, layers = self.kv_heads, tuple(range(self.layers))
        return ModelInfo(
            *(self.layers, heads * self.group, heads, self.head_dim, self.head_dim**-0.5, rope, output_weight, layers),
            projection_bias=lambda layer: self.biases,
        )

    def __repr__(self) -> str:
        return _short(self)


@dataclass(frozen=True)
class Layout:
    """How rows are put into one batch: columns of padding added at both sides, and the seed of what stands there."""

    left: int = 0
    right: int = 0
    noise: int = 0


PLAIN = Layout()


@dataclass(frozen=True)
class Prompts:
    """Prompts of these lengths. Equal numbers make equal prompts; a row does not depend on the others.

    Attributes:
        lengths: valid tokens of each row; shorter rows are padded at the left.
        seed: what everything is drawn from.
        geometry: the model's shape.
        dtype: of keys, values, queries, head outputs and hidden states.
        content: "random" values of order 1, or all "constant", "zero", "tiny" (1e-6), "huge" (3e4).
        sink, recent, suffix: first and last tokens that are not body; the suffix stands behind the recent ones.
        start: position of the first token.
        rows: the number that each row is drawn from; None = 0, 1, …
    """

    lengths: tuple[int, ...] = (1,)
    seed: int = 0
    geometry: Geometry = field(default_factory=Geometry)
    dtype: torch.dtype = torch.float32
    content: Content = "random"
    sink: int = 0
    recent: int = 0
    suffix: int = 0
    start: int = 0
    rows: tuple[int, ...] | None = None

    def __repr__(self) -> str:
        return _short(self)

    @property
    def model(self) -> ModelInfo:
        """The model that they are prompts of."""
        return self.geometry.model

    @property
    def body(self) -> tuple[int, ...]:
        """Body tokens of each row."""
        return tuple(max(0, n - self.sink - self.recent - self.suffix) for n in self.lengths)

    def alone(self, row: int) -> Prompts:
        """One of the rows by itself."""
        return replace(self, lengths=(self.lengths[row],), rows=(self._number(row),))

    def _number(self, row: int) -> int:
        return row if self.rows is None else self.rows[row]

    def draw(self, row: int, what: str, *shape: int) -> Tensor:
        """Values of order 1, fp32 `[..., n, D]`, for one row; `what` tells the draws of a row apart. Each head has its
        own centre and size: real keys are neither centred nor alike."""
        salt = sum(ord(letter) * 31**place for place, letter in enumerate(what)) % 10007
        generator = torch.Generator().manual_seed((self.seed * 1009 + self._number(row)) * 10007 + salt)
        centre = torch.randn(*shape[:-2], 1, shape[-1], generator=generator)
        size = torch.rand(*shape[:-2], 1, 1, generator=generator) + 0.2
        return (torch.randn(shape, generator=generator) + centre) * size

    def _filled(self, row: int, what: str, *shape: int) -> Tensor:
        drawn = self.draw(row, what, *shape)
        if self.content == "constant":
            drawn = torch.ones_like(drawn)
        elif self.content == "zero":
            drawn = torch.zeros_like(drawn)
        elif self.content == "tiny":
            drawn = drawn * TINY
        elif self.content == "huge":
            drawn = drawn.sign() * HUGE
        return drawn.to(self.dtype)

    def _biased(self, what: str, rows: Tensor) -> Tensor:
        """Keys or values `[L, H, n, D]` with what the projections add, which RoPE turns in keys; other rows as they
        are."""
        added = dict(zip(("keys", "values"), self.geometry.biases, strict=True)).get(what)
        if added is None:
            return rows
        added, at = added.view(self.geometry.kv_heads, 1, -1), torch.arange(rows.shape[2]) + self.start
        turned = [self.model.rope[layer].rotate(added, at) if what == "keys" else added for layer in range(len(rows))]
        return torch.stack([(one.float() + more).to(rows.dtype) for one, more in zip(rows, turned, strict=True)])

    def columns(self, row: int, layout: Layout = PLAIN) -> slice:
        """Where the row stands in the batch."""
        end = layout.left + max(self.lengths)
        return slice(end - self.lengths[row], end)

    def place(self, rows: list[Tensor], layout: Layout, filling: Any = 0) -> Tensor:
        """Put one tensor a row, `[..., n, C]` or `[n]`, into `[B, ..., T, C]` or `[B, T]`. `filling` None = noise."""
        tokens, dim = layout.left + max(self.lengths) + layout.right, -2 if rows[0].ndim > 1 else -1
        shape = [len(rows), *rows[0].shape]
        shape[dim] = tokens
        if filling is None:
            generator = torch.Generator().manual_seed(layout.noise)
            out = (torch.randn(shape, generator=generator) * 10).to(rows[0].dtype)
        else:
            out = torch.full(shape, filling, dtype=rows[0].dtype)
        for row, tensor in enumerate(rows):
            at = self.columns(row, layout)
            out[row].narrow(dim, at.start, self.lengths[row]).copy_(tensor)
        return out

    def observation(self, needs: Needs | None = None, layout: Layout = PLAIN) -> Observation:
        """What a forward pass over the prompts shows, cut down to `needs`; None = everything there is."""
        batch, model, geometry = range(len(self.lengths)), self.model, self.geometry
        tokens = layout.left + max(self.lengths) + layout.right

        def per_layer(what: str, heads: int, amount: int | str = "all") -> list[Tensor]:
            made = [self._filled(r, what, geometry.layers, heads, self.lengths[r], geometry.head_dim) for r in batch]
            made = [self._biased(what, rows) for rows in made]
            out = self.place(made, layout, None)  # [B, L, heads, T, D]
            seen = tokens if amount == "all" else min(tokens, int(amount) + layout.right)
            return [out[:, layer, :, tokens - seen :].contiguous() for layer in range(geometry.layers)]

        keys, values = per_layer("keys", model.kv_heads), per_layer("values", model.kv_heads)
        absent = [None] * geometry.layers
        queries: Any = absent
        outputs: Any = absent
        if needs is None or needs.queries:
            queries = per_layer("queries", model.query_heads, needs.queries if needs else "all")
        if needs is None or needs.head_outputs:
            outputs = per_layer("outputs", model.query_heads, needs.head_outputs if needs else "all")
        order = [torch.arange(n) for n in self.lengths]
        body = [
            (t >= self.sink) & (t < n - self.recent - self.suffix) for t, n in zip(order, self.lengths, strict=True)
        ]
        suffix = [t >= n - self.suffix for t, n in zip(order, self.lengths, strict=True)]
        hidden: Mapping[float, Tensor] = {
            depth: self.place([self._filled(r, f"hidden{depth}", self.lengths[r], HIDDEN) for r in batch], layout, None)
            for depth in ((0.0, 0.5) if needs is None else needs.hidden_states)
        }
        surprisal = None
        if needs is None or needs.surprisal:
            nats = [self.draw(r, "surprisal", self.lengths[r], 1)[:, 0].abs() for r in batch]
            surprisal = self.place([torch.cat([n[:1] * 0, n[1:]]) for n in nats], layout, 5.0)
        return Observation(
            layers=tuple(map(LayerObservation, keys, values, queries, outputs)),
            positions=self.place([t + self.start for t in order], layout, 1),
            valid=self.place([torch.ones(n, dtype=torch.bool) for n in self.lengths], layout, False),
            body=self.place(body, layout, False),
            model=model,
            hidden_states=hidden,
            surprisal=surprisal,
            suffix=self.place(suffix, layout, False),
        )


def _short(record: Any) -> str:
    """The fields that differ from their defaults, as Python that makes the record again."""
    default = type(record)()
    given = [f.name for f in fields(record) if getattr(record, f.name) != getattr(default, f.name)]
    return f"{type(record).__name__}({', '.join(f'{name}={getattr(record, name)!r}' for name in given)})"
