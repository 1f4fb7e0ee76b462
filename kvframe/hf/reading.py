"""Lets a model read a text in windows, for stages that must be calibrated."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from kvframe.cachedir import cache_dir
from kvframe.errors import InputError
from kvframe.types import Needs, Observation, Reading

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WINDOW = 1024
# First tokens of each window: their keys are unlike all others, and caches keep them exactly.
SINKS = 4
OWN_TOKENS = 16384


def read_text_windows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    title: str,
    tokens: int,
    needs: Needs,
    listener: Callable[[int], Any] = lambda done: None,
) -> Reading:
    """Read `tokens` tokens of a text in windows of 1024, spread evenly over it. The body of each observation is all but
    the first 4 tokens of its window. `listener` is told how many tokens were read.

    Raises InputError if the text is shorter than asked."""
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
    if tokens < 1:
        raise InputError(f"The number of tokens to read must be at least 1, but is {tokens}.")
    if len(ids) < tokens:
        raise InputError(
            f"The text has {len(ids)} tokens, but {tokens} are to be read for the calibration; give more text or ask "
            "for fewer tokens."
        )
    first = tokenizer("a", verbose=False).input_ids[:1]
    begin = torch.tensor(first if first == [tokenizer.bos_token_id] else [], dtype=torch.int64)
    windows = [torch.cat([begin, piece]) for piece in spread(ids, tokens)]
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return Reading(_observe(model, windows, needs, listener), digest, title, tokens)


def spread(ids: Tensor, tokens: int) -> list[Tensor]:
    """`tokens` of the ids `[T]` in windows of at most 1024 at even distances."""
    count = -(-tokens // WINDOW)
    size, extra = divmod(tokens, count)
    gap = (len(ids) - tokens) / max(1, count - 1)
    pieces, begin = [], 0.0
    for index in range(count):
        length = size + (index < extra)
        pieces.append(ids[int(begin) : int(begin) + length])
        begin += length + gap
    return pieces


def _observe(
    model: PreTrainedModel, windows: list[Tensor], needs: Needs, listener: Callable[[int], Any]
) -> Iterator[Observation]:
    from kvframe.hf.reader import Reader

    done = 0
    for window in windows:
        reader = Reader(model, needs)
        with torch.no_grad():
            model(window[None].to(model.device), cache=reader, use_cache=True, logits_to_keep=1)
        yield reader.observation(SINKS)
        done += len(window)
        listener(done)


def own_reading(model: PreTrainedModel) -> Callable[[Needs], Reading] | None:
    """For the embedded model: how it reads the embedded text. None for any other model."""
    folder = Path(str(model.config._name_or_path))
    if folder.parent != cache_dir() or not folder.name.startswith("smollm2-"):
        return None

    def read(needs: Needs) -> Reading:
        from kvframe.eval.text import embedded_text

        tokenizer = AutoTokenizer.from_pretrained(folder)
        return read_text_windows(model, tokenizer, embedded_text(), "the Python language reference", OWN_TOKENS, needs)

    return read
