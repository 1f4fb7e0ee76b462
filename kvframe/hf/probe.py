"""What a model really does: it reads one token at two positions, and each layer is watched as it puts keys and values
into its cache and calls its attention function. What kvframe must know of a layer follows from that, not from names."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from kvframe.errors import ModelError
from kvframe.hf.attention import LAYER, use_kvframe_attention

FAR = 997  # far enough that all but the slowest channels have turned
# Whose biases and weights are asked for; a projection of another name may give them all together.
PROJECTIONS = ("q_proj", "k_proj", "v_proj")


@dataclass(eq=False)
class Seen:
    """One layer and one token.

    Attributes:
        keys, values: `[1, H, 1, D]`, as they came to the cache (keys after RoPE); values may have other channels.
        module: the attention module that called the attention function, None if none did.
        queries: shape `[1, Hq, 1, D]` of the queries.
        scale: factor on q.k.
        calls: how often the attention function was called.
        projected: what the parts of the module gave, `[1, 1, …]`, and how many channels came to them, by their names.
        settings: what else the attention function was given.
        told: what the layer passes to the cache beside keys and values, None if nothing.
    """

    keys: Tensor
    values: Tensor
    module: Any = None
    queries: tuple[int, ...] = ()
    scale: float = 0.0
    calls: int = 0
    projected: dict[str, tuple[Tensor, int]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    told: dict[str, Any] | None = None

    @property
    def keys_as_projected(self) -> bool:
        """Whether the keys are, as they are, among what some part of the module gave, `H * D` channels at a time."""
        keys = self.keys.transpose(1, 2).reshape(1, -1)
        whole = (out.reshape(-1) for out, _ in self.projected.values() if out.numel() % keys.numel() == 0)
        return any(bool((out.view(-1, keys.numel()) == keys).all(1).any()) for out in whole)

    def listen(self, module: nn.Module, query: Tensor, scale: float | None, settings: dict[str, Any]) -> None:
        """Note a call of the attention function."""
        self.calls += 1
        self.module, self.queries = module, tuple(query.shape)
        self.scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
        self.settings = {name: value for name, value in settings.items() if value is not None}


@dataclass(frozen=True, eq=False)
class Probe:
    """What was seen of each layer that keeps keys, by its index in the model, at position 0 and at `far`; `sharing` are
    those that made queries, but kept nothing."""

    near: dict[int, Seen]
    there: dict[int, Seen]
    far: int
    sharing: tuple[int, ...] = ()

    def noise(self, layer: int) -> float:
        """How much the values at both positions differ, relatively: they should not."""
        near, there = self.near[layer].values.float(), self.there[layer].values.float()
        return float((near - there).abs().max() / near.abs().max().clamp_min(1e-30))


class _Listening(DynamicCache):
    """A cache of transformers' that also shows what comes."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.seen: dict[int, Seen] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """See Cache.update."""
        passed_on = kwargs.get("kwargs")
        one = self.seen[layer_idx] = Seen(key_states, value_states, told=None if passed_on is None else dict(passed_on))
        if passed_on is not None:
            passed_on[LAYER] = one
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


Watched = dict[int, dict[str, tuple[Tensor, int]]]
_KNOWN: weakref.WeakKeyDictionary[nn.Module, tuple[Any, Probe]] = weakref.WeakKeyDictionary()


def probe(model: PreTrainedModel) -> Probe:
    """Let the model read one token at position 0 and, afresh, far from it. What was found is kept while the model's
    rotations stay as they are and where they are.

    Raises ModelError if the model cannot be called with one token and a cache."""
    state = _state(model)
    known = _KNOWN.get(model)
    if known is None or known[0] != state:
        use_kvframe_attention(model)
        config = model.config.get_text_config(decoder=True)
        most = getattr(config, "max_position_embeddings", None) or FAR + 1
        far = min(FAR, most - 1)
        with _watched(model) as watched:
            near, there = (_read(model, position, watched) for position in (0, far))
        sharing = tuple(sorted(layer for layer, names in watched.items() if "q_proj" in names and layer not in near))
        known = _KNOWN[model] = state, Probe(near, there, far, sharing)
    return known[1]


def _state(model: PreTrainedModel) -> tuple[Any, ...]:
    """What the findings depend on and a user may change: rotations, biases' modules, dtype and place."""
    rotations = tuple(
        (name, tensor.data_ptr(), tensor._version, tensor.device)
        for name, tensor in model.named_buffers()
        if name.endswith("inv_freq")
    )
    parts = tuple(id(part) for name, part in model.named_modules() if name.endswith(PROJECTIONS))
    first = next(model.parameters(), None)
    return rotations, parts, None if first is None else (first.dtype, first.device)


@contextmanager
def _watched(model: PreTrainedModel) -> Iterator[Watched]:
    """What the projections of each layer give, and how many channels come to them, by its index, while this lasts."""
    found: Watched = {}
    handles: list[Any] = []
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int):
            parts = module.named_children()
            handles += [part.register_forward_hook(_noting(found, layer, name)) for name, part in parts]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _noting(found: Watched, layer: int, name: str) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and args and isinstance(args[0], Tensor):
            found.setdefault(layer, {})[name] = output.detach(), args[0].shape[-1]

    return hook


def unwrapped(model: Any) -> Any:
    """The transformers model itself, which may stand in a wrapper such as PEFT's."""
    return next((part for part in model.modules() if isinstance(part, PreTrainedModel)), model)


def _takes_positions(model: nn.Module) -> bool:
    """Whether the model names position_ids: `generate` passes them only then."""
    return "position_ids" in inspect.signature(unwrapped(model).forward).parameters


def _read(model: PreTrainedModel, position: int, watched: Watched) -> dict[int, Seen]:
    cache = _Listening(model.config)
    config = model.config.get_text_config(decoder=True)
    # Where accelerate keeps weights elsewhere between calls, it brings what comes to them.
    home = next((tensor.device for tensor in model.parameters() if tensor.device.type != "meta"), torch.device("cpu"))
    token = torch.full((1, 1), config.vocab_size // 2, device=home)
    placed = {"position_ids": torch.full((1, 1), position, device=home)} if _takes_positions(model) else {}
    devices = sorted({tensor.device.index or 0 for tensor in model.parameters() if tensor.is_cuda})
    try:
        # In training, dropout must fall alike in both readings.
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            torch.manual_seed(0)
            model(input_ids=token, cache=cache, use_cache=True, **placed)
    except ModelError:
        raise
    # A model may fail with anything.
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} cannot be called with one token, its position and a cache, as kvframe does to see "
            f"how its attention works ({type(error).__name__}: {error}); use a decoder-only language model."
        ) from error
    for layer, outputs in watched.items():
        if layer in cache.seen:
            cache.seen[layer].projected = dict(outputs)
    return cache.seen
