"""What tells one model from another: a hash over a sample of every tensor that its keys and values come from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvframe.hf.projections import held

PLACES, LENGTH = 4, 16  # of each tensor: so many runs of so many values, which cost a page each on a disk


def fingerprint(model: PreTrainedModel, geometry: tuple[Any, ...]) -> str:
    """12 hexadecimal digits of the geometry and of 64 values of each tensor of the model but its head, rounded to
    bfloat16, so that a model has the same in every dtype; what is packed in whole numbers counts as it is. Adapters
    count while they are active. "" for a model without weights."""
    digest = hashlib.sha256(repr(geometry).encode())
    for tensor in _tensors(model):
        if tensor.device.type == "meta":
            return ""
        digest.update(_sample(tensor))
    return digest.hexdigest()[:12]


def _sample(tensor: Tensor) -> bytes:
    """Runs of values at even distances, as bytes."""
    flat = tensor.reshape(-1) if tensor.is_contiguous() else tensor.flatten()
    if len(flat) > PLACES * LENGTH:
        starts = [(len(flat) - LENGTH) * place // (PLACES - 1) for place in range(PLACES)]
        flat = torch.cat([flat[start : start + LENGTH] for start in starts])
    flat = flat.to("cpu", torch.bfloat16) if flat.is_floating_point() and flat.element_size() > 1 else flat.to("cpu")
    return bytes(flat.contiguous().view(torch.uint8).numpy().tobytes())


def _tensors(model: PreTrainedModel) -> Iterator[Tensor]:
    """Parameters and stored buffers in the order of the modules, each once; not those of the head, which no key comes
    from, nor of adapters that are switched off or merged."""
    head = model.get_output_embeddings()
    skipped = set() if head is None else {id(part) for part in head.modules()}
    seen: set[int] = set()
    for module in model.modules():
        if hasattr(module, "active_adapters") and hasattr(module, "base_layer"):
            seen |= _idle(module)
            yield from (torch.tensor(factor) for factor in _factors(module))
    for module in model.modules():
        if id(module) in skipped:
            continue
        buffers = [name for name, _ in module.named_buffers(recurse=False)]
        stored = [name for name in buffers if name not in module._non_persistent_buffers_set]
        for name in (*(name for name, _ in module.named_parameters(recurse=False)), *stored):
            if id(getattr(module, name)) not in seen:
                seen.add(id(getattr(module, name)))
                yield from _inner(held(module, name))


def _inner(tensor: Tensor) -> Iterator[Tensor]:
    """What a tensor consists of: itself, or the parts of a quantised one."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _inner(getattr(tensor, name))
    else:
        yield tensor


def _working(layer: Any) -> tuple[str, ...]:
    """The adapters of an adapted layer that take part: none if they are off, or merged into the weight."""
    off = bool(getattr(layer, "disable_adapters", False)) or bool(getattr(layer, "merged_adapters", ()))
    return () if off else tuple(layer.active_adapters)


def _factors(layer: Any) -> list[float]:
    scaling = getattr(layer, "scaling", {})
    return [float(scaling[name]) for name in _working(layer) if name in scaling]


def _idle(layer: Any) -> set[int]:
    """The ids of the tensors of an adapted layer that take no part."""
    working = _working(layer)
    idle: set[int] = set()
    for name, holder in layer.named_children():
        if name != "base_layer" and isinstance(holder, nn.ModuleDict):
            idle |= {id(t) for key, inner in holder.items() if key not in working for t in inner.parameters()}
        elif isinstance(holder, nn.ParameterDict):
            idle |= {id(tensor) for key, tensor in holder.items() if key not in working}
    return idle
