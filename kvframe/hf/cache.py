"""The cache that users hand to `model.generate`. All state of a compression lives here."""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvframe.arguments import whole_number
from kvframe.budget import Lengths, Regions, checked_lengths
from kvframe.contracts import blaming
from kvframe.errors import InputError
from kvframe.hf import masks, remarks, rows
from kvframe.hf.attention import use_kvframe_attention
from kvframe.hf.columns import Columns
from kvframe.hf.devices import finish
from kvframe.hf.drafts import Drafts
from kvframe.hf.finding import attention_modules, fresh_layers
from kvframe.hf.info import model_info
from kvframe.hf.layer import CompressedLayer
from kvframe.hf.ledger import Ledger
from kvframe.hf.positions import Positions
from kvframe.hf.precision import without_autocast
from kvframe.hf.protected import full_rows, regions_now, uncompressed
from kvframe.hf.recurrent import compressed_layer, forget, own_layers
from kvframe.hf.step import SteppedCache, begin, watch_the_end, whole_or_not_at_all
from kvframe.hf.watch import Watch
from kvframe.hf.weights import check_weights
from kvframe.hf.width import choose_width
from kvframe.plain import held_tensors
from kvframe.ragged import append_part
from kvframe.regroup import regroup_parts
from kvframe.report import CacheReport
from kvframe.types import Needs, Observation

if TYPE_CHECKING:
    from kvframe.pipeline import Compressed, Pipeline


