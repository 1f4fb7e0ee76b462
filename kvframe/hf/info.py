"""What a transformers model tells of itself, and whether its attention is of a kind that kvframe knows."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvframe.arguments import expect
from kvframe.errors import ModelError
from kvframe.hf import rotation
from kvframe.hf.attention import UNSUPPORTED
from kvframe.hf.finding import attention_by_layer, blocks_of, compressible_layers, fresh_layers
from kvframe.hf.fingerprint import fingerprint
from kvframe.hf.logits import shared_softcap, sinks_of
from kvframe.hf.probe import Probe, Seen, probe, unwrapped
from kvframe.hf.projections import check_linear, linear_bias, linear_weight, output_projection
from kvframe.hf.reading import own_reading
from kvframe.placement import on
from kvframe.rope import Rope, of_layers
from kvframe.types import ModelInfo

T = TypeVar("T")


def model_info(model: PreTrainedModel) -> ModelInfo:
    """Geometry, RoPE and output weights of the compressible layers. A model with weights reads one token twice for it,
    the first time; see `kvframe.hf.probe`.

    Raises ModelError, saying which part of the contract does not hold, and InputError for what is no model."""
    # Wrappers such as those of PEFT pass on what they are asked for.
    expect("model", model, nn.Module, "a transformers model, as load_model returns with its tokenizer")
    layer_ids = compressible_layers(model)
    seen = probe(model) if _can_run(model) else None
    modules = _modules(model, layer_ids, seen)
    projections = [_projection(model, module, layer) for module, layer in zip(modules, layer_ids, strict=True)]
    shapes = {
        _declared(model, module) if seen is None else _shape(model, seen, layer)
        for module, layer in zip(modules, layer_ids, strict=True)
    }
    if len(shapes) != 1:
        raise _unknown(model, "its full-attention layers differ in head size, head count or scale")
    query_heads, kv_heads, head_dim, scale = shapes.pop()
    if seen is not None:
        embeddings: Any = model.get_input_embeddings()
        hidden = int(embeddings.weight.shape[-1])
        for layer, projection in zip(layer_ids, projections, strict=True):
            owner = f"layer {layer} of {type(model).__name__}"
            check_linear(projection, query_heads * head_dim, hidden, seen.near[layer].keys, owner)
    devices = tuple(map(_device, modules))
    home = next((device for device in devices if device.type != "meta"), None)

    def at_home(value: T) -> T:
        return value if home is None else on(value, home)

    def like(layer: int) -> Tensor:
        return torch.empty(0) if seen is None else seen.near[layer_ids[layer]].keys

    def output_weight(layer: int) -> Tensor:
        weight = at_home(linear_weight(projections[layer], query_heads * head_dim, like(layer)))  # [Hq * D, hidden]
        return weight.reshape(query_heads, head_dim, -1)

    rotations = _rotations(model, layer_ids, seen)
    ropes = of_layers([one.rope for one in rotations])
    order = next((one.order(head_dim) for one in rotations if one.interleaved), None)

    plain = [] if seen is None else [_plainly_added(seen.near[i], ropes[at], order) for at, i in enumerate(layer_ids)]

    def projection_bias(layer: int) -> tuple[Tensor | None, Tensor | None]:
        if seen is None:
            return None, None
        one, added = seen.near[layer_ids[layer]], plain[layer]
        key, value = (_bias(modules[layer], name, one) if added[name] else None for name in ("k_proj", "v_proj"))
        return at_home((_ordered(key, order), value))

    name = type(unwrapped(model)).__name__

    settings = [{} if seen is None else seen.near[layer].settings for layer in layer_ids]

    def identify() -> str:
        return fingerprint(model, (len(layer_ids), query_heads, kv_heads, head_dim, scale, name))

    return ModelInfo(
        layers=len(layer_ids),
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=scale,
        rope=at_home(ropes),
        output_weight=output_weight,
        layer_ids=layer_ids,
        name=name,
        projection_bias=projection_bias,
        channel_order=order,
        devices=devices if all(device.type != "meta" for device in devices) else (),
        identify=identify,
        read=own_reading(model),
        softcap=shared_softcap(settings, name),
        sinks=lambda layer: at_home(sinks_of(settings[layer])),
    )


def _can_run(model: PreTrainedModel) -> bool:
    """Whether the model has weights, here or wherever accelerate keeps them between calls."""
    if any(tensor.device.type != "meta" for tensor in model.parameters()):
        return True
    return any(hasattr(module, "_hf_hook") for module in model.modules())


def _modules(model: PreTrainedModel, layer_ids: tuple[int, ...], seen: Probe | None) -> list[Any]:
    """The attention module of each layer. Raises ModelError if there is none, or its attention is shared or hidden."""
    if seen is None:
        known = attention_by_layer(model)
        missing = [layer for layer in layer_ids if layer not in known]
    else:
        known = {layer: one.module for layer, one in seen.near.items()}
        missing = [layer for layer in layer_ids if layer not in seen.near]
    if missing:
        raise _unknown(model, f"layer {missing[0]} has no attention module that puts keys and values into a cache")
    if seen is not None:
        kept = fresh_layers(model)
        sharing = [i for i in seen.sharing if i >= len(kept) or type(kept[i]).__name__ == "DummyLayer"]
        if sharing:
            raise _unknown(
                model, f"layer {sharing[0]} keeps no keys and values of its own, but attends those of an earlier layer"
            )
        for layer in layer_ids:
            _check_told(model, seen.near[layer], layer)
    return [known[layer] for layer in layer_ids]


def _check_told(model: PreTrainedModel, one: Seen, layer: int) -> None:
    """Raise ModelError unless a layer's attention can be reached, is plain, and knows one position a token."""
    if one.told is None:
        raise _unknown(model, f"layer {layer} does not pass its attention arguments to cache.update")
    if one.module is None:
        raise _unknown(model, "it does not take its attention function from transformers' AttentionInterface")
    for name in UNSUPPORTED:
        if one.settings.get(name) is not None:
            raise _unknown(model, f"layer {layer} gives its attention function a '{name}'")
    mask = one.settings.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[1] > 1:
        raise _unknown(model, f"layer {layer} gives its attention a mask of its own for each of {mask.shape[1]} heads")
    positions = one.told.get("position_ids")
    if positions is not None and positions.ndim != 2:
        raise _unknown(
            model,
            f"its position_ids have {positions.ndim} dimensions, where kvframe knows one position a token, [B, T]",
        )


