"""One step of a cache: what is checked and compressed when a call of the model begins, and what becomes of one that
breaks off. For whatever reason it does, it is taken back whole, so that the call can be made again."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin

from kvframe.errors import InputError, ModelError
from kvframe.hf.finding import decoder_of
from kvframe.hf.hook import Hook, called_with
from kvframe.hf.layer import INFERENCE, CompressedLayer
from kvframe.hf.recurrent import own_layers
from kvframe.plain import map_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvframe.hf.cache import CompressedCache
    from kvframe.hf.columns import Columns
    from kvframe.hf.ledger import Ledger
    from kvframe.hf.watch import Watch
    from kvframe.types import ModelInfo

# After a crop, at most so many tokens at once are taken for drafts where nobody says; more are a prompt.
DRAFTS = 64


class Before:
    """What a cache holds at this moment. Tensors are referred to, not copied: a step replaces them, or appends behind
    what is there. So what a compression lets go of is freed when the step has ended."""

    def __init__(self, cache: SteppedCache) -> None:
        self.layer = -1  # that the step has come to
        self._others = [(layer, _held(layer)) for layer in own_layers(cache.layers)]
        self.take_compressed(cache)

    def take_compressed(self, cache: SteppedCache) -> None:
        """Take what the cache and its compressed layers hold now for what they held before."""
        # Not the step itself, or a step that has ended would live on in a cycle, with all that it holds.
        self._cache = {name: value for name, value in vars(cache).items() if value is not self}
        self._ledger, self._columns = cache.ledger.fork(), cache.columns.fork()
        self._columns.hidden = None  # that is the coming call's
        self._layers = [(layer, dict(vars(layer))) for layer in cache.compressed_layers]
        self._recent = [(layer.recent, layer.recent.mark()) for layer in cache.compressed_layers]
        tails = [tail for layer in cache.compressed_layers for tail in (layer.queries, layer.outputs)]
        self._tails = [(tail, tail.tensors()) for tail in (*tails, *cache.watch.tails())]

    def restore(self, cache: SteppedCache) -> None:
        """Let the cache hold what it held."""
        vars(cache).update(self._cache)
        cache.ledger, cache.columns = self._ledger, self._columns
        for layer, held in (*self._layers, *self._others):
            vars(layer).clear()
            vars(layer).update(held)
        for recent, mark in self._recent:
            recent.back_to(mark)
        for tail, pieces in self._tails:
            tail.restore(pieces)
        # The hook of the first block comes before the first layer is updated.
        cache.watch.cut(cache.exact_columns)


def _held(layer: Any) -> dict[str, Any]:
    held = dict(vars(layer))
    # The states of linear attention are written in place.
    recurs = isinstance(layer, LinearAttentionCacheLayerMixin)
    return map_tensors(held, lambda state: state.detach().clone()) if recurs else held


OWN_MODEL = (
    "use the cache with the model that it was made for, and leave that model's attention implementation as it is."
)
UNREACHED = f"The model's attention did not reach the kvframe cache it was called with; {OWN_MODEL}"


class SteppedCache(Cache):
    """A transformers cache that takes a step whole or not at all."""

    valid: Tensor | None  # bool [B, R], the recent columns that hold an exact token
    ledger: Ledger
    columns: Columns
    watch: Watch
    info: ModelInfo
    compressed_layers: list[CompressedLayer]
    _attention: weakref.WeakSet[nn.Module]

    def __init__(self, layers: list[Any]) -> None:
        super().__init__(layers=layers)
        self.step: Before | None = None  # what was there before the step that has not come to its end
        self._awaited: object = None  # the layer that was updated, but not attended yet
        self._unreached = False
        attending = [index for index, layer in enumerate(layers) if isinstance(layer, CacheLayerMixin)]
        # Recurrent layers before this one come before any attention does, and of a layer with both its recurrent half.
        self._first_index = attending[0] + (len(attending) > 1)
        self._last_layer = layers[attending[-1]]
        self.ends_behind = False  # something beside attention still happens in a step after the last layer that attends

    def check_step(self, key_states: Tensor, passed_on: dict[str, Any]) -> None:
        """Raise InputError for keys `[B, H, Q, D]` of another number of rows than are held."""
        if self.valid is not None and len(self.valid) != len(key_states):
            raise InputError(
                f"This cache holds {len(self.valid)} rows, but {len(key_states)} came; call cache.reset(), pick rows "
                "with cache.select, or make a new cache."
            )

    def begin_step(self, key_states: Tensor, passed_on: dict[str, Any]) -> None:
        """A step has come to the first compressed layer, with keys `[B, H, Q, D]`; `passed_on` is what the model passes
        to its attention. Raises ModelError for positions that cannot be known from it."""

    def begin_recurrence(self, layer_idx: int) -> None:
        """A recurrent layer is asked for its state, which may then be written in place. Before the first layer that
        attends, a step begins with that."""
        if self.step is None and layer_idx < self._first_index:
            self.step = Before(self)

    def _refuse_gradients(self, state: Tensor) -> None:
        if state.requires_grad:
            self.take_back()
            raise InputError(INFERENCE)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """As transformers has it; see `begin_recurrence`."""
        self.begin_recurrence(layer_idx)
        return super().get_conv_state(layer_idx, state_idx)

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        """As transformers has it; see `begin_recurrence`. Raises InputError for a state that carries gradients."""
        self.begin_recurrence(layer_idx)
        self._refuse_gradients(conv_states)
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """As transformers has it; see `begin_recurrence`."""
        self.begin_recurrence(layer_idx)
        return super().get_recurrent_state(layer_idx, state_idx)

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        """As transformers has it; see `begin_recurrence`. Raises InputError for a state that carries gradients."""
        self.begin_recurrence(layer_idx)
        self._refuse_gradients(recurrent_states)
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by each attention layer; the first compressed one lets the cache do its work between two steps."""
        if not self.stepping(layer_idx):
            unreached, self._unreached = self._unreached, False
            if unreached:
                raise ModelError(UNREACHED)
            self.step = Before(self)
        try:
            if self.step is None or self.step.layer < 0:
                self.check_step(key_states, kwargs.get("kwargs") or {})
            return self._update(key_states, value_states, layer_idx, *args, **kwargs)
        except BaseException:
            self.take_back()
            raise

    def _update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if layer_idx == self.info.layer_ids[0]:
            self.begin_step(key_states, kwargs.get("kwargs") or {})
        if self._awaited is not None:
            raise ModelError(UNREACHED)
        if layer_idx >= len(self.layers):
            raise ModelError(f"This cache has {len(self.layers)} layers, but the model asks for more; {OWN_MODEL}")
        updated = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if self.step is not None:
            self.step.layer = layer_idx
        if isinstance(layer := self.layers[layer_idx], CompressedLayer):
            self._awaited = layer
        else:
            self.passed(layer)
        return updated

    def stepping(self, layer_idx: int) -> bool:
        """Whether a model that comes to this layer, or to its block, is in the middle of a step. If it is not, what is
        left of a step that broke off is taken back."""
        if self.step is not None and layer_idx <= self.step.layer:
            self._find_broken()
        return self.step is not None

    def take_back(self) -> None:
        """Undo what a step did that has not come to its end."""
        if self.step is not None:
            self.step.restore(self)
            self.step = None

    def settle(self) -> None:
        """Between two calls of the model: undo what is left of one that broke off."""
        self._find_broken()
        self.watch.cut(self.exact_columns)

    def _find_broken(self) -> None:
        # Of the last layer only the next call can tell that the attention was another.
        unreached = self._awaited is self._last_layer
        self.take_back()
        self._unreached |= unreached

    def passed(self, layer: object) -> None:
        """The step is through with a layer; after the last one, and what comes behind it, it is done. A graph that is
        compiled has no hooks that could tell."""
        if layer is self._last_layer and (not self.ends_behind or torch.compiler.is_compiling()):
            self.step = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, padding included: the logical length."""
        # Asked before a step, of the first layer of some kind; within one, layers ask for themselves.
        if layer_idx == 0 or (self.step is not None and layer_idx <= self.step.layer):
            self._find_broken()
        return super().get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """What a mask for this layer covers: columns, and how many come before them."""
        self._find_broken()
        return super().get_mask_sizes(query_length, layer_idx)

    @property
    def exact_columns(self) -> int:
        """Columns that are held exactly."""
        return 0 if self.valid is None else self.valid.shape[1]

    def reached(self, module: nn.Module | None = None) -> None:
        """The attention function has come to the layer that was updated last, from a module of a model; None = what was
        put in is not to be attended now."""
        if module is None and self._awaited is not None:
            self.passed(self._awaited)
        self._awaited = None
        if module is not None and module not in self._attention:
            raise ModelError(f"This cache was called with another model than its own; {OWN_MODEL}")

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.step, self._awaited, self._unreached = None, None, False


def watch_the_end(model: PreTrainedModel, cache: CompressedCache) -> None:
    """Where layers that recur come after the last one that attends, let a step end with the decoder."""
    kinds = [isinstance(layer, CacheLayerMixin) for layer in cache.layers]
    last = max(index for index, attends in enumerate(kinds) if attends)
    if any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers[last + 1 :]):
        owner: weakref.ref[CompressedCache] = weakref.ref(cache)

        def end(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            if (stepping := called_with(owner, kwargs)) is not None:
                stepping.step = None

        cache.ends_behind = True
        weakref.finalize(cache, decoder_of(model).register_forward_hook(Hook(end), with_kwargs=True).remove)


@contextmanager
def whole_or_not_at_all(cache: SteppedCache) -> Iterator[None]:
    """Leave the cache as it was if what is done to it fails or is interrupted."""
    cache.settle()
    before = Before(cache)
    try:
        yield
    except BaseException:
        before.restore(cache)
        raise


@contextmanager
def taken_back_if_broken(cache: SteppedCache) -> Iterator[None]:
    """Within a step: take it back if it fails here, or is interrupted."""
    try:
        yield
    except BaseException:
        cache.take_back()
        raise


def begin(cache: CompressedCache, key_states: Tensor, positions: Tensor) -> None:
    """Begin a step with the first compressed layer's keys `[B, H, Q, D]` of tokens at `positions [B, Q]`: compress what
    waits, and note the positions. Raises what `CompressedCache.compress` does."""
    length = key_states.shape[2]
    if cache.drafts is None:
        alone = length == 1 or (cache.drafting and length <= DRAFTS)
    else:
        alone = length - cache.drafts == 1
    answering = cache.compressed_layers[0].seen > 0 and alone
    cache.spare = cache.drafts or 0
    cache.drafting, cache.drafts = False, None
    if answering:
        cache.between_steps()
    else:
        if (waiting := cache.pipeline.spec.prefill.flush) is not None:
            cache.compress_waiting(waiting)
            if cache.step is not None:  # or a chunk of the prompt would be held beside the next one
                cache.step.take_compressed(cache)
        cache.pending = True
    cache.watching = not answering or cache.pipeline.spec.decode.flush is not None
    if not cache.watching:
        # What was watched must be what was seen last, without a gap.
        for layer in cache.compressed_layers:
            layer.keep_watched(0)
    cache.positions = positions if cache.positions is None else torch.cat([cache.positions, positions], 1)
