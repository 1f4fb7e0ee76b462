"""kvframe's attention. It reads its state from the cache layer that comes with the call, so models and caches can be
used in any order. Nothing is set on a model: transformers hands out each attention function as before, and a call that
comes without a kvframe layer goes to that function as it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from inspect import unwrap
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import flash_attention_mask, flex_attention_mask

from kvframe import capping
from kvframe.contracts import PASSED_ON, failure
from kvframe.errors import ModelError
from kvframe.hf.masks import following
from kvframe.hf.precision import without_autocast
from kvframe.ops import dense_attention, merge_attention, merge_sinks

if TYPE_CHECKING:
    from kvframe.hf.layer import CompressedLayer

Attention = Callable[..., tuple[Tensor, Tensor | None]]

LAYER = "kvframe_layer"
UNSUPPORTED = ("position_bias", "head_mask")
# Masks that do not say for each query and column whether one sees the other.
UNKNOWN_MASKS = (flash_attention_mask, flex_attention_mask)


def use_kvframe_attention(model: PreTrainedModel) -> None:
    """Let calls of the model that come with a kvframe layer reach kvframe, whatever its attention implementation. What
    transformers has registered stays as it is; this is the same for all models, and done once. Raises ModelError if the
    masks of the implementation that is set are of a kind that kvframe cannot read."""
    current = model.config.get_text_config(decoder=True)._attn_implementation
    masks: Any = AttentionMaskInterface().get(current)
    if (masks if masks is None else unwrap(masks)) in UNKNOWN_MASKS:
        raise ModelError(
            f"The attention implementation '{current}' has no kvframe counterpart; call "
            "model.set_attn_implementation('sdpa') first."
        )
    if not hasattr(AttentionInterface.get_interface, "reaches_kvframe"):
        AttentionInterface.get_interface = _handing_out(AttentionInterface.get_interface)  # type: ignore[method-assign]
        look_up = AttentionMaskInterface.__getitem__
        AttentionMaskInterface.__getitem__ = lambda registry, name: following(look_up(registry, name))  # type: ignore[method-assign]


def gives_weights(model: PreTrainedModel) -> bool:
    """Whether the model's attention implementation returns weights where nothing is compressed."""
    return model.config.get_text_config(decoder=True)._attn_implementation == "eager"


def _handing_out(look_up: Callable[..., Attention]) -> Callable[..., Attention]:
    # Only this look-up sees each modeling file's own eager function, which is registered nowhere.
    @wraps(look_up)
    def get_interface(interface: AttentionInterface, attn_implementation: str, default: Attention) -> Attention:
        return partial(_attend, look_up(interface, attn_implementation, default))

    get_interface.reaches_kvframe = True  # type: ignore[attr-defined]
    return get_interface


def _attend(base: Attention, *args: Any, **kwargs: Any) -> Any:
    layer = kwargs.pop(LAYER, None)
    if (listen := getattr(layer, "listen", None)) is not None:  # one that only looks on; see `kvframe.hf.probe`
        settings = {**kwargs, "attention_mask": args[4] if len(args) > 4 else kwargs.get("attention_mask")}
        listen(args[0], args[1], settings.pop("scaling", None), settings)
        layer = None
    if layer is None:
        return base(*args, **kwargs)
    try:
        attended = kvframe_attention(layer, base, *args, **kwargs)
    except BaseException:
        layer.cache.take_back()
        raise
    layer.cache.passed(layer)
    return attended


@without_autocast
def kvframe_attention(
    layer: CompressedLayer,
    base: Attention,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend `query [B, Hq, Q, D]`, in the dtype of the keys. `key, value [B, H, R, D]` are the exact end of the cache
    (all of it before the first compression), `attention_mask` the mask whose last R columns belong to them, `base` the
    model's own function. Returns `[B, Q, Hq, D]`, in the dtype that the query came in, and the
    weights that the model's own function gives, None where there are parts."""
    if attention_mask is not None and getattr(attention_mask, "ndim", None) != 4:
        raise ModelError(
            f"{type(module).__name__} gives its attention a mask that is not [B, 1, Q, R], which kvframe cannot read; "
            "call model.set_attn_implementation('sdpa') first."
        )
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ModelError(
                f"{type(module).__name__} uses '{name}' in its attention, which kvframe does not support yet."
            )
    came, query = query.dtype, query.to(key.dtype)
    layer.cache.reached(module)
    layer.watch_query(query, attention_mask)
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if softcap != layer.cache.info.softcap:
        raise ModelError(
            f"{type(module).__name__} caps its logits with softcap {softcap}, but with {layer.cache.info.softcap} when "
            "this cache was made; make a new cache."
        )
    mask = None if attention_mask is None else attention_mask[..., -key.shape[2] :]
    weights = None
    # Where all was dropped there are no parts, but exact columns of some rows are gone, which the model does not know.
    if layer.parts or layer.cache.ledger.compressions:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        bias = layer.recent_bias(query.shape[2], mask)
        exact = dense_attention(query, key, value, scale, bias, softcap)
        # A `try` costs a step nothing, where a context manager would.
        try:
            asked, told = layer.ordered(query), capping.keywords(softcap)
            compressed = [part_kernel.attend(asked, part, scale, **told) for part_kernel, part in layer.kernels()]
            merged = merge_sinks(merge_attention([*compressed, exact]), sinks)[0]
        except PASSED_ON:
            raise
        except Exception as error:
            raise failure(error, layer.cache.kernel, *(part.encoder for part in layer.parts)) from error
        out = merged.to(query.dtype).transpose(1, 2).contiguous()
    else:
        out, weights = base(module, query, key, value, mask, scaling=scaling, **kwargs)
    layer.watch_output(out)
    return out.to(came), weights


def as_bias(mask: Tensor) -> Tensor:
    """A boolean mask (True = visible) as fp32 bias of 0 and -inf; a float mask with its lowest values turned to
    -inf."""
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -torch.inf)
    return mask.float().masked_fill(mask <= torch.finfo(mask.dtype).min / 2, -torch.inf)
