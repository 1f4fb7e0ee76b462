"""Tiny random models, batches and observations for tests."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvframe.rope import Rope
from kvframe.types import LayerObservation, ModelInfo, Observation

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 97,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
SLIDING = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}

MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama3": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3}),
    "yarn": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": YARN}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "gemma2": (
        Gemma2ForCausalLM,
        Gemma2Config,
        # Logits of a tiny model are of order 5: the cap bends most of them.
        {**SLIDING, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},
    ),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {**SLIDING, "query_pre_attn_scalar": 16}),
    "gpt_oss": (
        GptOssForCausalLM,
        GptOssConfig,
        {**SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": YARN},
    ),
}


def tiny_model(name: str, **changes: object) -> PreTrainedModel:
    """A random model of the family, in eval mode, the same at every call."""
    model_class, config_class, extra = MODELS[name]
    torch.manual_seed(0)
    model = model_class(config_class(**{**SHAPE, **extra, **changes})).eval()
    for module in model.modules():
        if isinstance(sinks := getattr(module, "sinks", None), Tensor):
            # From hardly any share of the attention to nearly all of it, and different from head to head.
            sinks.data.copy_(torch.linspace(-1, 5, len(sinks)))
    return model


def batch(lengths: list[int], side: str = "left", seed: int = 0) -> dict[str, Tensor]:
    """Random prompts of these lengths, padded to the longest."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.zeros(len(lengths), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        columns = slice(longest - length, longest) if side == "left" else slice(0, length)
        ids[row, columns] = torch.randint(3, 97, (length,), generator=generator)
        mask[row, columns] = 1
    return {"input_ids": ids, "attention_mask": mask}


def row_of(inputs: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    """One row of a batch, without its padding."""
    kept = inputs["attention_mask"][row].bool()
    return {name: tensor[row : row + 1, kept] for name, tensor in inputs.items()}


def greedy(model: PreTrainedModel, inputs: dict[str, Tensor], cache: object = None, new: int = 10) -> Tensor:
    """The greedily generated tokens, `[B, new]`."""
    settings = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    out = model.generate(**inputs, **({} if cache is None else {"cache": cache}), **settings)
    return out[:, inputs["input_ids"].shape[1] :]


def info(layers: int = 2, query_heads: int = 6, heads: int = 2, dim: int = 8) -> ModelInfo:
    """A model's geometry without a model."""
    rope = Rope(1.0 / 10000 ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))

    def output_weight(layer: int) -> Tensor:
        generator = torch.Generator().manual_seed(layer)
        return torch.randn(query_heads, dim, 12, generator=generator)

    return ModelInfo(layers, query_heads, heads, dim, dim**-0.5, rope, output_weight, tuple(range(layers)))


def observation(
    lengths: list[int], seed: int = 0, body: Tensor | None = None, dtype: torch.dtype = torch.float32, **geometry: int
) -> Observation:
    """A random observation of left-padded rows; by default everything valid is body."""
    model = info(**geometry)
    generator = torch.Generator().manual_seed(seed)
    rows, tokens = len(lengths), max(lengths)
    valid = torch.stack([torch.arange(tokens) >= tokens - length for length in lengths])
    positions = (valid.cumsum(1) - 1).clamp_min(0)

    def random(heads: int) -> Tensor:
        return torch.randn(rows, heads, tokens, model.head_dim, generator=generator).to(dtype)

    layers = tuple(
        LayerObservation(random(model.kv_heads), random(model.kv_heads), random(model.query_heads))
        for _ in range(model.layers)
    )
    return Observation(layers, positions, valid, valid if body is None else body, model)
