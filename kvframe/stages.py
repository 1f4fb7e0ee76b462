"""The five stage kinds. A stage is one frozen pydantic class: its fields are the parameters that a spec sets, its one
or two pure methods are the behaviour. A plugin subclasses one of these, gives it a `name` and writes the method:

    class LastTokens(Scorer):
        \"\"\"Newer tokens score higher.\"\"\"

        name: Literal["my_plugin.last_tokens"] = "my_plugin.last_tokens"

        def score(self, observation: Observation, segments: Segments) -> Tensor:
            return torch.arange(observation.shape[-1], dtype=torch.float32).expand(observation.shape)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict
from torch import Tensor

from kvframe.errors import StageError
from kvframe.ragged import join_rows
from kvframe.types import Encoded, Entries, Grades, ModelInfo, Needs, Observation, Part, Plan, Regrouping, Segments


class Stage(BaseModel, ABC):
    """Base of all stages.

    Class variables:
        kind: the field of a spec that takes this stage.
        paper: where the method comes from, for `kvframe list` ("Author et al., year, arXiv number"); "" for none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: ClassVar[str] = ""
    paper: ClassVar[str] = ""

    name: str

    @property
    def needs(self) -> Needs:
        """What must be observed for this stage. Default: keys and values only, which are always there."""
        return Needs()

    def bind(self, model: ModelInfo) -> Any:
        """Called once for a cache, before the prefill, with the model that is to be compressed. A stage that cannot
        serve it, or whose artefact is missing or foreign, raises a KvframeError here, so that nothing fails in the
        middle of a generation. What an encoder returns is handed to its `fit`."""
        return None


class Segmenter(Stage):
    """Cuts the tokens into contiguous segments."""

    kind: ClassVar[str] = "segmenter"

    @abstractmethod
    def segment(self, observation: Observation) -> Segments:
        """Return the segment of each token, `ids [B, T]`."""


class Scorer(Stage):
    """Says how much each token matters."""

    kind: ClassVar[str] = "scorer"

    @abstractmethod
    def score(self, observation: Observation, segments: Segments) -> Tensor:
        """Return fp32 scores `[L, B, H, T]`, finite, >= 0, higher = keep. What stands at tokens outside
        `observation.body` is never read."""


class Allocator(Stage):
    """Spends the budget: decides which tokens become which entries.

    Class variables (the defaults cost speed or refuse, never correctness):
        ragged: the heads of one layer may get different numbers of entries or different tokens.
        merges: an entry may stand for several tokens.
        streams: may run again on each block of tokens that leaves the recent window while decoding.
        keeps_all: ignores the budget and keeps every token.
        chooses_grades: may code each entry with a grade of its own, by `allocate_graded`.
    """

    kind: ClassVar[str] = "allocator"
    ragged: ClassVar[bool] = True
    merges: ClassVar[bool] = True
    streams: ClassVar[bool] = False
    keeps_all: ClassVar[bool] = False
    chooses_grades: ClassVar[bool] = False

    @property
    def agrees(self) -> bool:
        """Whether all heads of a layer get the same tokens, so that they can be coded together. Default: if it is not
        ragged."""
        return not self.ragged

    @abstractmethod
    def allocate(self, observation: Observation, segments: Segments, scores: Tensor, budget: Tensor) -> Plan:
        """Return the plan. `scores` are `[L, B, H, T]` with 0 outside the body; `budget` int64 `[B]` is the number of
        entries that each batch row may have over all layers and heads. Only tokens of `observation.body` may be
        assigned: core keeps the protected ones itself."""

    def allocate_graded(
        self, observation: Observation, segments: Segments, scores: Tensor, budget: Tensor, grades: Grades
    ) -> Plan:
        """As `allocate`, for an encoder that offers several grades: every LayerPlan says the `grade` of its entries.
        `budget` counts entries of the dearest grade; what a plan costs is `Grades.cost`."""
        raise NotImplementedError(f"{self.name} says that it chooses grades, but has no method allocate_graded")

    @property
    def regroups(self) -> bool:
        """Whether the body is brought back within its budget by `regroup` after each later block or prompt. Those then
        join it with as many entries as fit, and positions are held. Default: blocks are compressed once."""
        return False

    def regroup(self, body: Sequence[Entries], model: ModelInfo, budget: Tensor) -> Sequence[Regrouping]:
        """Return which entries join, one Regrouping a layer, so that at most `budget` int64 `[B]` are left over all
        layers and heads. `body` are the entries of each layer, decoded, with multiplicities and positions."""
        raise NotImplementedError(f"{self.name} says that it regroups, but has no method regroup")


