"""Tiny random models in which some layers recur: linear attention, Mamba, short convolutions."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 96,
}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 8, "mamba_chunk_size": 16}
# All experts take part: which of them do would hang on roundings.
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 24}
DELTA = {
    "head_dim": 16,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
LINEAR = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
CONV = ["conv", "full_attention", "conv", "full_attention"]
SHARED = {"shared_expert_intermediate_size": 24}

# The prefix of its classes, its config class, what makes it small.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3Next", "Qwen3NextConfig", {**DELTA, **EXPERTS, **SHARED, "layer_types": LINEAR}),
    "qwen3_5": ("Qwen3_5", "Qwen3_5TextConfig", {**DELTA, "layer_types": LINEAR}),
    "qwen3_5_moe": ("Qwen3_5Moe", "Qwen3_5MoeTextConfig", {**DELTA, **EXPERTS, **SHARED, "layer_types": LINEAR}),
    "jamba": (
        "Jamba",
        "JambaConfig",
        {
            "num_experts": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
        },
    ),
    "bamba": ("Bamba", "BambaConfig", {**MAMBA2, "attn_layer_indices": [1, 3]}),
    "falcon_h1": (
        "FalconH1",
        "FalconH1Config",
        {**MAMBA2, "mamba_d_ssm": 128, "key_multiplier": 0.5, "lm_head_multiplier": 0.05, "head_dim": 16},
    ),
    "granite4": (
        "GraniteMoeHybrid",
        "GraniteMoeHybridConfig",
        {
            **MAMBA2,
            "layer_types": LINEAR,
            "num_local_experts": 4,
            "num_experts_per_tok": 4,
            "shared_intermediate_size": 24,
            "attention_multiplier": 0.2,
            "logits_scaling": 6.0,
        },
    ),
    "granite4_rope": (
        "GraniteMoeHybrid",
        "GraniteMoeHybridConfig",
        {
            **MAMBA2,
            "layer_types": LINEAR,
            "num_local_experts": 0,
            "shared_intermediate_size": 24,
            "attention_multiplier": 0.2,
            "position_embedding_type": "rope",
        },
    ),
    "lfm2": ("Lfm2", "Lfm2Config", {"layer_types": CONV, "block_auto_adjust_ff_dim": False}),
    "lfm2_moe": ("Lfm2Moe", "Lfm2MoeConfig", {**EXPERTS, "layer_types": CONV, "num_dense_layers": 2}),
    "lfm3": (
        "Lfm3",
        "Lfm3Config",
        {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "head_dim": 16},
    ),
    "lara_mini": ("LaraMini", "LaraMiniConfig", {**DELTA, **EXPERTS, **SHARED}),
    "olmo_hybrid": (
        "OlmoHybrid",
        "OlmoHybridConfig",
        {
            "layer_types": LINEAR,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 20,
        },
    ),
    "nemotron_h": (
        "NemotronH",
        "NemotronHConfig",
        {
            "layers_block_type": ["mamba", "attention", "mlp", "mamba", "attention", "moe"],
            "head_dim": 16,
            "ssm_state_size": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "n_groups": 2,
            "chunk_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 24,
        },
    ),
    "zamba": (
        "Zamba",
        "ZambaConfig",
        {
            "layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "mamba", "hybrid"],
            "num_hidden_layers": 6,
            "mamba_d_state": 8,
            "num_key_value_heads": 4,
        },
    ),
    "zamba2": (
        "Zamba2",
        "Zamba2Config",
        {
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "mamba_d_state": 8,
            "n_mamba_heads": 4,
            "num_key_value_heads": 4,
            "chunk_size": 16,
            "use_mem_rope": True,
            "num_mem_blocks": 1,
        },
    ),
    "zaya": ("Zaya", "ZayaConfig", {**EXPERTS, "num_experts_per_tok": 1, "head_dim": 16, "router_hidden_size": 16}),
    "minimax": (
        "MiniMax",
        "MiniMaxConfig",
        {"layer_types": LINEAR, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 16},
    ),
    "recurrent_gemma": ("RecurrentGemma", "RecurrentGemmaConfig", {}),
    "kimi_linear": (
        "KimiLinear",
        "KimiLinearConfig",
        {
            "layer_types": LINEAR,
            "mlp_layer_types": ["dense"] * 4,
            "kv_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "qk_nope_head_dim": 16,
            "num_key_value_heads": 4,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "head_dim": 16,
        },
    ),
    "inkling": (
        "Inkling",
        "InklingTextConfig",
        {
            "layer_types": ["hybrid_sliding", "hybrid"] * 2,
            "mlp_layer_types": ["dense"] * 4,
            "head_dim": 16,
            "swa_head_dim": 16,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "d_rel": 4,
            "rel_extent": 64,
            "sliding_window_size": 16,
        },
    ),
    "qwen4_exp": (
        "Qwen4Exp",
        "Qwen4ExpTextConfig",
        {
            **DELTA,
            **EXPERTS,
            **SHARED,
            "layer_types": LINEAR,
            "hc_count": 2,
            "hc_lowrank": 8,
            "indexer_n_heads": 4,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 16,
            "indexer_compress_ratio": 4,
        },
    ),
    "bailing_hybrid": (
        "BailingHybrid",
        "BailingHybridConfig",
        {
            "layer_types": LINEAR,
            "mlp_layer_types": ["dense"] * 4,
            "kv_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "qk_nope_head_dim": 16,
            "num_key_value_heads": 4,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "head_dim": 16,
        },
    ),
}


@cache
def hybrid_model(name: str) -> PreTrainedModel:
    """A random model of the family, in eval mode, one for all tests: they leave it as it is."""
    prefix, config, extra = FAMILIES[name]
    torch.manual_seed(0)
    shape = {**SHAPE, **extra}
    if name == "nemotron_h":
        shape.pop("num_hidden_layers")
    made = getattr(transformers, f"{prefix}ForCausalLM")(getattr(transformers, config)(**shape))
    return made.eval()


# Those that are not served, and what the sentence says of them.
REFUSED = {
    "minimax": "takes no cache but its own kind, MiniMaxCache",
    "recurrent_gemma": "no layer with full attention .* DynamicSlidingWindowLayer, LinearAttentionLayer",
    "qwen4_exp": "no layer with full attention .* DynamicIndexedLayer, LinearAttentionLayer",
    "kimi_linear": "a token has 1 keys of 24 channels, but 1 values of 8",
    "bailing_hybrid": "a token has 1 keys of 24 channels, but 1 values of 8",
    "inkling": "layer 1 gives its attention function a 'position_bias'",
}
SERVED = [name for name in FAMILIES if name not in REFUSED]
# Their recurrent layers, given several tokens beside a state, begin anew.
BEGIN_ANEW = ["jamba", "zamba"]
