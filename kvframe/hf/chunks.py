"""Reading a prompt in chunks, with compression between them."""

from __future__ import annotations

from itertools import pairwise
from types import NoneType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvframe.arguments import expect
from kvframe.errors import InputError
from kvframe.hf.continuing import goes_on

if TYPE_CHECKING:
    from kvframe.hf.cache import CompressedCache


def read_in_chunks(
    cache: CompressedCache, model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor | None, chunk: int
) -> Tensor:
    """Logits `[B, V]` of the last column. See CompressedCache.prefill."""
    if not isinstance(chunk, int) or chunk < 2:
        # A single token is the first of an answer.
        raise InputError(f"chunk must be a whole number of at least 2 tokens, but is {chunk!r}.")
    expect("model", model, nn.Module, "the cache's model")
    expect("input_ids", input_ids, Tensor, "a tensor of whole numbers [B, T]")
    expect("attention_mask", attention_mask, (Tensor, NoneType), "a tensor [B, T] or None")
    if input_ids.is_floating_point() or input_ids.dtype == torch.bool:
        raise InputError(f"input_ids must be whole numbers (torch.int64), but are {input_ids.dtype}.")
    if input_ids.ndim != 2 or not input_ids.shape[1]:
        raise InputError(f"input_ids must be [B, T] with at least one column, but are {list(input_ids.shape)}.")
    new = torch.ones_like(input_ids) if attention_mask is None else attention_mask[:, -input_ids.shape[1] :]
    if new.shape != input_ids.shape:
        raise InputError(
            f"attention_mask must have a column for each of input_ids {list(input_ids.shape)}, but is "
            f"{list(new.shape)}."
        )
    past = cache.get_seq_length()
    seen = new.new_zeros(len(new), 1) if cache.ledger.tokens is None else cache.ledger.tokens[:, None].to(new.device)
    positions = (seen + new.cumsum(1) - 1).clamp_min(0)
    mask = new if cache.valid is None else torch.cat([cache.columns.known(cache.valid, past).to(new), new], 1)
    # Counted from the end, so that left padding moves no row's cuts.
    tokens = input_ids.shape[1]
    cuts = [0, *reversed(range(tokens, 0, -chunk))]
    if past and len(cuts) > 2 and cuts[1] == 1:  # a single token is an answer's
        del cuts[1]
    if len(cuts) > 2:
        cache.check_reading()
    if (len(cuts) > 2 or (past and tokens > 1)) and not goes_on(model):
        raise InputError(
            f"The recurrent layers of {type(model).__name__} cannot go on from their state with several tokens at "
            "once, so all of a prompt must be read in one piece; raise chunk, and give context and question together."
        )
    for begin, end in pairwise(cuts):
        if begin:
            cache.compress_waiting()
        columns = slice(begin, end)
        logits: Tensor = model(
            input_ids[:, columns],
            attention_mask=mask[:, : past + end],
            position_ids=positions[:, columns],
            cache=cache,
            logits_to_keep=1,
        ).logits
    return logits[:, -1]
