"""Watches what the attention function cannot see: residual hidden states and surprisal. Forward hooks stand on the
model only while a cache lives whose stages ask for them, and they look only at calls made with that cache. Copies of
the model do not have them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvframe.errors import ModelError
from kvframe.hf.buffer import SPARE, Tail
from kvframe.hf.finding import blocks_of, decoder_of
from kvframe.hf.head import decoder_path, logits_of
from kvframe.hf.hook import Hook, called_with
from kvframe.hf.step import taken_back_if_broken
from kvframe.types import Needs

if TYPE_CHECKING:
    from kvframe.hf.cache import CompressedCache

CHUNK = 256  # tokens whose logits are held at once


class Watch:
    """Hidden states `[B, T, hidden]` at the asked depths, and surprisal `[B, T]`, of the tokens in the recent
    buffer."""

    def __init__(self, needs: Needs) -> None:
        self.hidden = {depth: Tail("all", 1) for depth in needs.hidden_states}
        self.surprisal = Tail("all", 1) if needs.surprisal else None
        self._ends = Tail(1, 1)  # final hidden states of the last tokens seen, [B, n, hidden]

    def attach(self, model: PreTrainedModel, cache: CompressedCache) -> None:
        """Set the hooks; they go when `cache` does."""
        if not self.hidden and self.surprisal is None:
            return
        owner = weakref.ref(cache)
        handles: list[Any] = []
        decoder, blocks = decoder_of(model), blocks_of(model)
        if self.hidden and not blocks:
            raise ModelError(
                f"The hidden states of {type(model).__name__} cannot be captured: it has no list of layers."
            )
        for depth, tail in self.hidden.items():
            index = min(int(depth * len(blocks)), len(blocks) - 1)
            hook = Hook(_hidden_hook(index, tail, owner))
            handles.append(blocks[index].register_forward_pre_hook(hook, with_kwargs=True))
        if self.surprisal is not None:
            decoder_path(model)
            hook = Hook(self._surprisal_hook(weakref.ref(model), owner))
            handles.append(decoder.register_forward_hook(hook, with_kwargs=True))
        weakref.finalize(cache, lambda: [handle.remove() for handle in handles])

    def _surprisal_hook(self, model: Any, owner: Any) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            if (cache := called_with(owner, kwargs)) is None or self.surprisal is None:
                return
            with taken_back_if_broken(cache):
                tokens = kwargs.get("input_ids", args[0] if args else None)
                if tokens is None:
                    raise ModelError("Surprisal needs input_ids, but the model was called with inputs_embeds.")
                states = output.last_hidden_state.detach()
                last = self._ends.tensor(1)
                before = states[:, :-1] if last is None else torch.cat([last.to(states.device), states[:, :-1]], 1)
                told = tokens[:, tokens.shape[1] - before.shape[1] :]
                known = surprisal(before, told, partial(logits_of, model(), output))
                pad = known.new_zeros(len(known), tokens.shape[1] - known.shape[1])
                self.surprisal.append(torch.cat([pad, known], 1))
                self._ends.append(states[:, -1 - SPARE - cache.spare :].clone(), cache.spare)
            cache.step = None

        return hook

    def hidden_states(self, depths: Iterable[float], columns: int) -> dict[float, Tensor]:
        """The states `[B, columns, hidden]` at the asked depths. The first block's hook sees a step before the cache
        does: what it appended for the step that triggers a compression comes behind these columns."""
        held = ((depth, self.hidden[depth].tensor()) for depth in depths)
        return {depth: states[:, :columns] for depth, states in held if states is not None}

    def keep_last(self, columns: int, seen: int) -> None:
        """Let go of all but the last `columns` of the `seen` ones, and of what came behind them."""
        for tail in self._tails():
            tail.keep_last(columns + max(0, tail.length - seen))

    def cut(self, columns: int) -> None:
        """Let go of all but the first columns."""
        for tail in self._tails():
            tail.cut(columns)

    def reset(self) -> None:
        """Forget what was seen; the hooks stay."""
        for tail in self._tails():
            tail.keep_last(0)
        self._ends.keep_last(0)

    def _tails(self) -> list[Tail]:
        return [*self.hidden.values(), *([self.surprisal] if self.surprisal is not None else [])]

    def tails(self) -> list[Tail]:
        """All that is held."""
        return [*self._tails(), self._ends]

    def take_over(self, other: Watch) -> None:
        """Go on from what another watch with the same needs saw."""
        for mine, theirs in zip(self._tails(), other._tails(), strict=True):
            mine.take_over(theirs)
        self._ends.take_over(other._ends)

    def select(self, rows: Tensor) -> None:
        """Keep these batch rows, in this order."""
        for tail in self.tails():
            tail.select(rows)

    def drop_last(self, columns: int) -> None:
        """Forget the last columns."""
        for tail in self.tails():
            tail.drop_last(columns)

    def to(self, device: torch.device) -> None:
        """Move to a device."""
        for tail in self.tails():
            tail.to(device)

    def tensors(self) -> list[Tensor]:
        """The tensors held."""
        return [t for tail in self.tails() for t in tail.tensors()]


def _hidden_hook(index: int, tail: Tail, owner: weakref.ref[CompressedCache]) -> Any:
    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if (cache := called_with(owner, kwargs)) is not None:
            if not cache.stepping(index):  # what was seen in a step that broke off before its first layer
                tail.cut(cache.exact_columns)
            tail.append(args[0] if args else kwargs["hidden_states"])

    return hook


def surprisal(states: Tensor, tokens: Tensor, logits_of: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """-log p in nats, fp32 `[B, T]`, of `tokens [B, T]` given final hidden `states [B, T, hidden]` of the tokens before
    them, in chunks of tokens: `generate` keeps the last logits only, and all at once would be `T * vocabulary`.
    `logits_of` gives those that follow some states, and gets as many tokens with them."""
    out = []
    with torch.no_grad():
        for begin in range(0, tokens.shape[1], CHUNK):
            chunk = tokens[:, begin : begin + CHUNK]
            logits = logits_of(states[:, begin : begin + CHUNK], chunk)
            chunk = chunk.to(logits.device)
            out.append(nn.functional.cross_entropy(logits.transpose(1, 2), chunk, reduction="none"))
    return torch.cat(out, 1) if out else states.new_zeros(len(tokens), 0, dtype=torch.float32)
