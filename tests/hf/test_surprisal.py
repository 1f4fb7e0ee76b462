"""Surprisal is that of the logits that the model itself gives, whatever it does before and after its head."""

from __future__ import annotations

import families
import pytest
import torch
import transformers
from curious import SEEN, curious_pipeline
from hybrids import hybrid_model
from tiny import SHAPE, batch, tiny_model

from kvframe.errors import ModelError
from kvframe.hf.finding import decoder_of
from kvframe.hf.head import logits_of

CAPPED = {"final_logit_softcapping": 1.5}
# What models do about their head: the prefix of their classes, and what makes it show.
HEADS = {
    "a factor": ("HyperCLOVAX", {"logits_scaling": 0.2}),
    "a factor from the width": (
        "MiniCPM3",
        {"dim_model_base": 16, "q_lora_rank": 16, "kv_lora_rank": 16, "num_key_value_heads": 4},
    ),
    "a factor called scale": ("Cohere", {"logit_scale": 0.3}),
    "a divisor": ("Granite", {"logits_scaling": 7.0}),
    "a divisor beside experts": ("GraniteMoe", {"logits_scaling": 7.0, "num_local_experts": 2}),
    "a cap": ("Gemma2", CAPPED),
    "a cap that is always there": ("NanoChat", CAPPED),
    "a bias": ("Phi", {}),
    "a norm between": ("ModernBertDecoder", {"layer_types": ["full_attention"] * 3}),
}


def headed_model(name, extra):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SHAPE, **extra})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    if (bias := getattr(model.get_output_embeddings(), "bias", None)) is not None:
        bias.data.normal_()
    return model


def decoded(model, inputs):
    """What the decoder and the model give."""
    given = []
    hook = decoder_of(model).register_forward_hook(lambda module, args, output: given.append(output))
    logits = model(**inputs).logits.float()
    hook.remove()
    return given[0], logits


@pytest.mark.parametrize("case", HEADS)
def test_the_logits_are_those_of_the_model_and_not_of_its_head_alone(case):
    model, inputs = headed_model(*HEADS[case]), batch([13, 13])
    output, expected = decoded(model, inputs)
    found = logits_of(model, output, output.last_hidden_state, inputs["input_ids"])
    assert torch.equal(found, expected)
    head = model.get_output_embeddings()
    assert (torch.nn.functional.linear(output.last_hidden_state, head.weight) - expected).abs().max() > 0.5


def test_the_logits_are_those_of_a_model_with_another_around_it():
    text = {**SHAPE, "model_type": "granite", "logits_scaling": 7.0}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 8, "patch_size": 4, "model_type": "clip_vision_model"}
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=96)
    model, inputs = transformers.LlavaForConditionalGeneration(config).eval(), batch([13, 13])
    output, expected = decoded(model, inputs)
    assert torch.equal(logits_of(model, output, output.last_hidden_state, inputs["input_ids"]), expected)


@pytest.mark.parametrize("kind", families.kinds())
def test_the_logits_are_those_of_every_family(kind):
    model, inputs = families.make(kind), batch([13, 13])
    output, expected = decoded(model, inputs)
    if kind == "prophetnet":  # predicts several tokens at once, from other states than the last
        with pytest.raises(ModelError, match="ProphetNetForCausalLM, since its logits do not follow"):
            logits_of(model, output, output.last_hidden_state, inputs["input_ids"])
        return
    assert torch.equal(logits_of(model, output, output.last_hidden_state, inputs["input_ids"]), expected)


@pytest.mark.parametrize("name", ["falcon_h1", "granite4", "lfm2"])
def test_stages_see_the_surprisal_of_hybrids(name):
    check_seen(hybrid_model(name))


@pytest.mark.parametrize("case", ["a divisor", "a factor"])
def test_stages_see_the_surprisal_of_what_is_scaled(case):
    check_seen(headed_model(*HEADS[case]))


class Odd(transformers.LlamaForCausalLM):
    """Does to its logits what no other model does."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits[..., :90].sinh() / (1 + out.logits[..., 1:91].abs())
        return out


def test_stages_see_the_surprisal_of_a_model_that_nobody_knows():
    torch.manual_seed(0)
    check_seen(Odd(transformers.LlamaConfig(**SHAPE)).eval())


def check_seen(model):
    SEEN.clear()
    inputs = batch([50, 31])
    inputs["input_ids"].clamp_(max=89)
    cache = curious_pipeline().cache(model)
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)
    logits = model(**inputs, position_ids=positions, cache=cache).logits
    cache.compress()
    expected = -logits[:, :-1].float().log_softmax(-1).gather(-1, inputs["input_ids"][:, 1:, None])[..., 0]
    both = inputs["attention_mask"].bool()[:, 1:] & inputs["attention_mask"].bool()[:, :-1]
    # Rounding of fp32 in sums over the vocabulary.
    assert torch.allclose(SEEN[0].surprisal[:, 1:][both], expected[both], atol=1e-4)
    SEEN.clear()


class Wrapper(torch.nn.Module):
    """Passes on what it is asked for, as PEFT's wrappers do."""

    def __init__(self, model):
        super().__init__()
        self.inner = model

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def test_stages_see_the_surprisal_of_a_model_in_a_wrapper():
    check_seen(Wrapper(headed_model(*HEADS["a divisor"])))


def test_nobody_hears_of_it_and_nothing_is_left(llama):
    heard = []
    hook = llama.register_forward_hook(lambda *args: heard.append(args))
    before = {name: dict(vars(module)) for name, module in llama.named_modules()}
    output, _ = decoded(llama, batch([9]))
    heard.clear()
    logits_of(llama, output, output.last_hidden_state, batch([9])["input_ids"])
    assert not heard
    assert {name: dict(vars(module)) for name, module in llama.named_modules()} == before
    hook.remove()


def test_a_model_whose_logits_do_not_follow_is_refused_in_a_sentence(llama):
    output, _ = decoded(llama, batch([9]))
    tokens = batch([9])["input_ids"]

    class Closed(transformers.LlamaForCausalLM):
        def forward(self, input_ids, **kwargs):
            raise NotImplementedError("not so")

    class Short(transformers.LlamaForCausalLM):
        def forward(self, input_ids, **kwargs):
            return super().forward(input_ids, **{**kwargs, "logits_to_keep": 1})

    config = transformers.LlamaConfig(**SHAPE)
    for model, reason in (
        (Closed(config), "do not follow from its decoder's states .NotImplementedError: not so"),
        (Short(config), r"gives logits \[1, 1, 97\] for tokens \[1, 9\]"),
        (tiny_model("llama").model, "has no head"),
    ):
        with pytest.raises(ModelError, match=f"{type(model).__name__}.*{reason}"):
            logits_of(model, output, output.last_hidden_state, tokens)
