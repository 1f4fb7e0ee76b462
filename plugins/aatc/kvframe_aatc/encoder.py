"""The encoder."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator
from torch import Tensor

from kvframe.calibration import CalibratedEncoder
from kvframe.errors import StageError
from kvframe.types import Encoded, Entries, ModelInfo, Needs, Observation
from kvframe_aatc import codec, codespace
from kvframe_aatc.allocation import layer_targets
from kvframe_aatc.moments import Moments
from kvframe_aatc.states import Group, LayerState, Spending, coder, lost, widths
from kvframe_aatc.tables import MAX_WIDTH, Choices, Tables, build

# The last queries of a prompt tell what the next ones will look at; all of them would take more room than the cache.
PROMPT_QUERIES = 256

log = logging.getLogger("kvframe")


class Transform(CalibratedEncoder):
    """Codes a decorrelated latent of keys and values, channel by channel, with as many bits as a channel is worth."""

    name: Literal["aatc.transform"] = "aatc.transform"
    paper: ClassVar[str] = "Laus et al., 2026, arXiv 2608.14191"
    block: ClassVar[int] = 32

    key_bits: float = Field(2.5, ge=0, le=16, description="Mean bits of a key's value.")
    value_bits: float = Field(2.5, ge=0, le=16, description="Mean bits of a value's value.")
    search: tuple[float, ...] = Field(
        (), description="Mean bits of keys and of values to choose among on each prompt, under a budget of bytes."
    )
    offers: tuple[float, ...] = Field(
        (), description="Mean bits of keys and of values among which an allocator chooses for each single entry."
    )
    key_shift: float = Field(0.25, description="Bits moved from each key's value to each value's value.")
    count_scales: bool = Field(True, description="Whether the means include the tokens' scales.")
    scale_bits: Literal[8, 16] = Field(16, description="Bits of a token's scale.")
    joint_heads: Literal["all"] | int = Field(
        "all", description="KV heads coded together: all of a layer, or this many. 1 if heads keep different tokens."
    )
    rope: Literal["pre", "post"] = Field(
        "pre", description="Code keys before RoPE, or as cached, so that queries can meet them in code space."
    )
    basis: Literal["pca", "query_weighted"] = Field("query_weighted", description="The keys' basis.")
    center_keys: bool = Field(True, description="Whether the keys' mean is taken off.")
    weights: Literal["attention", "none"] = Field(
        "attention", description="Weigh channels by queries and output projection, or by their variance alone."
    )
    query_rotation: Literal["averaged", "literal"] = Field(
        "averaged", description="Queries seen over all relative positions, or as they are before RoPE."
    )
    scope: Literal["global", "layer", "group"] = Field(
        "layer", description="Within what bits are shared out: the model, a layer, or a group of heads."
    )
    normalise: bool = Field(False, description="Divide energies and weights by their layer's 95th percentile.")
    protected_layers: int = Field(0, ge=0, description="First layers with the mean bits for values, one more for keys.")
    max_width: int = Field(16, ge=1, le=MAX_WIDTH, description="Most bits of a channel.")
    rd_model: Literal["high_rate", "empirical"] = Field(
        "empirical", description="Distortion by width: 2^-2b, or the hull of what was measured."
    )
    one_bit: Literal["paper", "symmetric"] = Field("symmetric", description="A single bit's levels: {-1, 0} or +-c.")
    key_code: Literal["max", "lloyd"] = Field("max", description="Uniform, max scale; or Lloyd-Max, rms scale.")
    value_code: Literal["max", "lloyd"] = Field("lloyd", description="As key_code; max from about 4 bits.")
    scale_over: Literal["coded", "all"] = Field("coded", description="Channels that a token's scale looks at.")

    @model_validator(mode="after")
    def _bits_fit(self) -> Transform:
        if isinstance(self.joint_heads, int) and self.joint_heads < 1:
            raise ValueError(f"joint_heads must be 'all' or at least 1, but is {self.joint_heads}")
        if self.search and self.offers:
            raise ValueError("search chooses one width for all entries, and offers one for each; give one of them")
        given = [("key_bits", self.means[0]), ("value_bits", self.means[1])]
        for name, listed in (("search", self.search), ("offers", self.offers)):
            for bits in listed:
                given += [(f"{bits:g} of {name}", mean) for mean in (bits - self.key_shift, bits + self.key_shift)]
        for name, mean in given:
            if not 0 <= mean <= self.max_width:
                raise ValueError(
                    f"{name} with key_shift {self.key_shift:g} makes a mean of {mean:g} bits, "
                    f"outside 0 to max_width {self.max_width}"
                )
        return self

    def widths(self) -> Sequence[Transform]:
        """See Encoder.widths: one encoder for each number in `search`."""
        return self._with(self.search) or [self]

    def grades(self) -> Sequence[Transform]:
        """See Encoder.grades: one encoder for each number in `offers`."""
        return self._with(self.offers) or [self]

    def _with(self, widths: Sequence[float]) -> Sequence[Transform]:
        """Encoders of these mean bits, the cheapest first."""
        plain = {"search": (), "offers": ()}
        return [self.model_copy(update={"key_bits": b, "value_bits": b, **plain}) for b in sorted(set(widths))]

    def error(self, state: LayerState) -> float:
        """See Encoder.error: the share of the logits' and of the outputs' energy that is lost, on average of both."""
        return state.error

    @property
    def means(self) -> tuple[float, float]:
        """Mean bits of keys and of values."""
        return self.key_bits - self.key_shift, self.value_bits + self.key_shift

    @property
    def needs(self) -> Needs:
        """Queries only if the encoder is fitted on the prompt."""
        return Needs(queries=PROMPT_QUERIES if self.calibration == "prompt" else 0)

    @property
    def joins_heads(self) -> int:
        """See Encoder.joins_heads."""
        return 0 if self.joint_heads == "all" else int(self.joint_heads)

    @property
    def uses_positions(self) -> bool:
        """Keys coded before RoPE must be rotated again."""
        return self.rope == "pre"

    @property
    def format(self) -> str:
        """Layout of the codes."""
        return f"aatc.{self.rope}"

    # --- what is learned
    # ------------------------------------------------------------------------------------------------

    def heads(self, model: ModelInfo) -> int:
        """KV heads coded together. Raises StageError if they do not divide the model's."""
        heads = self.joins_heads or model.kv_heads
        if model.kv_heads % heads:
            raise StageError(
                f"encoder '{self.name}' is to code {heads} KV heads jointly, but {model.name} has {model.kv_heads}; "
                "set encoder.joint_heads to a divisor of that."
            )
        return heads

    @property
    def calibration_needs(self) -> Needs:
        """Queries, for the channels' weights."""
        return Needs(queries="all")

    @property
    def learned_with(self) -> dict[str, Any]:
        """What the tables depend on: not the bits."""
        return {"joint_heads": self.joint_heads, "rope": self.rope, **asdict(self.choices)}

    def bind(self, model: ModelInfo) -> Sequence[LayerState] | None:
        """See CalibratedEncoder.bind. Raises StageError for heads or bits that do not suit the model."""
        self.bits_per_entry(model, 2)
        return super().bind(model)

    def learn(self, observations: Iterable[Observation], model: ModelInfo) -> dict[str, Tensor]:
        """The tables of a stream of observations. Observations without queries give every channel the same weight.
        Raises StageError if there is no token, or one that is not finite; logs a warning if there are fewer than
        channels."""
        moments = Moments(model, self.heads(model), self.rope == "pre")
        for observation in observations:
            moments.add(observation)
        if moments.tokens == 0:
            raise StageError(f"encoder '{self.name}' has no token to learn its transform from; give a longer prompt.")
        if (layer := moments.overflowed()) is not None:
            raise StageError(
                f"encoder '{self.name}' cannot learn: in layer {layer} keys, values or queries hold infinities or NaN; "
                "run the model in bfloat16 or float32 if it overflows in float16."
            )
        channels = moments.heads * model.head_dim
        if moments.tokens < channels:
            log.warning(
                "encoder '%s' learns %d channels from %d tokens, so some were never seen to move; give it at least %d.",
                *(self.name, channels, moments.tokens, 4 * channels),
            )
        return build(moments, self.choices).tensors()

    @property
    def choices(self) -> Choices:
        """What the tables depend on."""
        return Choices(**{name: getattr(self, name) for name in Choices.__dataclass_fields__})

    def states(self, learned: Mapping[str, Tensor], model: ModelInfo) -> tuple[LayerState, ...]:
        """One state a layer: the channels' widths for this encoder's bits, and all that coding needs."""
        tables = Tables.from_tensors(learned)
        heads = self.heads(model)
        counted = self.scale_bits if self.count_scales else 0
        wide = []
        for side, mean, raised in ((tables.keys, self.means[0], 1.0), (tables.values, self.means[1], 0.0)):
            spending = Spending(
                mean, raised, counted, self.scope, self.protected_layers, self.normalise, self.max_width, self.rd_model
            )
            wide.append(widths(side, spending))

        def group(layer: int, index: int) -> Group:
            sides = ((tables.keys, wide[0], self.key_code), (tables.values, wide[1], self.value_code))
            made = [
                coder(side, layer, index, w[layer, index], code, self.one_bit, self.scale_over, self.scale_bits)
                for side, w, code in sides
            ]
            return Group(*made)

        before, groups = self.rope == "pre", range(model.kv_heads // heads)
        error = (lost(tables.keys, wide[0]) + lost(tables.values, wide[1])) / 2
        return tuple(
            LayerState(
                tuple(group(layer, index) for index in groups),
                heads,
                model.rope[layer] if before else None,
                float(error[layer]),
            )
            for layer in range(model.layers)
        )

    # --- coding
    # ---------------------------------------------------------------------------------------------------------

    def encode(self, entries: Entries, state: LayerState) -> Encoded:
        """See Encoder.encode. Raises StageError for values that are not finite."""
        return codec.encode(entries, state, self.format)

    def decode(self, encoded: Encoded, state: LayerState) -> Entries:
        """See Encoder.decode."""
        longest = max((end - begin for begin, end in pairwise(encoded.bounds)), default=0)
        return next(codec.tiles(encoded, state, max(32, -(-longest // 32) * 32)))

    def tiles(self, encoded: Encoded, state: LayerState) -> Iterator[Entries]:
        """See Encoder.tiles."""
        return codec.tiles(encoded, state)

    def attend(
        self, query: Tensor, encoded: Encoded, state: LayerState, scale: float, impl: str
    ) -> tuple[Tensor, Tensor] | None:
        """See Encoder.attend: in code space, where keys coded before RoPE are rebuilt on the way (not in Triton)."""
        if state.rope is not None and impl == "triton":
            return None
        return codespace.attend(query, encoded, state.space, state.rope, scale, impl)

    def join(self, first: Encoded, second: Encoded, state: LayerState) -> Encoded | None:
        """See Encoder.join."""
        return codec.join(first, second, state)

    def select(self, encoded: Encoded, rows: Sequence[int], batch: int, state: LayerState) -> Encoded:
        """See Encoder.select."""
        return codec.select(encoded, rows, batch, state)

    def position_bits(self, model: ModelInfo) -> float:
        """See Encoder.position_bits: the distances of entries that do not follow each other, about one in four or eight
        tokens, shared by the heads that are coded together."""
        return 8.0 / self.heads(model)

    def bits_per_entry(self, model: ModelInfo, itemsize: int, state: LayerState | tuple[()] = ()) -> float:
        """Codes, scales and, before RoPE, one 32-bit position a block of 32 rows, shared out over the KV heads. For the
        distances of entries that do not follow each other see `position_bits`."""
        if state:
            return state.bits_per_row() / state.kv_heads
        heads = self.heads(model)
        groups = model.kv_heads // heads
        counted = self.scale_bits * groups if self.count_scales else 0
        bits = 2.0 * self.scale_bits * groups + (groups if self.rope == "pre" else 0)
        values = model.kv_heads * model.head_dim
        for mean, raised in zip(self.means, (1.0, 0.0), strict=True):
            targets = layer_targets(mean, raised, model.layers, self.protected_layers, values, counted)
            bits += sum(targets) / model.layers
        return bits / model.kv_heads
