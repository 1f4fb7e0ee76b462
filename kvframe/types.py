"""The data that passes between stages: frozen, and checked where it is made.

Letters: `B` batch, `L` compressed layers, `Hq` query heads, `H` KV heads, `G = Hq / H`, `T` observed tokens, `N`
entries over all (b, h) of one layer, `D` head dimension. Ragged data is packed rows plus `offsets [B*H+1]`, heads of
one batch row next to each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from kvframe.errors import StageError

if TYPE_CHECKING:
    from kvframe.rope import LayerRopes, Rope
    from kvframe.stages import Encoder

Amount = int | Literal["all"]


def check_shape(owner: str, name: str, tensor: Tensor, expected: tuple[int | None, ...]) -> None:
    """Raise StageError unless `tensor` has the expected shape; None stands for any size."""
    shape = tuple(tensor.shape)
    if len(shape) != len(expected) or any(e is not None and e != s for s, e in zip(shape, expected, strict=True)):
        wanted = ", ".join("any" if e is None else str(e) for e in expected)
        raise StageError(f"{owner}.{name} must have shape [{wanted}], but has {list(shape)}.")


def storage_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the distinct storages behind the tensors: what is really held, views and slack included."""
    seen: dict[int, int] = {}
    for tensor in tensors:
        if tensor is not None and tensor.numel() > 0:
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


@dataclass(frozen=True)
class Needs:
    """What a stage must be shown. `queries` and `head_outputs` count the last tokens ("all" for every token),
    `hidden_states` are relative depths in [0, 1) of the residual stream before a block's input norm."""

    queries: Amount = 0
    head_outputs: Amount = 0
    hidden_states: tuple[float, ...] = ()
    surprisal: bool = False

    def __or__(self, other: Needs) -> Needs:
        def larger(a: Amount, b: Amount) -> Amount:
            return "all" if "all" in (a, b) else max(int(a), int(b))

        return Needs(
            larger(self.queries, other.queries),
            larger(self.head_outputs, other.head_outputs),
            tuple(sorted({*self.hidden_states, *other.hidden_states})),
            self.surprisal or other.surprisal,
        )


def no_bias(layer: int) -> tuple[Tensor | None, Tensor | None]:
    """The biases of projections that have none."""
    return None, None


@dataclass(frozen=True, eq=False)
class ModelInfo:
    """What the stages may know of the model.

    Attributes:
        layers: `L`, the number of compressed layers; `layer_ids` are their indices in the model.
        query_heads, kv_heads, head_dim: `Hq`, `H`, `D`.
        scale: factor on q.k before the softmax.
        rope: rotation of this model's keys and queries; `rope[layer]` is that of a layer in 0..L-1, whether or not all
            rotate alike.
        output_weight: layer in 0..L-1 -> the output projection as [Hq, D, hidden].
        projection_bias: layer in 0..L-1 -> the biases `[H * D]` that keys (before RoPE) and values contain; None for
            one that does not exist, or is not plainly added.
        devices: where each of the compressed layers runs; () = all of them on one device. What the stages are given,
            and what `rope` and the weights are on, is the first one's.
        channel_order: int64 `[D]`, the model's channels in the order in which stages see those of keys and queries;
            None = its own. Of a model that rotates neighbouring channels together they see the half-split order.
        identify: gives `fingerprint`, which costs a look at the weights.
        read: lets the model read a text of kvframe's own, with what a stage needs observed; None where there is none.
    """

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | LayerRopes
    output_weight: Callable[[int], Tensor]
    layer_ids: tuple[int, ...]
    name: str = "model"
    projection_bias: Callable[[int], tuple[Tensor | None, Tensor | None]] = no_bias
    devices: tuple[torch.device, ...] = ()
    channel_order: Tensor | None = None
    identify: Callable[[], str] = str
    read: Callable[[Needs], Reading] | None = None

    def __post_init__(self) -> None:
        if self.query_heads % self.kv_heads:
            raise StageError(f"{self.query_heads} query heads cannot be shared out over {self.kv_heads} KV heads.")

    @cached_property
    def fingerprint(self) -> str:
        """Changes with the weights and the geometry, not with dtype or device; "" if unknown."""
        return self.identify()

    @property
    def group(self) -> int:
        """`G`, the query heads that share one KV head."""
        return self.query_heads // self.kv_heads