class Encoder(Stage):
    """Maps entries to codes and back.

    Class variables:
        views: decoding gives back the tensors that are held, at no cost.
        block: rows coded together; 1 = row by row.
    """

    kind: ClassVar[str] = "encoder"
    block: ClassVar[int] = 1
    views: ClassVar[bool] = False

    @property
    def uses_positions(self) -> bool:
        """Whether decoding needs the entries' positions, so that they must be held."""
        return False

    def holds_positions(self, model: ModelInfo) -> bool:
        """Whether positions must be held for this model. Default: `uses_positions`, whatever the model."""
        return self.uses_positions

    def position_bits(self, model: ModelInfo) -> float:
        """Declared bits of an entry's position where positions must be held. Default: 32; fewer for an encoder that
        packs them among its codes."""
        return 32.0

    def widths(self) -> Sequence[Encoder]:
        """The encoders to choose among where the spec leaves the width open: this one with different bits. Under a
        budget of bytes core tries each on the prompt and keeps the one that attention errs least with. Default: this
        one."""
        return (self,)

    def grades(self) -> Sequence[Encoder]:
        """The encoders among which an allocator may choose for each single entry: this one with different bits, the
        cheapest first. Entries of one grade are coded together, and apart from the others. Default: this one."""
        return (self,)

    def error(self, state: Any) -> float:
        """The share (0 to 1) of what an entry says to attention that coding it loses, by which an allocator weighs a
        grade against dropping the entry. Needed of an encoder with several grades. Default: 0."""
        return 0.0

    @property
    def joins_heads(self) -> int:
        """KV heads coded together: 1 = each by itself, 0 = all of a layer."""
        return 1

    def fit(self, observation: Observation, bound: Any = None) -> Sequence[Any]:
        """Return what is learned from the observation, or taken from `bound` (what `bind` returned), one state per
        layer. Called at a cache's first compression; later blocks are coded with the same states. Default: nothing."""
        return [()] * len(observation.layers)

    @abstractmethod
    def encode(self, entries: Entries, state: Any) -> Encoded:
        """Return the codes of one layer's entries. Multiplicities are carried as they come; so are positions, unless
        they are held among the codes, from which `decode` gives them back."""

    @abstractmethod
    def decode(self, encoded: Encoded, state: Any) -> Entries:
        """Return the entries again, in the dtype they came in."""

    def tiles(self, encoded: Encoded, state: Any) -> Iterator[Entries]:
        """Yield the entries piece by piece, each piece ragged over all (b, h): their union, in any order, is what
        `decode` gives. A kernel that attends tiles never rebuilds the whole cache. Default: one piece."""
        yield self.decode(encoded, state)

    def join(self, first: Encoded, second: Encoded, state: Any) -> Encoded | None:
        """Return the codes of `first` followed by those of `second` in each (b, h), both made with `state`, or None if
        they must stay apart. Default: joined row by row if every code has one row an entry (`block` 1)."""
        return join_rows(first, second) if self.block == 1 else None

    def select(self, encoded: Encoded, rows: Sequence[int], batch: int, state: Any) -> Encoded:
        """Return the codes of these of the `batch` rows, in this order; a row may come twice. Beam search and batches
        that are split need it. Nothing is coded anew. Default: row by row (`block` 1).

        Raises StageError if the encoder cannot do it."""
        if self.block != 1:
            raise StageError(
                f"encoder '{self.name}' codes {self.block} rows together and does not say how batch rows are picked "
                "from its codes; give it a method select, or decode the batch as it is."
            )
        return encoded.pick(rows, batch)

    def attend(
        self,
        query: Tensor,
        encoded: Encoded,
        state: Any,
        scale: float,
        impl: str,
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """Attend the codes where they lie; contract as `Kernel.attend`. `impl` says with what: "cpu" (numba, on a CPU)
        or "triton". Return None where there is no such way: entries are then decoded and attended, unless the kernel
        was asked for by name. So they are if a model caps its logits and this method has no argument `softcap`, which
        is passed for such a model only. Raise InputError for what this way cannot take. Default: None."""
        return None

    @abstractmethod
    def bits_per_entry(self, model: ModelInfo, itemsize: int, state: Any = ()) -> float:
        """Declared bits that one entry costs (key, value and what belongs to them, without multiplicity), for a model
        whose keys take `itemsize` bytes a value. The conformance kit holds this against the bytes held."""


class Kernel(Stage):
    """Attends one part of the cache.

    Class variables:
        any_format: attends what any encoder holds; else only formats that it has a way for, and refuses others.
    """

    kind: ClassVar[str] = "attention"
    any_format: ClassVar[bool] = True

    @abstractmethod
    def attend(self, query: Tensor, part: Part, scale: float, softcap: float | None = None) -> tuple[Tensor, Tensor]:
        """Return `(out [B, Hq, Q, D], lse [B, Hq, Q])`, both fp32, for `query [B, Hq, Q, D]`: the softmax of
        `q.k * scale + log multiplicity` over each head's entries, applied to the values, and its log-sum-exp (nats).
        A head without entries gives out 0 and lse -inf. No entry is masked: all came before the query.

        A model that caps its logits passes `softcap`: `q.k * scale` becomes `softcap * tanh(q.k * scale / softcap)`
        before log multiplicities are added. It is passed for such a model only; a kernel without this argument is
        refused there, and works everywhere else. What a sink adds to the sum of exponentials is core's to merge."""


KINDS: tuple[type[Stage], ...] = (Segmenter, Scorer, Allocator, Encoder, Kernel)
