"""A cache and the batch that it serves, on a tiny random transformer: what the laws of whole specs are run with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor, nn

from kvframe.calibration import PROMPT, CalibratedEncoder
from kvframe.errors import KvframeError, StageError
from kvframe.pipeline import Pipeline
from kvframe.spec import Budget, Decode, Protect
from kvframe.testing.models import VOCABULARY, tiny_model

SINK, RECENT, SUFFIX, FLUSH = 2, 3, 2, 4


@dataclass(frozen=True)
class Batch:
    """Left-padded prompts of random tokens and the tokens that follow them; a row does not depend on the others."""

    lengths: tuple[int, ...]
    seed: int = 0
    family: str = "llama"
    padding: int = 0
    rows: tuple[int, ...] | None = None

    def __repr__(self) -> str:
        return f"Batch(lengths={self.lengths}, seed={self.seed}, family={self.family!r})"

    @property
    def model(self) -> Any:
        """The model, shared by all laws."""
        return tiny_model(self.family)

    def alone(self, row: int) -> Batch:
        """One of the rows by itself."""
        return replace(self, lengths=(self.lengths[row],), rows=(row,))

    def tokens(self, row: int, count: int, salt: int = 0) -> Tensor:
        """Random tokens of a row, no two the same: keys of equal tokens have equal norms in the first layer, and
        rounding would decide which of them a scorer prefers."""
        number = row if self.rows is None else self.rows[row]
        generator = torch.Generator().manual_seed((self.seed * 101 + number) * 7 + salt)
        return torch.randperm(VOCABULARY - 1, generator=generator)[:count] + 1

    def prompt(self) -> tuple[Tensor, Tensor]:
        """Token ids and attention mask, `[B, T]`."""
        width = max(self.lengths) + self.padding
        ids = torch.zeros(len(self.lengths), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, length in enumerate(self.lengths):
            ids[row, width - length :] = self.tokens(row, length)
            mask[row, width - length :] = 1
        return ids, mask

    def more(self, begin: int, end: int) -> Tensor:
        """Tokens `begin` to `end` of those that go on with the prompt, none of them in it, `[B, end - begin]`."""
        pairs = enumerate(self.lengths)
        return torch.stack([self.tokens(row, length + end)[length + begin :] for row, length in pairs])

    def answer(self, count: int) -> Tensor:
        """The tokens that follow, `[B, count]`."""
        return torch.stack([self.tokens(row, count, 1) for row in range(len(self.lengths))])


def batches(pipeline: Pipeline, rows: int = 3) -> Any:
    """Batches for a spec."""
    # Long enough for what is protected, at any ratio; rows of different lengths, so that there is padding.
    shortest = max(24, 8 * math.ceil(pipeline.spec.budget.ratio or 2))
    lengths = st.permutations([shortest, shortest + 9, shortest + 17]).map(lambda order: tuple(order[:rows]))
    return st.builds(Batch, lengths, st.integers(0, 999), st.sampled_from(["llama", "qwen3"]))


def small(pipeline: Pipeline, **changes: Any) -> Pipeline:
    """The pipeline with protected regions and blocks that fit prompts of a few dozen tokens, and with other changes. A
    budget in entries or bytes becomes a ratio of 2."""
    spec = pipeline.spec
    flush = spec.decode.flush
    protect = Protect(
        sink=min(spec.protect.sink, SINK),
        recent=min(spec.protect.recent, RECENT),
        suffix=min(spec.protect.suffix, SUFFIX),
    )
    update = {
        "protect": protect,
        "budget": Budget(ratio=spec.budget.ratio or 2, of="bytes" if len(pipeline.encoders) > 1 else "entries"),
        "decode": Decode(flush=None if flush is None else min(flush, FLUSH)),
        **changes,
    }
    return Pipeline(spec.model_copy(update=update), pipeline.name)


def _new_cache(pipeline: Pipeline, batch: Batch, model: Any) -> Any:
    """A cache for the model. A spec may refuse it, and is then not held to the law; an encoder that wants an artefact
    gets what it learns from a text of the tiny model."""
    encoder = pipeline.spec.encoder
    if not isinstance(encoder, CalibratedEncoder) or encoder.calibration == PROMPT:
        try:
            return pipeline.cache(model)
        except KvframeError as error:
            # To fail is not to refuse.
            if isinstance(error, StageError) and error.__cause__ is not None:
                raise
            assume(False)
    fits = encoder.model_copy(update={"calibration": PROMPT})
    made = Pipeline(pipeline.spec.model_copy(update={"encoder": fits}), pipeline.name).cache(model)
    states = [_calibrated(grade, batch.family) for grade in made.pipeline.encoders]
    made.begin_with(states[0] if len(states) == 1 else list(zip(*states, strict=True)))
    return made


@cache
def _calibrated(encoder: CalibratedEncoder, family: str) -> Sequence[Any]:
    """The states of an encoder that has read 160 random tokens of a tiny model."""
    from kvframe.hf.reader import Reader

    model, text = tiny_model(family), Batch((160,), seed=7, family=family)
    reader = Reader(model, encoder.calibration_needs)
    model(text.prompt()[0], cache=reader)
    return encoder.states(encoder.learn([reader.observation(SINK)], reader.info), reader.info)


class Session:
    """One cache (None = transformers' own) and the batch that it serves, whose prompt it has read, unless `read` is
    False."""

    def __init__(self, pipeline: Pipeline | None, batch: Batch, model: Any = None, read: bool = True) -> None:
        from transformers import DynamicCache

        self.batch, self.model = batch, batch.model if model is None else model
        self.cache: Any
        if pipeline is None:
            self.cache = DynamicCache(config=self.model.config)
        else:
            self.cache = _new_cache(pipeline, batch, self.model)
        ids, self.mask = batch.prompt()
        if read:
            self.show(ids, self.mask)
        if read and pipeline is not None:
            self.cache.compress()

    def show(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Run the model on new columns; logits `[B, Q, V]`."""
        self.mask = mask
        positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        logits: Tensor = self.model(ids, attention_mask=mask, position_ids=positions, cache=self.cache).logits
        return logits

    def go_on(self, tokens: Tensor) -> Tensor:
        """Show tokens `[B, Q]`, all at once; logits `[B, Q, V]`."""
        return self.show(tokens, nn.functional.pad(self.mask, (0, tokens.shape[1]), value=1))

    def answer(self, count: int = 3) -> Tensor:
        """Show the batch's answer token by token; logits `[B, count, V]`."""
        tokens = self.batch.answer(count)
        return torch.cat([self.go_on(tokens[:, n : n + 1]) for n in range(count)], 1)
