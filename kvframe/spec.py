"""Pipeline specs: pydantic models whose stage fields are unions over all registered stages, read from YAML."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache, reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    model_validator,
)

from kvframe.errors import SpecError
from kvframe.grading import offered
from kvframe.mistakes import BYTES, MOST_TOKENS, explain, misread
from kvframe.registry import Registry, registry
from kvframe.specfile import read_spec_data
from kvframe.stages import Allocator, Encoder, Kernel, Scorer, Segmenter

MOST_BYTES = 1 << 50
SIZE = r"^\s*\d*\.?\d+\s*([kKmMgGtTpPeE]?[iI]?[bB]([iI][tT])?)?\s*$"


def _whole_size(value: Any) -> Any:
    # pydantic reads the beginning of "64,000" and is content.
    if isinstance(value, str) and not re.match(SIZE, value):
        raise ValueError(f"must be {BYTES}, but it is {value!r}")
    return value


class Budget(BaseModel):
    """How much may be held of the context; exactly one of ratio, entries and bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ratio: float | None = Field(
        None, ge=1, allow_inf_nan=False, description="Context entries / kept entries, or bytes / held bytes (`of`)."
    )
    of: Literal["entries", "bytes"] = Field(
        "entries",
        description="What the ratio is of: entries, or the bytes that the context takes in the model's dtype; the "
        "encoder's declared bits say how many entries that buys.",
    )
    entries: int | None = Field(
        None, ge=1, le=MOST_TOKENS, description="Entries per KV head, on average, the protected ones included."
    )
    bytes: Annotated[ByteSize, BeforeValidator(_whole_size)] | None = Field(
        None, ge=1, le=MOST_BYTES, description='Bytes for one sequence over all layers, e.g. "64MiB".'
    )
    strict: bool = Field(
        False,
        description="Whether a row whose protected tokens cost more than its budget is an error; false = they are "
        "kept, and nothing else of it.",
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> Budget:
        given = [name for name in ("ratio", "entries", "bytes") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of ratio, entries and bytes, not {' and '.join(given) or 'none'}")
        if self.of == "bytes" and self.ratio is None:
            raise ValueError(f"of: bytes belongs to a ratio, but {given[0]} is given; leave one of them out")
        return self

    @property
    def asked_entries(self) -> str:
        """What a budget of entries asks for, in short: "4.00" times fewer, or "64 a head"; "" for one of bytes."""
        if not self.counts_entries:
            return ""
        return f"{self.ratio:.2f}" if self.entries is None else f"{self.entries} a head"

    @property
    def asked_bytes(self) -> str:
        """What a budget of bytes asks for, in short: "8" times fewer, or "64.0MiB"; "" for one of entries."""
        if self.counts_entries:
            return ""
        return f"{self.ratio:g}" if self.bytes is None else self.bytes.human_readable()

    @property
    def counts_entries(self) -> bool:
        """Whether the budget counts entries; else bytes."""
        return self.entries is not None or (self.ratio is not None and self.of == "entries")


class Protect(BaseModel):
    """Tokens that are kept exactly."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sink: int = Field(4, ge=0, le=MOST_TOKENS, description="First tokens of the prompt, charged to the budget.")
    recent: int = Field(32, ge=0, le=MOST_TOKENS, description="Last tokens of the context, charged to the budget.")
    recent_min: int | None = Field(
        None,
        ge=0,
        description="Let a small budget shorten the recent window, down to this many tokens, where that makes it fit; "
        "null = never.",
    )
    recent_share: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Share of a head's budget that a shortened window may take; it is shortened below 1.5 windows if "
        "this is less than 1.",
    )
    suffix: int = Field(
        0,
        ge=0,
        le=MOST_TOKENS,
        description="Last tokens of the prompt (the question), not charged; `suffix_length` overrides it.",
    )


class Decode(BaseModel):
    """What happens to tokens while the answer is written."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    flush: int | None = Field(
        None,
        ge=1,
        description="Compress this many tokens whenever the recent window holds as many too much; null = never.",
    )


class Prefill(BaseModel):
    """What happens while a prompt is read in chunks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    flush: int | None = Field(
        None,
        ge=1,
        description="Compress between two chunks of a prompt whenever this many tokens wait beyond the recent window; "
        "null = the whole prompt at its end.",
    )


class PipelineSpec(BaseModel):
    """One pipeline. The class that is really used, `spec_class()`, narrows the stage fields to the registered
    stages."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    description: str = Field("", description="One sentence for `kvframe list`.")
    budget: Budget = Budget(ratio=1)
    protect: Protect = Protect()
    segmenter: Segmenter
    scorer: Scorer
    allocator: Allocator
    encoder: Encoder
    attention: Kernel
    prefill: Prefill = Prefill()
    decode: Decode = Decode()

    @model_validator(mode="after")
    def _stages_fit(self) -> PipelineSpec:
        allocator, encoder = self.allocator, self.encoder
        if encoder.joins_heads != 1 and not allocator.agrees:
            joined = "all" if encoder.joins_heads == 0 else str(encoder.joins_heads)
            raise ValueError(
                f"encoder '{encoder.name}' codes {joined} KV heads jointly, but allocator '{allocator.name}' may keep "
                "different entries per head; set encoder.joint_heads: 1"
            )
        if self.decode.flush is not None and not allocator.streams:
            raise ValueError(
                f"allocator '{allocator.name}' cannot run on blocks while decoding, but decode.flush is "
                f"{self.decode.flush}; set decode.flush: null or choose an allocator that streams"
            )
        if self.prefill.flush is not None and (clash := self.whole_prompt_only()):
            raise ValueError(clash)
        if len(encoder.widths()) > 1 and (allocator.keeps_all or self.budget.counts_entries):
            raise ValueError(
                f"encoder '{encoder.name}' leaves its width open, which says how bytes are split between entries and "
                "bits, but the budget is not one of bytes; set budget: {ratio: 8, of: bytes}, or one width"
            )
        if len(offered(encoder)) > 1 and (not allocator.chooses_grades or self.budget.counts_entries):
            wrong = (
                "the budget is not one of bytes; set budget: {ratio: 8, of: bytes}"
                if allocator.chooses_grades
                else f"allocator '{allocator.name}' does not choose among them; choose one that does, such as 'graded'"
            )
            raise ValueError(
                f"encoder '{encoder.name}' offers several grades for each entry, but {wrong}, or one width"
            )
        if allocator.keeps_all and self.budget.ratio != 1:
            raise ValueError(
                f"allocator '{allocator.name}' keeps every entry, so the budget would be ignored; "
                "set budget: {ratio: 1} or choose another allocator"
            )
        return self

    def whole_prompt_only(self) -> str:
        """Why a prompt cannot be compressed chunk by chunk, in a sentence; "" if it can."""
        if not self.allocator.streams:
            return (
                f"allocator '{self.allocator.name}' plans over the whole prompt at once, so it cannot be compressed "
                "chunk by chunk; read the prompt whole (prefill.flush: null), or choose an allocator that streams"
            )
        if self.budget.ratio is None:
            return (
                "budget is given for the whole prompt, so a chunk's share of it is not known; give budget.ratio, or "
                "read the prompt whole (prefill.flush: null)"
            )
        return ""

    def dump(self) -> dict[str, Any]:
        """Plain data that validates to an equal spec."""
        return self.model_dump(mode="json")

    @property
    def fingerprint(self) -> str:
        """12 hexadecimal digits that change when anything but the description does."""
        data = {key: value for key, value in self.dump().items() if key != "description"}
        # What was measured before a field came is still found: an empty list says nothing, nor does a ratio of entries.
        data = {key: _without_empty(value) for key, value in data.items()}
        if self.budget.of == "entries":
            data["budget"].pop("of")
        if not self.budget.strict:
            data["budget"].pop("strict")
        if self.prefill.flush is None:
            data.pop("prefill")
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:12]