def _projection(model: PreTrainedModel, attention: Any, layer: int) -> nn.Module:
    found = output_projection(attention)
    if found is None:
        kind = type(attention).__name__
        raise _unknown(model, f"the attention of layer {layer}, a {kind}, has no output projection of a known name")
    return found


def _declared(model: PreTrainedModel, module: Any) -> tuple[int, int, int, float]:
    """Query heads, KV heads, head size and scale as configuration and module say: of a model without weights."""
    config = model.config.get_text_config(decoder=True)
    dim = getattr(module, "head_dim", None) or module.head_size
    projection: Any = output_projection(module)
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    heads = projection.in_features // dim if isinstance(projection, nn.Linear) else config.num_attention_heads
    return heads, kv_heads, dim, float(getattr(module, "scaling", dim**-0.5))


def _shape(model: PreTrainedModel, seen: Probe, layer: int) -> tuple[int, int, int, float]:
    """The same as it was seen. Raises ModelError unless each token has one key and one value of one size."""
    one = seen.near[layer]
    keys, values, queries = tuple(one.keys.shape), tuple(one.values.shape), one.queries
    if one.calls > 1:
        raise _unknown(model, f"layer {layer} calls its attention function {one.calls} times for one token")
    if values != keys:
        raise _unknown(
            model,
            f"in layer {layer} a token has {keys[1]} keys of {keys[3]} channels, but {values[1]} values of {values[3]}",
        )
    if queries[3] != keys[3] or queries[1] % keys[1]:
        raise _unknown(
            model,
            f"in layer {layer} a token has {queries[1]} queries of {queries[3]} channels for {keys[1]} keys of "
            f"{keys[3]}",
        )
    return queries[1], keys[1], keys[3], one.scale


