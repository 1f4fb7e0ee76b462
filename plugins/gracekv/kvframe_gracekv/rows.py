"""One batch row at a time, without its padding: what the stages of this plugin work on.

Working row by row is what makes a row in a batch the same as the row alone, whatever the padding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvframe.errors import StageError
from kvframe.ops import attention_weights, cap_logits
from kvframe.types import Observation


@dataclass(frozen=True, eq=False)
class Row:
    """Row `index` of an observation.

    Attributes:
        valid: int64 `[n]`, the columns that hold tokens.
        body: int64 `[N]`, the columns that the allocator decides on.
        probes: int64 `[P]`, the columns whose queries stand for what will be asked: at most `question` at the end of
            the question (of the prompt, if no question is marked) and `sequence` at the end of the prompt.
        asked: whether a question is marked.
    """

    index: int
    valid: Tensor
    body: Tensor
    probes: Tensor
    asked: bool


def rows(observation: Observation, question: int, sequence: int) -> Iterator[Row]:
    """Yield the rows."""
    for index in range(observation.shape[1]):
        valid = observation.valid[index].nonzero()[:, 0]
        suffix = None if observation.suffix is None else observation.suffix[index]
        asked = suffix is not None and bool(suffix.any())
        probes = valid[-(question + sequence) :] if question + sequence else valid[:0]
        if asked and suffix is not None:
            probes = probes[suffix[probes] | (probes >= first_of_last(valid, sequence))]
        yield Row(index, valid, observation.body[index].nonzero()[:, 0], probes, asked)


def first_of_last(valid: Tensor, count: int) -> int:
    """The column of the first of the last `count` tokens; one behind the end for none."""
    last = valid[-count:] if count else valid[:0]
    return int(last[0]) if len(last) else int(valid[-1]) + 1 if len(valid) else 0


def pick(tensor: Tensor, columns: Tensor, dim: int) -> Tensor:
    """`tensor` at the `columns` of dimension `dim`: a view if they follow each other, else a copy."""
    if len(columns) and bool((columns.diff() == 1).all()):
        return tensor.narrow(dim, int(columns[0]), len(columns))
    return tensor.index_select(dim, columns)


def check_consecutive(observation: Observation, row: Row, owner: str) -> None:
    """Raise StageError unless the positions of the body grow by one from token to token."""
    steps = observation.positions[row.index, row.body].diff()
    if bool((steps != 1).any()):
        raise StageError(
            f"'{owner}' merges neighbours and needs consecutive positions, but those of row {row.index} jump by "
            f"{int(steps[(steps != 1).nonzero()[0, 0]])}; leave position_ids to the model."
        )


def observed(columns: Tensor, seen: Tensor, tokens: int) -> Tensor:
    """The `columns` of all `tokens` that `seen [B, Hq, Tq, D]` holds, which are those of the last Tq tokens. Later
    turns of a conversation see the queries of their own tokens only."""
    return columns[columns >= tokens - seen.shape[2]]


def queries_at(observation: Observation, layer: int, row: Row, columns: Tensor, owner: str) -> tuple[Tensor, Tensor]:
    """Return fp32 `[Hq, P, D]`, the queries of one layer at those of the columns that were observed, and these columns.
    Raises StageError if there are none."""
    queries = observation.layers[layer].queries
    tokens = observation.shape[-1]
    columns = columns if queries is None else observed(columns, queries, tokens)
    if queries is None or not len(columns):
        raise StageError(
            f"'{owner}' needs the queries of the prompt, but the observation has none; capture what it `needs`."
        )
    return pick(queries[row.index], columns - (tokens - queries.shape[2]), 1).float(), columns


def attention_at(observation: Observation, layer: int, row: Row, columns: Tensor, owner: str) -> Tensor:
    """Return fp32 `[Hq, P, n]`: the causal attention of the observed queries at `columns` to the row's valid tokens, as
    the model has it: of capped logits, and in sum less than 1 where there are sinks."""
    model = observation.model
    queries, columns = queries_at(observation, layer, row, columns, owner)
    keys = pick(observation.layers[layer].keys[row.index], row.valid, 1).float()  # [H, n, D]
    packed = queries.reshape(model.kv_heads, -1, model.head_dim) * model.scale  # [H, G*P, D]
    logits = cap_logits(packed @ keys.mT, model.softcap).view(model.query_heads, len(columns), len(row.valid))
    sinks = model.sinks(layer)
    hidden = row.valid[None] > columns[:, None]
    logits = logits.masked_fill(hidden, -torch.inf)
    return attention_weights(logits, None if sinks is None else sinks[:, None])