@dataclass(frozen=True, eq=False)
class LayerObservation:
    """Keys (after RoPE) and values `[B, H, T, D]` of one layer; `queries` (after RoPE) and `head_outputs` (before the
    output projection) `[B, Hq, Tq, D]` belong to the last `Tq <= T` tokens."""

    keys: Tensor
    values: Tensor
    queries: Tensor | None = None
    head_outputs: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Observation:
    """What one forward pass showed.

    Attributes:
        layers: one LayerObservation per compressed layer.
        positions: int64 `[B, T]`, the RoPE positions of the tokens.
        valid: bool `[B, T]`, False where a token is padding.
        body: bool `[B, T]`, the tokens that the allocator decides on; core keeps the other valid ones exactly.
        model: geometry, RoPE and weights.
        hidden_states: depth -> `[B, T, hidden]`, the depths that some stage needs.
        surprisal: fp32 `[B, T]` in nats, -log p(token | tokens before it); 0 for the first token.
        suffix: bool `[B, T]`, the question, if one was given.
    """

    layers: tuple[LayerObservation, ...]
    positions: Tensor
    valid: Tensor
    body: Tensor
    model: ModelInfo
    hidden_states: Mapping[float, Tensor] = field(default_factory=dict)
    surprisal: Tensor | None = None
    suffix: Tensor | None = None

    def __post_init__(self) -> None:
        if len(self.layers) != self.model.layers:
            raise StageError(
                f"Observation has {len(self.layers)} layers, but the model compresses {self.model.layers}."
            )
        batch, tokens = self.valid.shape
        for name in ("positions", "body"):
            check_shape("Observation", name, getattr(self, name), (batch, tokens))
        for index, layer in enumerate(self.layers):
            shape = (batch, self.model.kv_heads, tokens, self.model.head_dim)
            check_shape(f"Observation.layers[{index}]", "keys", layer.keys, shape)
            check_shape(f"Observation.layers[{index}]", "values", layer.values, shape)
            for name in ("queries", "head_outputs"):
                if (tensor := getattr(layer, name)) is not None:
                    expected = (batch, self.model.query_heads, None, self.model.head_dim)
                    check_shape(f"Observation.layers[{index}]", name, tensor, expected)
        for depth, states in self.hidden_states.items():
            check_shape("Observation", f"hidden_states[{depth}]", states, (batch, tokens, None))
        for name in ("surprisal", "suffix"):
            if (tensor := getattr(self, name)) is not None:
                check_shape("Observation", name, tensor, (batch, tokens))
        if bool((self.body & ~self.valid).any()):
            raise StageError("Observation.body must be False wherever Observation.valid is False.")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """`(L, B, H, T)`, the shape of scores."""
        return (self.model.layers, self.valid.shape[0], self.model.kv_heads, self.valid.shape[1])


@dataclass(frozen=True, eq=False)
class Reading:
    """A model reading a text: `observations` come as they are asked for; `text` is the text's hash, `title` what to
    call it, `tokens` how many there will be."""

    observations: Iterable[Observation]
    text: str
    title: str
    tokens: int


