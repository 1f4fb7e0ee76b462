"""The attention function registered with transformers. It reads its state from the cache layer that comes with the
call, so models and caches can be used in any order; without one it is the model's ordinary attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from kvframe import capping
from kvframe.contracts import PASSED_ON, failure
from kvframe.errors import ModelError
from kvframe.hf.masks import following
from kvframe.ops import dense_attention, merge_attention, merge_sinks

if TYPE_CHECKING:
    from kvframe.hf.layer import CompressedLayer

LAYER = "kvframe_layer"
PREFIX = "kvframe_"
UNSUPPORTED = ("position_bias", "head_mask")
BASES = ("sdpa", "eager")


def use_kvframe_attention(model: PreTrainedModel) -> None:
    """Set the model's attention implementation to kvframe's, which does what the one before did wherever no kvframe
    cache is in play. Raises ModelError for an implementation without a counterpart."""
    current = model.config._attn_implementation or "sdpa"
    if current.startswith(PREFIX):
        return
    if current not in BASES:
        raise ModelError(
            f"The attention implementation '{current}' has no kvframe counterpart; call "
            "model.set_attn_implementation('sdpa') first."
        )
    name = PREFIX + current
    # The mask function is registered with the attention: a name without one silently gets no mask.
    AttentionInterface.register(name, partial(kvframe_attention, base=current))
    AttentionMaskInterface.register(name, following(ALL_MASK_ATTENTION_FUNCTIONS[current]))
    model.set_attn_implementation(name)


def gives_weights(model: PreTrainedModel) -> bool:
    """Whether the model's attention implementation, which is kvframe's, returns weights where nothing is compressed."""
    return (model.config.get_text_config(decoder=True)._attn_implementation or "").endswith("eager")


def _base(module: nn.Module, name: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    if name == "sdpa":
        return sdpa_attention_forward
    import sys

    # Each modeling file brings its own eager function.
    eager: Callable[..., tuple[Tensor, Tensor | None]] = sys.modules[type(module).__module__].eager_attention_forward
    return eager


def kvframe_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    base: str = "sdpa",
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend `query [B, Hq, Q, D]`. `key, value [B, H, R, D]` are the exact end of the cache (all of it before the
    first compression), `attention_mask` the mask whose last R columns belong to them. Returns `[B, Q, Hq, D]` and the
    weights that the ordinary attention gives, None where there are parts."""
    layer: CompressedLayer | None = kwargs.pop(LAYER, None)
    if (listen := getattr(layer, "listen", None)) is not None:  # one that only looks on; see `kvframe.hf.probe`
        listen(module, query, scaling, kwargs)
        layer = None
    if layer is None:
        return _base(module, base)(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ModelError(
                f"{type(module).__name__} uses '{name}' in its attention, which kvframe does not support yet."
            )
    layer.cache.reached(module)
    layer.watch_query(query, attention_mask)
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    mask = None if attention_mask is None else attention_mask[..., -key.shape[2] :]
    weights = None
    if layer.parts:
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
        out, weights = _base(module, base)(module, query, key, value, mask, scaling=scaling, **kwargs)
    layer.watch_output(out)
    return out, weights


def as_bias(mask: Tensor) -> Tensor:
    """A boolean mask (True = visible) as fp32 bias of 0 and -inf; a float mask with its lowest values turned to
    -inf."""
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -torch.inf)
    return mask.float().masked_fill(mask <= torch.finfo(mask.dtype).min / 2, -torch.inf)