def _rotations(model: PreTrainedModel, layer_ids: tuple[int, ...], seen: Probe | None) -> list[rotation.Rotation]:
    """The rotation of each layer, as its keys show it; of a model without weights as its modules say."""
    offers = rotation.offered(model)
    if seen is None:
        return [offers[0] if offers else rotation.NONE] * len(layer_ids)
    found = []
    for layer in layer_ids:
        keys = torch.cat([seen.near[layer].keys, seen.there[layer].keys])[:, :, 0]  # [2, H, D]
        likely = rotation.likeliest(offers, keys, (0, seen.far), seen.noise(layer))
        # Where positions are in the embeddings nothing is the same at both, but keys are still what was projected.
        if likely is None and not offers and seen.there[layer].keys_as_projected:
            likely = rotation.NONE
        if not bool(keys.isfinite().all()):  # the model overflows; that is for whoever reads a prompt to say
            likely = offers[0] if offers else rotation.NONE
        if likely is None:
            raise _unknown(model, f"the keys of layer {layer} are turned otherwise than any of its rotary modules says")
        if likely.kind in rotation.CHANGING:
            raise _unknown(
                model, f"its RoPE is of type '{likely.kind}', whose frequencies change with the length of the prompt"
            )
        found.append(likely)
    orders = {tuple(one.order(keys.shape[-1]).tolist()) for one in found if len(one.rope.inv_freq)}
    if len(orders) > 1:
        raise _unknown(model, "its layers pair the channels that they rotate differently")
    return found


def _ordered(rows: Tensor | None, order: Tensor | None) -> Tensor | None:
    """Rows of heads `[H * D]` with the channels of each in this order."""
    if rows is None or order is None:
        return rows
    return rows.view(-1, len(order))[:, order.to(rows.device)].reshape(-1)


def _plainly_added(one: Seen, rope: Rope, order: Tensor | None) -> dict[str, bool]:
    """Whether nothing comes between each projection and the cache but RoPE, so that its bias is in what is cached."""
    origin = one.keys.new_zeros(1, 1, dtype=torch.int64)
    keys = one.keys if order is None else one.keys[..., order.to(one.keys.device)]
    cached = {"k_proj": rope.unrotate(keys, origin), "v_proj": one.values}
    found = {}
    for name, tensor in cached.items():
        projected = one.projected[name][0].reshape(-1).float() if name in one.projected else None
        given = _ordered(projected, order if name == "k_proj" else None)
        if given is None:
            found[name] = False
            continue
        mine = tensor.transpose(1, 2).reshape(-1).float()
        rounding = 8 * max(torch.finfo(one.keys.dtype).eps, torch.finfo(torch.float32).eps) * given.abs().max()
        # NaN compares as False.
        found[name] = given.shape == mine.shape and bool((given - mine).abs().max() <= rounding)
    return found


def _bias(attention: Any, name: str, one: Seen) -> Tensor | None:
    """The bias of a projection, None if it has none."""
    module: Any = getattr(attention, name, None)
    if getattr(getattr(module, "base_layer", module), "bias", None) is None:
        return None
    return linear_bias(module, one.projected[name][1], one.keys)


def layer_devices(model: PreTrainedModel) -> dict[int, torch.device]:
    """Where each layer runs, by its index in the model."""
    modules = {**dict(enumerate(blocks_of(model))), **attention_by_layer(model)}
    return {index: _device(module) for index, module in modules.items()}


def _device(module: nn.Module) -> torch.device:
    """Where a module runs: where its weights are, unless accelerate brings them elsewhere for the call."""
    hooks = (getattr(part, "_hf_hook", None) for part in module.modules())
    device = next((found for hook in hooks if (found := getattr(hook, "execution_device", None)) is not None), None)
    if device is None:
        tensors = [*(output_projection(module) or module).parameters(), *module.buffers()]
        return tensors[0].device if tensors else torch.device("cpu")
    # accelerate numbers GPUs; a name without a number is the current one, which tensors tell by its number.
    named = torch.device(f"cuda:{device}" if isinstance(device, int) else device)
    return torch.empty(0, device=named).device if named.index is None else named


def _unknown(model: PreTrainedModel, reason: str) -> ModelError:
    return ModelError(
        f"{type(model).__name__} has no attention contract that kvframe knows: {reason}; docs/models.md lists the "
        "models that are served."
    )
