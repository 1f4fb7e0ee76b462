"""A model compiled with torch.compile decodes with a compressed cache in one graph."""

from __future__ import annotations

import pytest
import torch
from tiny import batch, tiny_model

import kvframe
from kvframe.builtin import kernels

STEPS = 12


def started(encoder: str, family: str = "llama"):
    """A model, and a cache that compressed its prompt."""
    model = tiny_model(family)
    settings = {"budget": {"entries": 24}, "encoder": encoder, "protect.recent": 4, "protect.sink": 1}
    cache = kvframe.load("snapkv", settings).cache(model)
    model(**batch([48]), cache=cache, use_cache=True)
    model(torch.tensor([[5]]), cache=cache, use_cache=True)
    return model, cache


@pytest.mark.parametrize(
    ("encoder", "family"), [("dense", "llama"), ("int8", "llama"), ("int8", "gemma2"), ("dense", "gpt_oss")]
)
def test_a_step_is_one_graph(encoder, family, monkeypatch):
    monkeypatch.setattr(kernels, "WORTH_A_KERNEL", (0, 0))  # the machine code too is an operator of torch
    torch.compiler.reset()
    model, cache = started(encoder, family)
    found = torch._dynamo.explain(lambda token: model(token, cache=cache, use_cache=True).logits)(torch.tensor([[7]]))
    assert (found.graph_count, found.graph_break_count) == (1, 0), found.break_reasons


def test_compiled_steps_give_what_steps_give(monkeypatch):
    monkeypatch.setattr(kernels, "WORTH_A_KERNEL", (0, 0))
    torch.compiler.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model, cache = started("int8")
    step = torch.compile(lambda token: model(token, cache=cache, use_cache=True).logits, backend=backend)
    found = [step(torch.tensor([[7 + index]])) for index in range(STEPS)]
    model, cache = started("int8")
    wanted = [model(torch.tensor([[7 + index]]), cache=cache, use_cache=True).logits for index in range(STEPS)]
    for got, expected in zip(found, wanted, strict=True):
        assert torch.equal(got, expected)
    # Once with the first step's numbers, and again for any number; not once a step.
    assert len(graphs) < STEPS / 2
