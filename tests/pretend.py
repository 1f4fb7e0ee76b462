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


def opened(value: Any, found: list[Tensor]) -> Any:
    """An operator's argument with the data on the CPU in it; the tensors that stand there are `found`."""
    if isinstance(value, Tensor):
        found.append(value)
        return value.inner if type(value) is Pretending else value
    return type(value)([opened(inner, found) for inner in value]) if type(value) in (list, tuple) else value


def run(function: Any, args: Any, kwargs: dict[str, Any], transfers: Counter) -> Any:
    """Do on the CPU what a device would do. Raises RuntimeError for tensors that no device could bring together."""
    tensors: list[Tensor] = []
    plain = opened(args, tensors)
    plain_named = {name: opened(value, tensors) for name, value in kwargs.items()}
    target = None if kwargs.get("device") is None else torch.device(kwargs["device"])
    if function in TRANSFERS:
        target = args[0].device if target is None else target
        source = args[1].device if function is aten.copy_.default else args[0].device
        if source != target:
            transfers[str(source), str(target)] += 1
    elif any(type(tensor) is Pretending for tensor in tensors):
        bound = tensors
        if function in INDEXING:
            bound = [args[0], *args[2:3], *(tensor for tensor in tensors if type(tensor) is Pretending)]
        devices = {tensor.device for tensor in bound if type(tensor) is Pretending or tensor.ndim}
        if len(devices) > 1:
            raise RuntimeError(f"{function} was given tensors on {', '.join(sorted(map(str, devices)))}")
        target = devices.pop() if target is None else target
    if target is None or target.type != KIND:
        return function(*plain, **plain_named)
    if "device" in kwargs:
        plain_named["device"] = torch.device("cpu")
    return claimed(function(*plain, **plain_named), target, tensors)


def claimed(made: Any, device: torch.device, given: list[Tensor]) -> Any:
    """What an operator made, on a device; what it has changed in place stays the tensor that was given."""
    if isinstance(made, Tensor):
        same = [tensor for tensor in given if type(tensor) is Pretending and tensor.inner is made]
        return same[0] if same else Pretending(made, device)
    return type(made)([claimed(each, device, given) for each in made]) if type(made) in (list, tuple) else made


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
    threads = torch.get_num_threads()
    # Operations on a few numbers: a second thread would only be waited for.
    torch.set_num_threads(1)
    try:
        with _Dispatch(transfers), _Functions():
            yield transfers
    finally:
        torch.set_num_threads(threads)


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
