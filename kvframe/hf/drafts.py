"""Drafts: tokens that come in one call with the token that they follow, to be judged by the model and perhaps taken off
again. They are judged by what a plain answer attends, which is the compressed prompt, however many they are."""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvframe.errors import InputError
from kvframe.hf.hook import Hook, called_with
from kvframe.hf.probe import unwrapped
from kvframe.hf.protected import room_in_block
from kvframe.hf.step import Before

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvframe.hf.cache import CompressedCache


class Drafts:
    """Stands on a model while a cache lives for which drafts were announced (`activate_past_recording`). In the next
    call with that cache, and in each that follows a crop, the last `logits_to_keep - 1` tokens are drafts. A call in
    which something would be compressed if its tokens came one by one is made in pieces, with a compression between
    them: behind a prompt that comes with its first drafts, and wherever a block of `decode.flush` is full."""

    def __init__(self, model: PreTrainedModel, cache: CompressedCache) -> None:
        self.expected = False  # the next call may bring drafts
        self._owner: weakref.ref[CompressedCache] = weakref.ref(cache)
        self._inside = False  # a piece is being made
        self._made: list[Any] = []  # what the pieces gave, while the last one is made
        self._before: Before | None = None
        self._blocks: list[tuple[int, Before]] = []  # how much was seen when a block was compressed, and what was held
        generating = unwrapped(model)  # `generate` of a wrapper calls the model in it
        handles: list[Any] = [
            generating.register_forward_pre_hook(Hook(self._before_call), with_kwargs=True),
            # Also after a call that fails, or its first pieces would be left.
            generating.register_forward_hook(Hook(self._after_call), with_kwargs=True, always_call=True),
        ]
        weakref.finalize(cache, lambda: [handle.remove() for handle in handles])

    def rewind(self, cache: CompressedCache, columns: int) -> int:
        """Before the last `columns` are taken off: undo the compressions that came within them. Returns how many are
        left to take off."""
        left = cache.compressed_layers[0].seen - columns
        later = [(seen, block) for seen, block in self._blocks if seen > left]
        if later:
            later[0][1].restore(cache)
        self._blocks, self.expected = [], True
        return cache.compressed_layers[0].seen - left

    def _before_call(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        ids, keep = kwargs.get("input_ids", args[0] if args else None), kwargs.get("logits_to_keep")
        cache = called_with(self._owner, kwargs) if self.expected else None
        if cache is None or not isinstance(ids, Tensor) or not isinstance(keep, int):
            return None
        self.expected, self._blocks = False, []
        if not 0 < keep <= ids.shape[1]:
            return None
        cache.settle()
        self._before, rest = Before(cache), {**kwargs, "input_ids": ids}
        try:
            if again := _known(cache, rest):
                rest = _split(rest, again, 1)[1] | {"logits_to_keep": keep}
            new = rest["input_ids"].shape[1] - keep + 1
            if keep > 1 and (new > 1 or not cache.exact_columns):
                rest = self._make(module, cache, rest, new, 0)
            while keep > 1 and (room := self._room(cache)) < rest["input_ids"].shape[1]:
                rest = self._make(module, cache, rest, room, room - 1)
        except BaseException:
            self._undo(cache)
            raise
        cache.drafts = min(keep, rest["input_ids"].shape[1]) - 1
        return (), rest

    def _make(
        self, module: nn.Module, cache: CompressedCache, kwargs: dict[str, Any], columns: int, drafts: int
    ) -> dict[str, Any]:
        """Call the model with the first columns, the last of them drafts; return the arguments for the others."""
        first, rest = _split(kwargs, columns, drafts + 1)
        cache.drafts = drafts
        self._inside = True
        try:
            self._made.append(module(**first))
        finally:
            self._inside = False
        return rest

    def _room(self, cache: CompressedCache) -> int:
        """How many tokens of an answer go in before a block is full. One that is full is compressed."""
        flush = cache.pipeline.spec.decode.flush
        if flush is None:
            return sys.maxsize
        self._blocks.append((cache.compressed_layers[0].seen, Before(cache)))
        cache.between_steps()
        return sys.maxsize if cache.valid is None else max(1, int(room_in_block(cache, cache.valid, flush).min()))

    def _after_call(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        cache = called_with(self._owner, kwargs)
        if cache is None or self._inside or self._before is None:
            return None
        if output is None:  # it failed
            self._undo(cache)
            return None
        made = [*self._made, output]
        self._made, self._before = [], None
        if len(made) > 1:
            output.logits = torch.cat([piece.logits for piece in made], 1)
            if output.hidden_states is not None:
                depths = zip(*(piece.hidden_states for piece in made), strict=True)
                output.hidden_states = tuple(torch.cat(states, 1) for states in depths)
        return output

    def _undo(self, cache: CompressedCache) -> None:
        if self._before is not None:
            self._before.restore(cache)
        self._made, self._before, self._blocks, self.expected = [], None, [], True


def _known(cache: CompressedCache, kwargs: dict[str, Any]) -> int:
    """How many of a call's first columns the cache holds already: when it is assisted, `generate` brings the whole text
    once more, which its positions tell."""
    positions, tokens = kwargs.get("position_ids"), cache.ledger.tokens
    if positions is None or tokens is None or int(positions.flatten()[0]) >= int(tokens[0]):
        return 0
    seen = cache.compressed_layers[0].seen
    return seen if seen < kwargs["input_ids"].shape[1] else 0


def _split(kwargs: dict[str, Any], new: int, keep: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A call's arguments for its first `new` columns, with the logits of the last `keep` of them, and for the others,
    with all logits. Images and the like belong to the first."""
    length, mask = kwargs["input_ids"].shape[1], kwargs.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2):
        raise InputError(
            "A prompt that comes with its first drafts takes an attention_mask [B, T]; read the prompt with "
            "cache.prefill first."
        )
    first, rest = dict(kwargs), dict(kwargs)
    for name, value in kwargs.items():
        if name == "attention_mask" and mask is not None:
            first[name] = mask[:, : mask.shape[1] - (length - new)]
        elif isinstance(value, Tensor) and not value.is_floating_point() and value.shape[-1:] == (length,):
            first[name], rest[name] = value[..., :new], value[..., new:]
        elif isinstance(value, Tensor):
            del rest[name]
    return {**first, "logits_to_keep": keep}, {**rest, "logits_to_keep": length - new}
