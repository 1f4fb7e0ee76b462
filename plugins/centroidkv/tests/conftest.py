"""Prompts made from one seed, and a tiny random model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from kvframe.rope import Rope
from kvframe.types import LayerObservation, ModelInfo, Observation

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_grad():
    """Tests run as users run inference."""
    with torch.no_grad():
        yield


def observe(
    lengths: Sequence[int],
    seed: int = 0,
    *,
    layers: int = 2,
    heads: int = 2,
    group: int = 1,
    dim: int = 8,
    sink: int = 0,
    recent: int = 0,
    extra: int = 0,
    dtype: torch.dtype = torch.float64,
    alone: int | None = None,
) -> Observation:
    """Left-padded rows of these lengths with noise at the padding; row `i` depends on `seed`, `i` and its length only.

    `extra` more columns of padding stand before all rows; `alone` = only that row, without padding."""
    rows = range(len(lengths)) if alone is None else [alone]
    tokens = max(lengths[row] for row in rows) + (extra if alone is None else 0)
    noise = torch.Generator().manual_seed(7)
    shape = (layers, 2, len(rows), heads, tokens, dim)
    data = torch.randn(shape, generator=noise, dtype=torch.float64) * 5
    valid = torch.zeros(len(rows), tokens, dtype=torch.bool)
    body, positions = valid.clone(), valid.long()
    for index, row in enumerate(rows):
        n = lengths[row]
        generator = torch.Generator().manual_seed(1000 * seed + row)
        # A shared offset and different sizes of heads: real keys are neither centred nor alike.
        centre = torch.randn(layers, 2, heads, 1, dim, generator=generator, dtype=torch.float64)
        own = torch.randn(layers, 2, heads, n, dim, generator=generator, dtype=torch.float64)
        size = torch.rand(layers, 2, heads, 1, 1, generator=generator, dtype=torch.float64) * 2 + 0.1
        data[:, :, index, :, tokens - n :] = (own + centre) * size
        place = torch.arange(n)
        valid[index, tokens - n :] = True
        body[index, tokens - n :] = (place >= sink) & (place < n - recent)
        positions[index, tokens - n :] = place
    data = data.to(dtype)
    rope = Rope(100.0 ** (-torch.arange(0, dim, 2) / dim))
    weight = torch.zeros(heads * group, dim, 4)
    model = ModelInfo(layers, heads * group, heads, dim, dim**-0.5, rope, lambda layer: weight, tuple(range(layers)))
    return Observation(tuple(LayerObservation(k, v) for k, v in data), positions, valid, body, model)


@pytest.fixture(scope="session")
def make_observation() -> Callable[..., Observation]:
    return observe


@pytest.fixture(scope="session")
def llama():
    """A tiny random Llama with grouped-query attention; tests must not change it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=97,
        max_position_embeddings=2048,
        initializer_range=0.2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def prompts() -> Callable[..., dict[str, Tensor]]:
    """Random prompts of these lengths, padded on the left to the longest."""

    def make(lengths: Sequence[int], seed: int = 0) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        longest = max(lengths)
        ids = torch.zeros(len(lengths), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, length in enumerate(lengths):
            ids[row, longest - length :] = torch.randint(3, 97, (length,), generator=generator)
            mask[row, longest - length :] = 1
        return {"input_ids": ids, "attention_mask": mask}

    return make
