"""What a decode step does depends on what is held, not on how many tokens were seen."""

from __future__ import annotations

import pytest
import torch
from tiny import batch, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

import kvframe


class Made(TorchDispatchMode):
    """Counts the elements of every tensor that an operation returns, views left out."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, kinds, arguments=(), keywords=None):
        out = function(*arguments, **(keywords or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((arguments, keywords)) if torch.is_tensor(t)}
        self.elements += sum(
            t.numel() for t in tree_leaves(out) if torch.is_tensor(t) and t.untyped_storage().data_ptr() not in given
        )
        return out


def made_by_a_step(model, cache, tokens: int) -> int:
    model(**batch([tokens]), cache=cache, use_cache=True)
    token = torch.tensor([[5]])
    for _ in range(3):  # the first step compresses, the next may grow the buffer
        model(token, cache=cache, use_cache=True)
    with Made() as made:
        model(token, cache=cache, use_cache=True)
    return made.elements


@pytest.mark.parametrize("encoder", ["dense", "int8"])
def test_a_step_at_a_fixed_size_does_not_grow_with_the_tokens_seen(encoder):
    model = tiny_model("llama")
    overrides = {"budget": {"entries": 24}, "encoder": encoder, "protect.recent": 4, "protect.sink": 1}
    pipeline = kvframe.load("snapkv", overrides)
    counts = [made_by_a_step(model, pipeline.cache(model), tokens) for tokens in (48, 96, 384)]
    assert len(set(counts)) == 1, counts
    # The count would see it: that of a cache that copies itself grows by the tokens.
    stock = [made_by_a_step(model, DynamicCache(config=model.config), tokens) for tokens in (48, 96)]
    assert stock[1] > stock[0]
