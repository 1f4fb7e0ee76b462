"""Tiny random models for the laws of pipelines."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCABULARY, HIDDEN, LAYERS = 509, 64, 2


@cache
def tiny_model(family: str = "llama") -> PreTrainedModel:
    """A random model of 2 layers, 4 query heads, 2 KV heads and head dimension 16, in fp32 and the same in every
    process. Families: llama, qwen3. Made once: laws must leave it as it is."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    classes = {"llama": (LlamaForCausalLM, LlamaConfig), "qwen3": (Qwen3ForCausalLM, Qwen3Config)}
    model_class, config_class = classes[family]
    config = config_class(
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
        initializer_range=0.2,  # the usual 0.02 makes logits so small that every difference drowns
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config).eval()
        for name, weight in model.named_parameters():
            if "norm" in name:
                # Trained norms differ from channel to channel; with ones all keys of Qwen 3 would be equally long.
                weight.data.mul_(1 + 0.3 * torch.randn(weight.shape))
        return model