@dataclass(frozen=True, eq=False)
class Segments:
    """A partition of the tokens: `ids` int32 `[B, T]` never decreases and grows by at most one from token to token.
    `boundary` fp32 `[B, T]` is the strength of the cut before each token, if the segmenter has one."""

    ids: Tensor
    boundary: Tensor | None = None

    def __post_init__(self) -> None:
        steps = self.ids.diff(dim=1)
        if self.ids.ndim != 2 or bool((steps < 0).any()) or bool((steps > 1).any()) or bool((self.ids < 0).any()):
            raise StageError("Segments.ids must be [B, T], not negative, and grow by 0 or 1 from token to token.")


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """Which token goes to which entry, for one layer.

    Attributes:
        assignment: int32 `[B, H, T]`, the entry of each token within its (b, h), counted from 0; -1 = dropped.
        n_entries: int64 `[B, H]`.
        key_weight, value_weight: fp32 `[B, H, T]`, >= 0, summing to 1 over each entry; None = plain mean.
        multiplicity: fp32 `[N]`, between 1 and the group's size; None = the group's size.
        positions: int32 `[N]`; None = rounded mean of the tokens' positions.
        align_rope: pool keys before RoPE and rotate them to the entry's position; else pool them as cached.
        grade: int64 `[N]`, which of the encoder's `Grades` each entry is coded with; None = it has only one.
    """

    assignment: Tensor
    n_entries: Tensor
    key_weight: Tensor | None = None
    value_weight: Tensor | None = None
    multiplicity: Tensor | None = None
    positions: Tensor | None = None
    align_rope: bool = True
    grade: Tensor | None = None

    @classmethod
    def keep(cls, kept: Tensor) -> LayerPlan:
        """The plan that keeps the tokens where `kept` (bool `[B, H, T]`) is True, each as an entry of its own."""
        order = kept.cumsum(-1, dtype=torch.int32) - 1
        return cls(torch.where(kept, order, order.new_tensor(-1)), kept.sum(-1))

    @classmethod
    def graded(cls, grade: Tensor) -> LayerPlan:
        """The plan that codes each token with its grade (int64 `[B, H, T]`), as an entry of its own; -1 = dropped."""
        return replace(cls.keep(grade >= 0), grade=grade[grade >= 0])


@dataclass(frozen=True, eq=False)
class Plan:
    """One LayerPlan per compressed layer. `notes` are sentences for the user, said once in the cache's report."""

    layers: tuple[LayerPlan, ...]
    notes: tuple[str, ...] = ()

    def ungraded(self) -> Plan:
        """The same for an encoder that has one grade only."""
        return replace(self, layers=tuple(replace(layer, grade=None) for layer in self.layers))


