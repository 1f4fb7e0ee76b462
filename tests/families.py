"""Every causal language model of transformers, made tiny: which of them there are, and what each needs to be small.

`kinds()` are transformers' own names. A model is made of the sizes in SMALL that its configuration knows, and of what
CHANGES says; LEFT_OUT says why some are not made."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

LAYERS = 2
SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.1,
    "sliding_window": 16,
    # The names of older models.
    "n_embd": 64,
    "n_layer": LAYERS,
    "n_head": 4,
    "n_positions": 512,
    "d_model": 64,
    "n_heads": 4,
    "n_layers": LAYERS,
    "ffn_dim": 96,
    "ffn_hidden_size": 96,
    "num_layers": LAYERS,
    "num_heads": 4,
    "decoder_layers": LAYERS,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    # Experts.
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    # What recurs.
    "mamba_d_ssm": 64,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    # Latent attention.
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
MIXED = ["sliding_attention", "full_attention"]
HYBRID = ["linear_attention", "full_attention"]
# The head size follows from those of latent attention, which has as many KV heads as query heads.
LATENT = {"head_dim": ..., "num_key_value_heads": 4}
WHOLE = {"sliding_window": None}  # as most checkpoints of these have it
CHANGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"), LATENT),
    **dict.fromkeys(("glm_moe_dsa", "minicpm3", "sarvam_mla", "youtu"), LATENT),
    **dict.fromkeys(("mistral", "mixtral", "phi3", "phimoe", "starcoder2", "qwen2_moe", "doge"), WHOLE),
    "ministral3": WHOLE,
    **{kind: {"layer_types": MIXED} for kind in ("gemma2", "gemma3_text", "gemma4_unified_text", "cohere2")},
    **{kind: {"layer_types": MIXED} for kind in ("olmo3", "exaone4", "afmoe", "cohere2_moe", "exaone_moe")},
    **{kind: {"layer_types": MIXED} for kind in ("kolibri1", "ministral")},
    "lara_mini": {"layer_types": HYBRID},
    "llama4_text": {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]},
    **{kind: {"layer_types": HYBRID} for kind in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")},
    "bailing_hybrid": {"layer_types": HYBRID, **LATENT},
    "bamba": {"attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 8},
    "dots1": {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "falcon_h1": {"mamba_d_head": 8},
    "gemma4_text": {
        "layer_types": MIXED,
        "vocab_size_per_layer_input": 97,
        "hidden_size_per_layer_input": 16,
        "num_kv_shared_layers": 0,
        "global_head_dim": 16,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": HYBRID, "position_embedding_type": "rope"},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "kimi_linear": {"layer_types": HYBRID, **LATENT},
    **{kind: {"layer_types": ["conv", "full_attention"]} for kind in ("lfm2_moe", "lfm3")},
    "mamba2": {"head_dim": 32, "n_groups": 1},
    "xmod": {"default_language": "en_XX"},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "dots3_note_text": LATENT,
    "gemma3n_text": {
        "layer_types": MIXED * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
        "vocab_size_per_layer_input": 97,
        "hidden_size_per_layer_input": 16,
        "activation_sparsity_pattern": None,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"],
        "head_dim": ...,
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
    },
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [32, 32], "axial_pos_shape": [16, 32]},
    "zamba": {
        "layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "mamba", "hybrid"],
        "num_hidden_layers": 6,
        "mamba_d_state": 8,
        "num_key_value_heads": 4,
        "head_dim": ...,
    },
    "zaya": {"num_experts_per_tok": 1},
}
TEXT = "its text model is listed under a name of its own"
OTHER = "it belongs to a model of images or speech"
FAILS = "a small one does not run with transformers' own cache"
LEFT_OUT: dict[str, str] = {
    **dict.fromkeys(("blt", "fuyu", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "got_ocr2", "llama4"), TEXT),
    **dict.fromkeys(("dots3_note", "emu3", "mllama", "phi4_multimodal"), TEXT),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen4_exp"), TEXT),
    **dict.fromkeys(("git", "moshi", "moss_transcribe_diarize", "musicgen", "musicgen_melody"), OTHER),
    **dict.fromkeys(("trocr", "whisper"), OTHER),
    **dict.fromkeys(("cohere_compass_text", "dbrx", "dory", "inkling2_text", "inkling2_loop_text"), FAILS),
    **dict.fromkeys(("longcat_flash", "qwen4_exp_text", "xlstm"), FAILS),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), "it drafts for another model"),
}


def kinds() -> list[str]:
    """transformers' names of the models that are made."""
    return [kind for kind in CLASSES if kind not in LEFT_OUT]


def make(kind: str) -> PreTrainedModel:
    """A tiny model with random weights."""
    config: Any = CONFIG_MAPPING[kind]
    known = {*inspect.signature(config).parameters, *config.attribute_map}
    sizes = {name: value for name, value in SMALL.items() if name in known}
    sizes |= CHANGES.get(kind, {})
    names: Any = CLASSES[kind]
    torch.manual_seed(0)
    model: Any = getattr(transformers, names if isinstance(names, str) else names[0])
    made: PreTrainedModel = model(config(**{name: value for name, value in sizes.items() if value is not ...}))
    return made.eval()
