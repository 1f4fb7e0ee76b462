"""What a transformers model tells of itself, and whether its attention is of a kind that kvframe knows."""

from __future__ import annotations

import hashlib
import sys
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from kvframe.arguments import expect
from kvframe.errors import ModelError
from kvframe.hf.reading import own_reading
from kvframe.placement import on
from kvframe.rope import Rope
from kvframe.types import ModelInfo

T = TypeVar("T")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def compressible_layers(model: PreTrainedModel) -> tuple[int, ...]:
    """Indices of the layers with full attention. Sliding-window and linear layers bound their memory themselves.

    Raises ModelError if there are none."""
    layers = DynamicCache(config=model.config).layers
    found = tuple(i for i, layer in enumerate(layers) if type(layer) is DynamicLayer)
    if not found:
        kinds = ", ".join(sorted({type(layer).__name__ for layer in layers})) or "none"
        raise ModelError(
            f"{type(model).__name__} has no layer with full attention (its cache layers are: {kinds}), so nothing "
            "can be compressed; if the model allows it, set config.sliding_window = None before loading."
        )
    return found


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The model's attention modules."""
    return [module for module in model.modules() if _is_attention(module)]


def model_info(model: PreTrainedModel) -> ModelInfo:
    """Geometry, RoPE and output weights of the compressible layers.

    Raises ModelError, saying which part of the contract does not hold, and InputError for what is no model."""
    # Wrappers such as those of PEFT pass on what they are asked for.
    expect("model", model, nn.Module, "a transformers model, as load_model returns with its tokenizer")
    if not getattr(model, "_supports_attention_backend", False):
        raise _unknown(model, "it does not take its attention function from transformers' AttentionInterface")
    layer_ids = compressible_layers(model)
    known: list[Any] = attention_modules(model)
    attention = {module.layer_idx: module for module in known}
    missing = [i for i in layer_ids if i not in attention]
    if missing:
        raise _unknown(model, f"layer {missing[0]} has no attention module with o_proj, head_dim and scaling")
    modules = [attention[i] for i in layer_ids]
    devices = tuple(map(_device, modules))
    home = next((device for device in devices if device.type != "meta"), None)

    def at_home(value: T) -> T:
        return value if home is None else on(value, home)

    config = model.config.get_text_config(decoder=True)
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    geometry = {(m.head_dim, m.o_proj.in_features // m.head_dim, float(m.scaling)) for m in modules}
    if len(geometry) != 1:
        raise _unknown(model, "its full-attention layers differ in head size, head count or scale")
    head_dim, query_heads, scale = geometry.pop()

    def output_weight(layer: int) -> Tensor:
        weight = at_home(_held(modules[layer].o_proj, "weight"))  # [hidden, Hq * D]
        return weight.T.reshape(query_heads, head_dim, -1)

    def projection_bias(layer: int) -> tuple[Tensor | None, Tensor | None]:
        return at_home(_biases(modules[layer]))

    def identify() -> str:
        return _fingerprint(modules, (len(layer_ids), query_heads, kv_heads, head_dim, scale, type(model).__name__))

    return ModelInfo(
        layers=len(layer_ids),
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=scale,
        rope=at_home(_rope(model, modules[0])),
        output_weight=output_weight,
        layer_ids=layer_ids,
        name=type(model).__name__,
        projection_bias=projection_bias,
        devices=devices if all(device.type != "meta" for device in devices) else (),
        identify=identify,
        read=own_reading(model),
    )


def _biases(attention: Any) -> tuple[Tensor | None, Tensor | None]:
    """The biases of the key and value projections, where nothing comes between projection and cache but RoPE."""

    def bias(projection: str, norm: str) -> Tensor | None:
        linear = getattr(attention, projection, None)
        plain = isinstance(linear, nn.Linear) and getattr(attention, norm, None) is None
        return _held(linear, "bias") if plain and linear is not None and linear.bias is not None else None

    return bias("k_proj", "k_norm"), bias("v_proj", "v_norm")


def layer_devices(model: PreTrainedModel) -> dict[int, torch.device]:
    """Where each layer with attention runs, by its index in the model."""
    known: list[Any] = attention_modules(model)
    return {module.layer_idx: _device(module) for module in known}


def _device(module: Any) -> torch.device:
    """Where a module runs: where its weights are, unless accelerate brings them elsewhere for the call."""
    hooks = (getattr(part, "_hf_hook", None) for part in (module, module.o_proj))
    device = next((found for hook in hooks if (found := getattr(hook, "execution_device", None)) is not None), None)
    if device is None:
        weight: Tensor = module.o_proj.weight
        return weight.device
    # accelerate numbers GPUs; a name without a number is the current one, which tensors tell by its number.
    named = torch.device(f"cuda:{device}" if isinstance(device, int) else device)
    return torch.empty(0, device=named).device if named.index is None else named


def _held(linear: nn.Linear, name: str) -> Tensor:
    """A module's "weight" or "bias", also while accelerate keeps it elsewhere between calls."""
    kept: Any = getattr(getattr(linear, "_hf_hook", None), "weights_map", None)
    tensor: Tensor = getattr(linear, name).detach()
    return kept[name] if tensor.is_meta and kept is not None else tensor


def _fingerprint(modules: list[Any], geometry: tuple[Any, ...]) -> str:
    """12 hexadecimal digits of the geometry and of 64 output weights of each layer, rounded to bfloat16, so that a
    model has the same in every dtype; "" for a model without weights."""
    digest = hashlib.sha256(repr(geometry).encode())
    for module in modules:
        weight = _held(module.o_proj, "weight").flatten()
        if weight.device.type == "meta":
            return ""
        some = weight[:: max(1, weight.numel() // 64)][:64].to("cpu", torch.bfloat16)
        digest.update(some.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]


def _is_attention(module: nn.Module) -> bool:
    has_all = all(hasattr(module, name) for name in ("layer_idx", "head_dim", "scaling"))
    return has_all and isinstance(getattr(module, "o_proj", None), nn.Linear)


def _rope(model: PreTrainedModel, attention: Any) -> Rope:
    """The model's rotation, held against what the model's own function does."""
    rotary = next((m for n, m in model.named_modules() if n.endswith("rotary_emb") and "vision" not in n), None)
    function = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    if rotary is None or function is None:
        raise _unknown(model, "it has no rotary_emb module with apply_rotary_pos_emb beside its attention")
    kind: str = ""
    if not hasattr(rotary, "inv_freq"):
        kind = "full_attention"
    prefix = f"{kind}_" if kind else ""
    types: Any = getattr(rotary, "rope_type", "default")
    rope_type = types.get(kind, "default") if isinstance(types, dict) else types
    if rope_type not in ROPE_TYPES:
        raise _unknown(model, f"its RoPE is of type '{rope_type}', known are {', '.join(ROPE_TYPES)}")
    inv_freq = getattr(rotary, f"{prefix}inv_freq", None)
    if inv_freq is None:
        raise _unknown(model, "its rotary_emb module has no inv_freq")
    rope = Rope(inv_freq.detach().float(), float(getattr(rotary, f"{prefix}attention_scaling", 1.0)))
    device = inv_freq.device
    if device.type == "meta":
        return rope
    x = torch.linspace(-1, 1, 3 * attention.head_dim, device=device).view(1, 1, 3, attention.head_dim)
    positions = torch.tensor([[0, 5, 1000]], device=device)
    with torch.no_grad():
        cos, sin = rotary(x, positions, *([kind] if kind else []))
        turned = function(x, x, cos, sin)[0]
    if turned.shape != x.shape or not torch.allclose(turned.float(), rope.rotate(x, positions), atol=1e-4):
        raise _unknown(model, "its rotation is not the half-split one")
    return rope


def _unknown(model: PreTrainedModel, reason: str) -> ModelError:
    return ModelError(
        f"{type(model).__name__} has no attention contract that kvframe knows: {reason}; use a model with plain rotary "
        "attention such as Llama, Qwen, Mistral or Gemma 3."
    )