class CompressedCache(SteppedCache):
    """A transformers cache that compresses itself with a pipeline.

    The prompt is compressed over all layers at once before the first single-token step that follows it, or by
    `compress()`. A later prompt attends what is there and is compressed in its turn. Create it with
    `pipeline.cache(model)`; one cache serves one batch."""

    def __init__(
        self,
        pipeline: Pipeline,
        model: PreTrainedModel,
        prefix_length: Lengths = 0,
        suffix_length: Lengths | None = None,
        *,
        needs: Needs | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.kernel = pipeline.spec.attention
        self.info = without_autocast(model_info)(model)
        self._model = weakref.ref(model)
        self.bound = without_autocast(pipeline.bind)(self.info)
        self._open = pipeline, self.bound  # with which a reset cache begins again
        use_kvframe_attention(model)
        self._attention = weakref.WeakSet(attention_modules(model))
        self.prefix_length = prefix_length
        self.suffix_length = pipeline.spec.protect.suffix if suffix_length is None else suffix_length
        for name in ("prefix_length", "suffix_length"):
            checked_lengths(getattr(self, name), name)
        self.needs = pipeline.needs if needs is None else needs
        layers = fresh_layers(model)
        for index in self.info.layer_ids:
            layers[index] = compressed_layer(self, self.needs, layers[index])
        self.compressed_layers: list[CompressedLayer] = [layers[index] for index in self.info.layer_ids]
        super().__init__(layers=layers)
        self.ledger = Ledger()
        self.valid: Tensor | None = None  # bool [B, R], the recent columns that hold an exact token
        self.positions: Tensor | None = None  # int64 [B, R]
        self.columns = Columns()
        self.recent_validity_bias: Tensor | None = None
        self.trailing_padding = 0
        self.watching = True
        self.pending = True  # a prompt is waiting to be compressed
        self.drafting = False  # the next few tokens may be drafts of an answer
        self.drafts: int | None = None  # so many of the next tokens are, if it is known
        self.spare = 0  # so many of the last ones may be taken off again
        self.announced: Drafts | None = None
        self.states: Any = None
        self.watch = Watch(self.needs)
        self.watch.attach(model, self)
        self.ends_behind = self.watch.surprisal is not None
        watch_the_end(model, self)
        self._positions = Positions(model, self, self.info.layer_ids[0])

    def begin_with(self, bound: Any) -> None:
        """Take this for what the stages loaded, now and after each reset."""
        self.bound = bound
        self._open = self.pipeline, bound

    def check_step(self, key_states: Tensor, passed_on: dict[str, Any]) -> None:
        """As every cache does; raise InputError also for attention weights that there will not be."""
        super().check_step(key_states, passed_on)
        check_weights(self, key_states.shape[2], passed_on)

    def begin_step(self, key_states: Tensor, passed_on: dict[str, Any]) -> None:
        """Compress what waits, and note the positions of the new tokens."""
        try:
            begin(self, key_states, self._positions.of(passed_on, key_states, self.compressed_layers[0].seen))
        finally:
            self.columns.hidden = None  # as the mask of this call has it

    def between_steps(self) -> None:
        """Before a token of an answer: compress the prompt that came before it, or a full block of generated tokens."""
        flush = self.pipeline.spec.decode.flush
        if self.pending:
            self._compress(self.suffix_length, prompt=True)
        elif flush is not None and self.valid is not None and bool(full_rows(self, self.valid, flush).any()):
            self._compress(self.suffix_length, prompt=False)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """As transformers has it, and the mask that is made next is this cache's."""
        sizes: tuple[int, int] = super().get_mask_sizes(query_length, layer_idx)
        return masks.asked(self, sizes)

    def note_validity(self) -> None:
        """What follows from `valid`: the bias on recent columns that hold no exact token, and padding at the end."""
        self.recent_validity_bias, self.trailing_padding = masks.validity_bias(self.valid)

    @torch.no_grad()
    def prefill(
        self, model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor | None = None, chunk: int = 2048
    ) -> Tensor:
        """Read a prompt `input_ids [B, T]` chunk by chunk, compressing between the chunks, so that what is held at most
        is the compressed cache and one chunk. Later chunks attend what is kept of the earlier ones, so the result
        differs from that of the prompt read whole. The last chunk waits for the question, and is compressed before the
        answer's first token, or by `compress()`. `attention_mask [B, T]` marks padding. Returns the logits `[B, V]` of
        the last column.

        Raises InputError for an allocator or a budget that must see the whole prompt, or a chunk below 1."""
        from kvframe.hf.chunks import read_in_chunks

        with whole_or_not_at_all(self):
            return read_in_chunks(self, model, input_ids, attention_mask, chunk)

    def compress(self, suffix_length: Lengths | None = None) -> None:
        """Compress what is pending: everything but prefix, sinks, recent window and suffix.

        `suffix_length` overrides the cache's for this call: 0 compresses before the question is seen. Raises
        BudgetError, InputError or StageError; the cache is then as it was."""
        with whole_or_not_at_all(self):
            self._compress(self.suffix_length if suffix_length is None else suffix_length, prompt=True)

    def compress_waiting(self, tokens: int = 0) -> None:
        """While a prompt is being read: compress what is there, but for sinks and recent window, if that is at least
        `tokens`. A row that has fewer, or is still too short for its budget, waits. Raises what `compress` does, and
        InputError for an allocator or a budget that must see the whole prompt."""
        if self.valid is not None and self.valid.shape[1] >= self.pipeline.spec.protect.recent + tokens:
            self.check_reading()
            self._compress(0, prompt=True, reading=tokens)

    def check_reading(self) -> None:
        """Raise InputError if the prompt must be seen whole."""
        if clash := self.pipeline.spec.whole_prompt_only():
            raise InputError(f"{clash[0].upper()}{clash[1:]}.")

    @without_autocast
    def _compress(self, suffix_length: Lengths, prompt: bool, reading: int | None = None) -> None:
        """Compress a prompt, of which more may come (`reading`, see `regions_now`), or (`prompt` False) a block of
        generated tokens, whose protected tokens are paid for."""
        if self.valid is None or self.positions is None:
            return
        begin, spec, first = time.perf_counter(), self.pipeline.spec, not self.ledger.compressions
        itemsize = self.compressed_layers[0].recent.keys.element_size()
        # What the mask of this call hides is let go of like padding, as long as it is no longer in the buffer.
        shown = self.valid if self.columns.hidden is None else self.valid & ~self.columns.hidden
        regions = regions_now(self, shown, suffix_length, prompt, reading, itemsize)
        if bool(regions.body.any()):
            if prompt and not self.pending and spec.decode.flush is None and self.pipeline.needs != Needs():
                raise InputError(
                    "Nothing waits to be compressed but tokens of an answer, and what the stages need of them was not "
                    "kept; set decode.flush, which compresses an answer as it is written."
                )
            if len(self.pipeline.variants) > 1:
                choose_width(self, regions, itemsize, prompt)
            fresh = self.states is None
            bits = self.pipeline.entry_bits(self.info, itemsize)
            # What comes later, or a few tokens at a time, joins blocks that are there, and fills them.
            block = self.pipeline.paid_block if prompt and fresh else 1
            share = self.ledger.budget(spec.budget, regions, self.info, itemsize, bits, prompt, block)
            held = [layer.parts for layer in self.compressed_layers]
            limit = None
            if spec.allocator.regroups and not first:
                # A block may come in with what the whole body may hold: which of it stays is decided over all.
                limit, share = self.ledger.body_budget(spec.budget, regions, self.info, itemsize, bits, held, share)
            observation = self.observe(regions, self.pipeline.needs)
            result = self.pipeline.run(observation, share.body, regions.sinks, self.states, self.bound, block)
            with blaming(spec.encoder):
                parts = [reduce(append_part, new, old) for old, new in zip(held, result.parts, strict=True)]
            removed = None
            if limit is not None:
                parts, removed = regroup_parts(parts, spec.allocator, self.info, limit)
            self._adopt(replace(result, parts=tuple(parts)), regions, reading is not None)
            if reading is None:
                remarks.on_compression(self, regions, prompt, itemsize, fresh)
            finish(layer.recent.keys.device for layer in self.compressed_layers)
            self.ledger.book(result.plan, regions, self.info, share, time.perf_counter() - begin, removed)
        elif reading is None:
            if first:
                remarks.on_nothing(self, regions, itemsize)
            if spec.decode.flush is None:  # as for rows that wait beside others
                for layer in self.compressed_layers:
                    layer.keep_watched(0)
        self.pending = False

    def observe(self, regions: Regions, needs: Needs) -> Observation:
        """What was seen of the exact tokens, cut down to what is needed, each layer on its device; see `gathered`."""
        if self.valid is None or self.positions is None:
            raise RuntimeError("nothing was seen yet")
        return Observation(
            layers=tuple(layer.observe(needs) for layer in self.compressed_layers),
            positions=self.positions,
            valid=self.valid,
            body=regions.body,
            model=self.info,
            hidden_states=self.watch.hidden_states(needs.hidden_states, self.valid.shape[1]),
            surprisal=None if self.watch.surprisal is None else self.watch.surprisal.tensor(),
            suffix=regions.suffix,
        )

    def _adopt(self, result: Compressed, regions: Regions, reading: bool) -> None:
        """Take over the parts, old and new, and let go of everything but the exact tail."""
        tokens, keep = regions.tail.shape[1], regions.tail_columns
        taken = regions.sinks | regions.body
        self.columns.compress(taken, keep, self.compressed_layers[0].seen)
        for layer, parts in zip(self.compressed_layers, result.parts, strict=True):
            layer.parts = parts
            layer.recent = layer.recent.last(keep)
            layer.keep_watched(keep if reading or self.pipeline.spec.decode.flush is not None else 0)
        self.watch.keep_last(keep, tokens)
        if self.positions is not None and self.valid is not None:
            self.positions = self.positions[:, tokens - keep :].clone()
            self.valid = (self.valid & ~taken)[:, tokens - keep :].clone()
        self.states = result.states
        self.note_validity()

    def report(self) -> CacheReport:
        """Tokens, entries, measured bytes and ratios, as of now."""
        self.settle()
        return self.measured()

    def measured(self) -> CacheReport:
        """The report in the middle of a step, which goes on."""
        extra = [t for t in (self.valid, self.positions, self.recent_validity_bias) if t is not None]
        return self.ledger.report(
            self.compressed_layers,
            self.info,
            [*extra, *self.columns.tensors(), *self.watch.tensors()],
            # What comes from an artefact belongs to the model; what was fitted on the prompt, to this cache.
            list(held_tensors(self.states)) if self.bound is None else [],
            self.valid,
            uncompressed(self),
            len(self.layers) - sum(self.is_dummy),
            self.pipeline.spec.budget,
        )

    def fork(self) -> CompressedCache:
        """A second cache that has seen what this one has. Storage is shared until one of them writes, so a fork costs
        next to nothing; `copy.deepcopy` of a cache does the same."""
        lengths = self.prefix_length, self.suffix_length
        other = CompressedCache(self.pipeline, self.live_model(), *lengths, needs=self.needs)
        self._hand_over(other)
        other._open = self._open
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> CompressedCache:
        return self.fork()

    def live_model(self) -> PreTrainedModel:
        if (model := self._model()) is None:
            raise InputError("The model of this cache is gone, so the cache cannot be copied.")
        return model

    def _hand_over(self, other: CompressedCache) -> None:
        """Give `other` all that was seen and made so far."""
        self.settle()
        for index, (mine, theirs) in enumerate(zip(self.layers, other.layers, strict=True)):
            if isinstance(mine, CompressedLayer) and isinstance(theirs, CompressedLayer):
                mine.hand_over(theirs)
            else:
                other.layers[index] = copy.deepcopy(mine)
        other.watch.take_over(self.watch)
        other.valid, other.positions, other.ledger = self.valid, self.positions, self.ledger.fork()
        other.states, other.pending, other.columns = self.states, self.pending, self.columns.fork()
        other.watching, other.drafting = self.watching, self.drafting
        other.note_validity()

    def to(self, device: torch.device | str) -> CompressedCache:
        """Move all that the cache holds to a device, in place; move the model first. Of a model on several devices each
        layer's goes to its own, and `device` must be one of them. Returns the cache."""
        from kvframe.hf.devices import move, usable

        self.settle()
        move(self, usable(device))
        return self

    def save(self, path: str | Path, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Write all that the cache holds to a file, whole or not at all; `kvframe.load_cache` reads it. With the
        `tokenizer`, loading checks that too. What an encoder took from a calibration is not written, only its hash.
        A prompt that waits is written as it is, which the log says; `compress()` before makes the file small. Raises
        InputError for a cache that has seen nothing, or a file that cannot be written."""
        from kvframe.hf.saved import save

        self.settle()
        save(self, path, tokenizer)

    def reset(self) -> None:
        """Forget everything, so that the cache can serve another prompt."""
        super().reset()
        for own in own_layers(self.layers):
            forget(own)
        self.pipeline, self.bound = self._open
        self.ledger, self.valid, self.positions, self.states = Ledger(), None, None, None
        self.columns, self.pending, self.drafting, self.drafts = Columns(), True, False, None
        self.note_validity()
        self.watch.reset()

    def select(self, indices: Sequence[int] | Tensor) -> CompressedCache:
        """A cache of these batch rows alone, in this order; a row may come twice. This one stays as it is."""
        other = self.fork()
        rows.select(other, indices)
        return other

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search: row `i` becomes what row `beam_idx[i]` was."""
        rows.select(self, beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each batch row comes `repeats` times, one behind the other."""
        rows.repeat(self, repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these batch rows (numbers, or a mask), in this order. Raises InputError for rows that are not there, and
        StageError, leaving the cache as it was, if the encoder cannot pick rows."""
        rows.select(self, indices)

    def activate_past_recording(self) -> None:
        """Expect drafts, which may be taken off again: `generate` does so when it is assisted. In the next call, and in
        each after a crop, the last `logits_to_keep - 1` tokens are drafts, and attend the compressed prompt."""
        super().activate_past_recording()
        self.announced = self.announced or Drafts(self.live_model(), self)
        self.announced.expected = True

    @property
    def is_croppable(self) -> bool:
        """Whether the last tokens can be taken off again."""
        return all(layer.is_croppable for layer in self.layers)

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last `-tokens_to_remove` columns off again (a negative number, as transformers has it). The next few
        tokens then count as drafts of an answer, not as a prompt. Raises InputError for a positive number, or for more
        columns than are still held exactly."""
        rows.crop(self, -whole_number("tokens_to_remove", tokens_to_remove))
