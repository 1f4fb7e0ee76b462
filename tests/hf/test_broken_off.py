"""A call that is refused, fails or is interrupted leaves the cache as it was, so that it can be made again."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import ClassVar

import pytest
import torch
from curious import curious_pipeline
from tiny import batch, tiny_model
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import kvframe
from kvframe.builtin.allocators import TopK
from kvframe.builtin.kernels import Auto
from kvframe.errors import BudgetError, InputError, ModelError, StageError
from kvframe.spec import Decode

PROMPT = batch([40, 31])
TOKEN = {"input_ids": torch.tensor([[5], [6]])}
QUESTION = {"input_ids": torch.arange(7, 47).view(2, 20)}
SMALL = {"budget.ratio": 2, "protect.recent": 5, "protect.sink": 2}


class Fragile(TopK):
    """An allocator that fails when told to."""

    error: ClassVar[BaseException | None] = None

    def allocate(self, *args):
        if Fragile.error is not None:
            raise Fragile.error
        return super().allocate(*args)


class FragileKernel(Auto):
    """A kernel that fails after some calls."""

    error: ClassVar[BaseException | None] = None
    calls: ClassVar[int] = 0

    def attend(self, *args, **kwargs):
        FragileKernel.calls -= 1
        if FragileKernel.error is not None and FragileKernel.calls < 0:
            raise FragileKernel.error
        return super().attend(*args, **kwargs)


@contextmanager
def hooked(modules, change):
    handles = [module.register_forward_pre_hook(change, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def attentions(model):
    return [layer.self_attn for layer in model.model.layers]


def raising(error):
    def hook(module, args, kwargs):
        raise error

    return hook


def without(name):
    return lambda module, args, kwargs: (args, {k: v for k, v in kwargs.items() if k != name})


def with_gradients(model, cache, call):
    with torch.enable_grad():
        model(**call, cache=cache)


def with_other_rows(model, cache, call):
    model(**{name: tensor[:1] for name, tensor in call.items()}, cache=cache)


def without_positions(model, cache, call):
    with hooked(attentions(model), without("position_ids")):
        model(**call, cache=cache)


def with_positions_of_three_axes(model, cache, call):
    def tripled(module, args, kwargs):
        return args, {**kwargs, "position_ids": kwargs["position_ids"].expand(3, 1, -1)}

    with hooked(attentions(model), tripled):
        model(**call, cache=cache)


def without_arguments(model, cache, call):
    keys = torch.zeros(2, 2, 1, 16)
    cache.update(keys, keys, cache.info.layer_ids[0])


def from_another_model(model, cache, call):
    tiny_model(model.config.model_type.removesuffix("_text"))(**call, cache=cache)


def from_a_deeper_model(model, cache, call):
    family = model.config.model_type.removesuffix("_text")
    kinds = {"layer_types": [*model.config.layer_types, "full_attention"]} if family == "gemma3" else {}
    tiny_model(family, num_hidden_layers=4, **kinds)(**call, cache=cache)


def with_a_cap(model, cache, call):
    model(**call, cache=cache, softcap=30.0)


def with_a_flat_mask(model, cache, call):
    def flattened(module, args, kwargs):
        return args, {**kwargs, "attention_mask": torch.ones(2, 40)}

    with hooked(attentions(model)[-1:], flattened):
        model(**call, cache=cache)


def with_foreign_attention(model, cache, call):
    own, AttentionInterface.get_interface = AttentionInterface.get_interface, lambda *_: sdpa_attention_forward
    try:
        model(**call, cache=cache)
    finally:
        AttentionInterface.get_interface = own


def with_embeddings(model, cache, call):
    embeds = model.get_input_embeddings()(call["input_ids"])
    model(inputs_embeds=embeds, attention_mask=call.get("attention_mask"), cache=cache)


def with_a_failing_allocator(model, cache, call, error):
    Fragile.error = error
    try:
        model(**call, cache=cache)
    finally:
        Fragile.error = None


def with_a_failing_kernel(model, cache, call, error, calls):
    FragileKernel.error, FragileKernel.calls = error, calls
    try:
        model(**call, cache=cache)
    finally:
        FragileKernel.error = None


def interrupted(model, cache, call, place, error):
    with hooked([place(model)], raising(error)):
        model(**call, cache=cache)


REFUSALS = {
    "gradients": (with_gradients, InputError, "torch.no_grad"),
    "rows": (with_other_rows, InputError, "holds . rows"),
    "no positions": (without_positions, ModelError, "passes no position_ids"),
    "three axes": (with_positions_of_three_axes, ModelError, "have 3 dimensions"),
    "no arguments": (without_arguments, ModelError, "position_ids"),
    "another model": (from_another_model, ModelError, "the model that it was made for"),
    "a deeper model": (from_a_deeper_model, ModelError, "the model that it was made for"),
    "a cap": (with_a_cap, (ModelError, ValueError), "softcap"),  # ValueError from sliding layers, which are not ours
    "a flat mask": (with_a_flat_mask, ModelError, "a mask that is not"),
    # RuntimeError where a mask comes along, which covers more than what is left of the keys.
    "foreign attention": (with_foreign_attention, (ModelError, RuntimeError), "did not reach|must match"),
    "embeddings": (with_embeddings, ModelError, "needs input_ids"),
    "allocator": (partial(with_a_failing_allocator, error=IndexError("no")), StageError, "IndexError: no"),
    "budget": (partial(with_a_failing_allocator, error=BudgetError("too few")), BudgetError, "too few"),
    "memory": (partial(with_a_failing_allocator, error=MemoryError("full")), MemoryError, "full"),
    "kernel": (partial(with_a_failing_kernel, error=IndexError("no"), calls=1), StageError, "IndexError: no"),
    "kernel, interrupted": (
        partial(with_a_failing_kernel, error=KeyboardInterrupt("^C"), calls=0),
        KeyboardInterrupt,
        "C",
    ),
    "before the first layer": (
        partial(interrupted, place=lambda m: m.model.layers[0].self_attn, error=KeyboardInterrupt("^C")),
        KeyboardInterrupt,
        "C",
    ),
    "after the first layer": (
        partial(interrupted, place=lambda m: m.model.layers[0].mlp, error=MemoryError("full")),
        MemoryError,
        "full",
    ),
    "before the last layer": (
        partial(interrupted, place=lambda m: m.model.layers[2].self_attn, error=KeyboardInterrupt("^C")),
        KeyboardInterrupt,
        "C",
    ),
    "behind the last layer": (
        partial(interrupted, place=lambda m: m.model.norm, error=MemoryError("full")),
        MemoryError,
        "full",
    ),
}
PHASES = ("empty", "prompt read", "compressed", "answering", "second turn")
# These can only fail where something is compressed, or attended compressed, or where there are rows already.
STAGES = {"allocator", "budget", "memory"}
LATER = {"kernel", "kernel, interrupted", "rows"}
CASES = [
    (refusal, phase, name)
    for name, phases in {"llama": PHASES, "gemma3": ("prompt read", "second turn")}.items()
    for refusal in REFUSALS
    for phase in phases
    if not (refusal in STAGES and phase not in ("prompt read", "answering"))
    and not (refusal in LATER and phase == "empty")
]


def led_to(phase, model, cache):
    if phase != "empty":
        model(**PROMPT, cache=cache)
    if phase == "compressed":
        cache.compress()
    if phase in ("answering", "second turn"):
        for _ in range(10):  # a block is full
            model(**TOKEN, cache=cache)


def report(cache):
    return replace(cache.report(), compress_seconds=0.0)


@pytest.mark.parametrize(("refusal", "phase", "name"), CASES, ids=lambda value: value.replace(" ", "_"))
def test_a_call_that_breaks_off_leaves_the_cache_as_it_was(refusal, phase, name):
    breaking, error, said = REFUSALS[refusal]
    model = tiny_model(name)
    pipeline = curious_pipeline(allocator=Fragile(), attention=FragileKernel(), decode=Decode(flush=10))
    cache, other = pipeline.cache(model), pipeline.cache(model)
    call = {"empty": PROMPT, "second turn": QUESTION}.get(phase, TOKEN)
    for each in (cache, other):
        led_to(phase, model, each)
    before = report(cache)
    for _ in range(2):
        with pytest.raises(error, match=said):
            breaking(model, cache, call)
        assert report(cache) == before == report(other)
    for tokens in (call, TOKEN, TOKEN, QUESTION, TOKEN):
        logits = [model(**tokens, cache=each).logits for each in (cache, other)]
        assert torch.equal(*logits)
        assert report(cache) == report(other)


@pytest.mark.parametrize("padded", [False, True])
def test_a_call_with_positions_can_be_made_again_where_the_first_layer_slides(padded):
    """Nothing asks the cache anything in between: the model itself must find it settled."""
    model = tiny_model("gemma3")
    cache, other = (kvframe.load("identity").cache(model) for _ in range(2))
    call = batch([60, 33] if padded else [60])
    call["position_ids"] = (call["attention_mask"].cumsum(1) - 1).clamp_min(0)
    if not padded:
        for each in (cache, other):
            model(**call, cache=each)
        call = {"input_ids": torch.tensor([[5, 6, 7, 8, 9]]), "position_ids": torch.arange(60, 65)[None]}
    with hooked(model.model.layers[-1:], raising(KeyboardInterrupt())), pytest.raises(KeyboardInterrupt):
        model(**call, cache=cache)
    assert torch.equal(model(**call, cache=cache).logits, model(**call, cache=other).logits)
