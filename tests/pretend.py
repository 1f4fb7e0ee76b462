"""Devices that are not there: tensors that say they are on `pretend:0`, `pretend:1`, … while their data stays on the
CPU. As on real devices, no operation takes tensors of two of them, none takes a CPU tensor that has dimensions, and
`.numpy()` does not work; `.to(device)` and `copy_` are the transfers, which are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from accelerate import dispatch_model
from tiny import tiny_model
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers import PreTrainedModel

aten = torch.ops.aten
KIND = "pretend"
# Indices and masks may be CPU tensors.
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
TRANSFERS = {aten._to_copy.default, aten.copy_.default}


class Pretending(Tensor):
    """A tensor whose data is `inner`, on the CPU."""

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device) -> Pretending:
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        made = Tensor._make_wrapper_subclass(cls, inner.shape, device=device, **layout)
        made.inner = inner
        return made

    def __repr__(self, **settings: Any) -> str:
        return f"Pretending({self.inner}, device='{self.device}')"

    def tolist(self) -> Any:
        """Read, as from any device."""
        return self.inner.tolist()

    def untyped_storage(self) -> Any:
        """What is really held."""
        return self.inner.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(function, args, kwargs or {}, Counter())


def mapped(value: Any, change: Any) -> Any:
    """`change` applied to the tensors of an operator's arguments, which may stand in lists."""
    if isinstance(value, Tensor):
        return change(value)
    return type(value)(mapped(inner, change) for inner in value) if type(value) in (list, tuple) else value


def run(function: Any, args: Any, kwargs: dict[str, Any], transfers: Counter) -> Any:
    """Do on the CPU what a device would do. Raises RuntimeError for tensors that no device could bring together."""
    tensors: list[Tensor] = []
    mapped([*args, *kwargs.values()], tensors.append)
    target = None if kwargs.get("device") is None else torch.device(kwargs["device"])
    if function in TRANSFERS:
        target = args[0].device if target is None else target
        source = args[1].device if function is aten.copy_.default else args[0].device
        if source != target:
            transfers[str(source), str(target)] += 1
    elif any(isinstance(tensor, Pretending) for tensor in tensors):
        bound = tensors
        if function in INDEXING:
            bound = [args[0], *args[2:3], *(tensor for tensor in tensors if isinstance(tensor, Pretending))]
        devices = {tensor.device for tensor in bound if isinstance(tensor, Pretending) or tensor.ndim}
        if len(devices) > 1:
            raise RuntimeError(f"{function} was given tensors on {', '.join(sorted(map(str, devices)))}")
        target = devices.pop() if target is None else target
    if target is not None and target.type == KIND and "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    made = function(*mapped(args, held), **{name: mapped(value, held) for name, value in kwargs.items()})
    if target is None or target.type != KIND:
        return made

    def claim(value: Tensor) -> Tensor:
        # What was changed in place stays the tensor it was.
        same = [tensor for tensor in tensors if getattr(tensor, "inner", None) is value]
        return same[0] if same else Pretending(value, target)

    return mapped(made, claim)


def held(tensor: Tensor) -> Tensor:
    """The data on the CPU."""
    return tensor.inner if isinstance(tensor, Pretending) else tensor


class _Dispatch(TorchDispatchMode):
    """Sees what is made on a device, or brought there."""

    def __init__(self, transfers: Counter) -> None:
        super().__init__()
        self.transfers = transfers

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(function, args, kwargs or {}, self.transfers)


class _Functions(TorchFunctionMode):
    """Functions that fill memory of a device from Python, without an operator that could be seen."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is Tensor.new_tensor and isinstance(args[0], Pretending):
            kwargs = {"dtype": args[0].dtype, "device": args[0].device, **kwargs}
            function, args = torch.tensor, args[1:]
        if function is Tensor.__getitem__ and isinstance(args[1], list):
            args = args[0], torch.tensor(args[1])
        device = kwargs.get("device")
        if function in (torch.tensor, torch.as_tensor) and device is not None and torch.device(device).type == KIND:
            return function(*args, **{**kwargs, "device": None}).to(device)
        return function(*args, **kwargs)


@cache
def _register() -> None:
    _setup_privateuseone_for_python_backend(KIND)


@contextmanager
def pretend_devices() -> Iterator[Counter]:
    """Within it there are devices `pretend:n`. Yields the transfers so far, (from, to) -> how many."""
    _register()
    transfers: Counter = Counter()
    with _Dispatch(transfers), _Functions():
        yield transfers


def spread_model(name: str, first: int, **changes: Any) -> PreTrainedModel:
    """The tiny model with its `first` layers on `pretend:0`, the others on `pretend:1`, dispatched by accelerate as
    `from_pretrained(device_map=…)` does it. Call it within `pretend_devices`."""
    model = tiny_model(name, **changes)
    layers = range(model.config.num_hidden_layers)
    places = {f"model.layers.{i}": f"{KIND}:{int(i >= first)}" for i in layers}
    last = places[f"model.layers.{len(layers) - 1}"]
    places |= {"model.embed_tokens": f"{KIND}:0", "model.rotary_emb": f"{KIND}:0", "model.norm": last, "lm_head": last}
    for path, device in places.items():
        _place(model.get_submodule(path), torch.device(device))
    return dispatch_model(
        model, places, main_device=f"{KIND}:0", skip_keys=model._skip_keys_device_placement, force_hooks=True
    )


def _place(module: nn.Module, device: torch.device) -> None:
    """What `module.to(device)` does, which cannot put another kind of tensor in a parameter's place."""
    for inner in module.modules():
        for name, weight in inner._parameters.items():
            if weight is not None:
                inner._parameters[name] = nn.Parameter(weight.detach().to(device), requires_grad=False)
        for name, buffer in inner._buffers.items():
            if buffer is not None:
                inner._buffers[name] = buffer.to(device)
