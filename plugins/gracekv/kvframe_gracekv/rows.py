"""One batch row at a time, without its padding: what the stages of this plugin work on.

Working row by row is what makes a row in a batch the same as the row alone, whatever the padding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvframe.errors import StageError
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
    """Yield the rows; the probes are those among the tokens whose queries were observed."""
    observed = min((len_or_none(layer.queries) for layer in observation.layers), default=0)
    tokens = observation.shape[-1]
    for index in range(observation.shape[1]):
        valid = observation.valid[index].nonzero()[:, 0]
        suffix = None if observation.suffix is None else observation.suffix[index]
        asked = suffix is not None and bool(suffix.any())
        candidates = valid[-(question + sequence) :] if question + sequence else valid[:0]
        if asked and suffix is not None:
            candidates = candidates[suffix[candidates] | (candidates >= first_of_last(valid, sequence))]
        candidates = candidates[candidates >= tokens - observed]
        yield Row(index, valid, observation.body[index].nonzero()[:, 0], candidates, asked)


def len_or_none(queries: Tensor | None) -> int:
    """Tokens whose queries were observed."""
    return 0 if queries is None else queries.shape[2]


def first_of_last(valid: Tensor, count: int) -> int:
    """The column of the first of the last `count` tokens; one behind the end for none."""
    last = valid[-count:] if count else valid[:0]
    return int(last[0]) if len(last) else int(valid[-1]) + 1 if len(valid) else 0


def check_consecutive(observation: Observation, row: Row, owner: str) -> None:
    """Raise StageError unless the positions of the body grow by one from token to token."""
    steps = observation.positions[row.index, row.body].diff()
    if bool((steps != 1).any()):
        raise StageError(
            f"'{owner}' merges neighbours and needs consecutive positions, but those of row {row.index} jump by "
            f"{int(steps[(steps != 1).nonzero()[0, 0]])}; leave position_ids to the model."
        )


def queries_at(observation: Observation, layer: int, row: Row, columns: Tensor, owner: str) -> Tensor:
    """Return fp32 `[Hq, P, D]`, the queries of one layer at these columns. Raises StageError if there are none."""
    queries = observation.layers[layer].queries
    if queries is None:
        raise StageError(
            f"'{owner}' needs the queries of the prompt, but the observation has none; capture what it `needs`."
        )
    return queries[row.index][:, columns - (observation.shape[-1] - queries.shape[2])].float()


def attention_at(observation: Observation, layer: int, row: Row, columns: Tensor, owner: str) -> Tensor:
    """Return fp32 `[Hq, P, n]`: the causal softmax of the queries at `columns [P]` over the row's valid tokens."""
    model = observation.model
    queries = queries_at(observation, layer, row, columns, owner)
    keys = observation.layers[layer].keys[row.index][:, row.valid].float()  # [H, n, D]
    packed = queries.reshape(model.kv_heads, -1, model.head_dim) * model.scale  # [H, G*P, D]
    logits = (packed @ keys.mT).view(model.query_heads, len(columns), len(row.valid))
    hidden = row.valid[None] > columns[:, None]
    return logits.masked_fill_(hidden, -torch.inf).softmax(-1)