@dataclass(frozen=True, eq=False)
class Grades:
    """What an encoder offers for single entries, from the cheapest on.

    Attributes:
        price: bits of an entry, as a share of the dearest's: the last is 1. A budget of entries counts these.
        error: fp32 `[L, G]`, the share (0 to 1) of what an entry says that coding it loses.
        block: rows of a head and grade that are coded together; the last block costs as much as a full one.
    """

    price: tuple[float, ...]
    error: Tensor
    block: int = 1

    def __post_init__(self) -> None:
        check_shape("Grades", "error", self.error, (None, len(self.price)))

    @classmethod
    def single(cls, observation: Observation) -> Grades:
        """The only grade of an encoder without several."""
        return cls((1.0,), torch.zeros(len(observation.layers), 1, device=observation.valid.device))

    def cost(self, plan: LayerPlan) -> Tensor:
        """What a layer's entries cost, fp64 `[B]`, in entries of the dearest grade."""
        if plan.grade is None:
            return plan.n_entries.sum(-1).double()
        batch, heads = plan.n_entries.shape
        pair = torch.arange(batch * heads, device=plan.grade.device).repeat_interleave(plan.n_entries.flatten())
        places = pair * len(self.price) + plan.grade
        count = torch.bincount(places, minlength=batch * heads * len(self.price)).view(batch, heads, -1)
        price = torch.tensor(self.price, dtype=torch.float64, device=count.device)
        return (-(-count // self.block) * self.block * price).sum((1, 2))


@dataclass(frozen=True, eq=False)
class Regrouping:
    """Which entries of one layer join, when a body is grouped again.

    Attributes:
        joins: int64 `[N]`, the new entry of each old one within its (b, h), counted from 0; -1 = dropped.
        n_entries: int64 `[B, H]`, new entries.
        align_rope: average keys before RoPE and rotate them to the new entry's position; else average them as held.
    """

    joins: Tensor
    n_entries: Tensor
    align_rope: bool = True


@dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of all (b, h) behind each other; those of pair `i` are `offsets[i]:offsets[i+1]` (int64 `[B*H+1]`)."""

    offsets: Tensor

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """The offsets as Python integers, so that a decode step needs no transfer from the device."""
        return tuple(self.offsets.tolist())

    @cached_property
    def uniform(self) -> int | None:
        """The number of rows of every (b, h) if they all have equally many, else None."""
        lengths = {end - begin for begin, end in zip(self.bounds, self.bounds[1:], strict=False)}
        return lengths.pop() if len(lengths) == 1 else None


@dataclass(frozen=True, eq=False)
class Entries(Ragged):
    """Keys (after RoPE) and values `[N, D]`, `log_multiplicity` fp32 `[N]` (None = all 1), `positions` int32 `[N]`
    (None = not needed any more)."""

    keys: Tensor
    values: Tensor
    log_multiplicity: Tensor | None = None
    positions: Tensor | None = None

    def __post_init__(self) -> None:
        check_shape("Entries", "values", self.values, tuple(self.keys.shape))
        for name in ("log_multiplicity", "positions"):
            if (tensor := getattr(self, name)) is not None:
                check_shape("Entries", name, tensor, (self.keys.shape[0],))


@dataclass(frozen=True, eq=False)
class Encoded(Ragged):
    """What is held of the entries. `codes` are the encoder's tensors; `dtype` is what decoding gives back; `format`
    names the layout for kernels. Nothing else is kept, so `nbytes` is the whole cost."""

    codes: Mapping[str, Tensor]
    format: str
    dtype: torch.dtype
    log_multiplicity: Tensor | None = None
    positions: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """All tensors held."""
        extra = [t for t in (self.log_multiplicity, self.positions) if t is not None]
        return [*self.codes.values(), *extra, self.offsets]

    def pick(self, rows: Sequence[int], batch: int, codes: Mapping[str, Tensor] | None = None) -> Encoded:
        """These of the `batch` rows, in this order; a row may come twice. `codes` are those that were picked already;
        without them, all codes must be `[N, …]`, one row an entry."""
        heads = (len(self.bounds) - 1) // batch
        spans = [slice(self.bounds[row * heads], self.bounds[(row + 1) * heads]) for row in rows]
        counts = self.offsets.diff().view(batch, heads)[list(rows)].flatten()

        def pick(tensor: Tensor) -> Tensor:
            return torch.cat([tensor[span] for span in spans])

        return replace(
            self,
            offsets=torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
            codes={name: pick(tensor) for name, tensor in self.codes.items()} if codes is None else codes,
            log_multiplicity=None if self.log_multiplicity is None else pick(self.log_multiplicity),
            positions=None if self.positions is None else pick(self.positions),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the storages held."""
        return storage_bytes(self.tensors())


@dataclass(frozen=True, eq=False)
class Part:
    """One region of one layer that a kernel attends: codes, the encoder that made them and what it had learned."""

    encoded: Encoded
    encoder: Encoder
    state: Any = ()

    def decode(self) -> Entries:
        """The entries, rebuilt; those of an encoder that gives views are made once."""
        return self._views if self.encoder.views else self.encoder.decode(self.encoded, self.state)

    def tiles(self) -> Iterator[Entries]:
        """The entries, rebuilt piece by piece."""
        return iter((self._views,)) if self.encoder.views else self.encoder.tiles(self.encoded, self.state)

    @cached_property
    def _views(self) -> Entries:
        return self.encoder.decode(self.encoded, self.state)
