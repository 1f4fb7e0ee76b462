"""The embedded model: what the README promises, on a model that answers."""

from __future__ import annotations

import pytest
import torch

import kvframe
from kvframe.eval.text import embedded_text
from kvframe.hf import load_model

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def loaded():
    return load_model("smollm2")


@pytest.fixture(scope="module")
def inputs(loaded):
    """Three prompts of different length, padded on the left."""
    _, tokenizer = loaded
    text, prompts = embedded_text(), []
    for begin, length in ((1000, 900), (30000, 500), (60000, 700)):
        question = f"{text[begin : begin + length]}\n\nWhat is the text above about?"
        prompts.append(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
            )
        )
    return tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)


def generate(model, inputs, cache=None):
    out = model.generate(**inputs, **({} if cache is None else {"cache": cache}), max_new_tokens=24, do_sample=False)
    return out[:, inputs["input_ids"].shape[1] :]


def same(one, other, pad):
    """Whether two answers are equal up to the padding after their ends."""
    length = max(len(one), len(other))
    return torch.equal(*(torch.nn.functional.pad(t, (0, length - len(t)), value=pad) for t in (one, other)))


@pytest.mark.parametrize(
    ("name", "overrides"), [("identity", {}), ("adakv", {"budget.ratio": 4}), ("snapkv", {"budget.ratio": 4})]
)
def test_a_padded_batch_answers_as_its_rows_do(loaded, inputs, name, overrides):
    model, tokenizer = loaded
    pipeline = kvframe.load(name, {**overrides, "protect.recent": 16})
    cache = pipeline.cache(model)
    together = generate(model, inputs, cache)
    lengths = inputs["attention_mask"].sum(1).tolist()
    assert len(set(lengths)) == 3
    for row, length in enumerate(lengths):
        alone = {key: tensor[row : row + 1, -length:] for key, tensor in inputs.items()}
        assert same(generate(model, alone, pipeline.cache(model))[0], together[row], tokenizer.pad_token_id)
    if name == "identity":
        assert torch.equal(together, generate(model, inputs))
    else:
        assert cache.report().entry_ratio >= 4
    assert model.config._attn_implementation == "sdpa"


def test_two_caches_in_turn_give_the_logits_of_each_alone(loaded, inputs):
    model, _ = loaded
    pipelines = [kvframe.load(name, {"budget.ratio": 4, "protect.recent": 16}) for name in ("adakv", "snapkv")]
    rows = [{key: tensor[row : row + 1] for key, tensor in inputs.items()} for row in (0, 2)]

    def start(which):
        cache = pipelines[which].cache(model)
        model(**rows[which], cache=cache, logits_to_keep=1)
        return cache

    def step(which, cache, n):
        mask = torch.nn.functional.pad(rows[which]["attention_mask"], (0, n + 1), value=1)
        positions = mask.sum(1, keepdim=True) - 1
        return model(torch.tensor([[500 + n]]), attention_mask=mask, position_ids=positions, cache=cache).logits

    alone = []
    for which in (0, 1):
        cache = start(which)
        alone.append([step(which, cache, n) for n in range(3)])
    caches = [start(0), start(1)]
    for n in range(3):
        for which in (0, 1):
            assert torch.equal(step(which, caches[which], n), alone[which][n])