def _without_empty(value: Any) -> Any:
    return {key: inner for key, inner in value.items() if inner != []} if isinstance(value, dict) else value


STAGE_DEFAULTS = {
    "segmenter": "whole",
    "scorer": "uniform",
    "allocator": "top_k",
    "encoder": "dense",
    "attention": "auto",
}


def _from_name(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def make_spec_class(known: Registry) -> type[PipelineSpec]:
    """The spec model whose stage fields are discriminated unions over the stages of `known`."""
    fields: dict[str, Any] = {}
    for kind, classes in known.stages.items():
        union = reduce(or_, classes.values())
        tagged: Any = Annotated[union, Field(discriminator="name")] if len(classes) > 1 else union
        fields[kind] = (
            Annotated[tagged, BeforeValidator(_from_name)],
            Field({"name": STAGE_DEFAULTS[kind]}, validate_default=True),
        )
    return create_model("PipelineSpec", __base__=PipelineSpec, __doc__="A kvframe pipeline.", **fields)


@cache
def spec_class() -> type[PipelineSpec]:
    """The spec model of this process's registry."""
    return make_spec_class(registry())


def read_spec(source: str | Path, overrides: Mapping[str, Any] | None = None) -> PipelineSpec:
    """Read a spec by name (str) or from a file (pathlib.Path), with what it extends, and set `overrides` (dotted path
    -> value) in it.

    Raises SpecError, naming file, line, path and the nearest valid name."""
    read = read_spec_data(source, overrides)
    return validate_spec(read.data, read.origin, read.places)


def validate_spec(data: Any, origin: str = "spec", places: Mapping[Any, str] | None = None) -> PipelineSpec:
    """Validate plain data; `places` says where each path stands ("file:line"). Raises SpecError with one line for each
    mistake."""
    try:
        spec = spec_class().model_validate(data)
        mistakes = list(misread(data, spec.model_dump(), origin, places or {}))
    except ValidationError as error:
        mistakes = explain(error.errors(), data, origin, places or {}, PipelineSpec)
    if mistakes:
        raise SpecError("\n".join(dict.fromkeys(mistakes)))
    return spec
