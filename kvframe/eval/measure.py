"""Runs one example: once with the stock cache, and once with each compressed one. Batches of one row."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from kvframe.eval.fidelity import kl_divergence, negative_log_likelihood, top1_agreement
from kvframe.eval.tasks import Example
from kvframe.hf import CompressedCache, Prefill
from kvframe.hf.devices import finish
from kvframe.hf.info import layer_devices

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvframe.pipeline import Pipeline

T = TypeVar("T")

# Single-token steps timed in turn with the full cache's, for each example and cache.
_TIMED_STEPS = {True: 8, False: 4}


@dataclass(frozen=True)
class Runner:
    """A model with its tokenizer, and the mode.

    Attributes:
        agnostic: compress before the question is seen; else with the question as the suffix.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    agnostic: bool = False

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a reply."""
        config = self.model.generation_config
        ends: Any = None if config is None else config.eos_token_id
        own = ends if isinstance(ends, list) else [ends]
        return frozenset(i for i in (*own, self.tokenizer.eos_token_id) if i is not None)

    @cached_property
    def devices(self) -> frozenset[torch.device]:
        """All that the model runs on."""
        return frozenset((*layer_devices(self.model).values(), *(weight.device for weight in self.model.parameters())))

    def step(self, cache: Cache, ids: Sequence[int], keep: int = 0) -> Tensor:
        """Feed tokens; the logits `[Q, V]` of all of them, or of the last `keep`."""
        tokens = torch.tensor([list(ids)], device=self.model.device)
        with torch.no_grad():
            return self.model(input_ids=tokens, cache=cache, use_cache=True, logits_to_keep=keep).logits[0]

    def timed(self, action: Callable[[], T]) -> tuple[T, float]:
        """The action's result and its milliseconds."""
        finish(self.devices)
        begin = time.perf_counter()
        result = action()
        finish(self.devices)
        return result, 1000 * (time.perf_counter() - begin)

    def text(self, ids: Iterable[int]) -> str:
        """The tokens as text, without special ones."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


@dataclass(frozen=True, eq=False)
class Reference:
    """What the stock cache did on one example.

    Attributes:
        cache: the cache after the prompt without its last token; never written to again.
        answer: the scored tokens: the targets, or its own greedy answer.
        logits: fp32 `[T, V]`, from which each of them was predicted.
        prefill_ms: reading the prompt.
        decode_ms: median of its single-token steps.
    """

    runner: Runner
    example: Example
    cache: DynamicCache
    answer: tuple[int, ...]
    logits: Tensor
    prefill_ms: float
    decode_ms: float

    def score(self) -> dict[str, Any]:
        """Its own record: what a perfect compressed cache would get."""
        targets = torch.tensor(self.answer, device=self.logits.device)
        return {
            **found(self.runner, self.example, self.answer),
            "kl": 0.0,
            "top1": 1.0,
            "nll": float(negative_log_likelihood(self.logits, targets).mean()),
            "scored_tokens": len(self.answer),
            "entry_ratio": 1.0,
            "byte_ratio": 1.0,
            "prefill_ms": self.prefill_ms,
            "decode_ms": self.decode_ms,
        }


def found(runner: Runner, example: Example, tokens: Sequence[int]) -> dict[str, Any]:
    """Whether the wanted answer stands in the generated tokens; letter case does not matter."""
    if not example.answer:
        return {}
    text = runner.text(tokens)
    return {"hit": example.answer.lower() in text.lower(), "generated": text, "answer": example.answer}


def run_reference(runner: Runner, example: Example) -> Reference:
    """Run the example with transformers' own cache."""
    ids = example.prompt.ids
    cache = DynamicCache(config=runner.model.config)
    _, prefill_ms = runner.timed(partial(runner.step, cache, ids[:-1], keep=1))
    work, times = copy.deepcopy(cache), []
    logits, answer, fed = [], list(example.targets), ids[-1]
    if answer:
        for token in (fed, *answer[: _TIMED_STEPS[True] - 1]):
            row, ms = runner.timed(partial(runner.step, work, [token]))
            logits.append(row)
            times.append(ms)
        if rest := answer[len(times) - 1 : -1]:
            logits.append(runner.step(work, rest))
    else:
        while len(answer) < example.new_tokens:
            row, ms = runner.timed(partial(runner.step, work, [fed]))
            logits.append(row)
            times.append(ms)
            answer.append(fed := int(row.argmax()))
            if fed in runner.stop_ids:
                break
    return Reference(runner, example, cache, tuple(answer), torch.cat(logits).float(), prefill_ms, median(times))


def observe(runner: Runner, example: Example, pipelines: Iterable[Pipeline]) -> tuple[Prefill, float]:
    """Read the prompt once for all pipelines, as far as they see it before they compress; and the milliseconds."""
    ids = example.prompt.ids
    seen = ids[: -example.prompt.suffix_length] if runner.agnostic else ids[:-1]
    observed = Prefill(runner.model, pipelines)
    _, ms = runner.timed(partial(runner.step, observed, seen, keep=1))
    return observed, ms


def run_compressed(reference: Reference, observed: Prefill, pipeline: Pipeline) -> dict[str, Any]:
    """Compress a fork of the observed prefill and score it against the reference.

    Every scored token is predicted from the compressed cache: the prompt's last token is fed after the compression.
    Raises KvframeError if the pipeline cannot serve this prompt."""
    runner, example = reference.runner, reference.example
    cache, compress_ms = _compressed(reference, observed, pipeline)
    report = cache.report()
    answer = list(reference.answer)
    timed = _TIMED_STEPS[bool(example.targets)]
    full = copy.deepcopy(reference.cache)
    times: list[float] = []
    full_times: list[float] = []
    logits: list[Tensor] = []
    generated: list[int] = []
    token, steps = example.prompt.ids[-1], timed if example.targets else example.new_tokens
    for index in range(steps):
        row, ms = _in_turn(runner, cache, full, token, index, timed, full_times)
        if index < timed:
            times.append(ms)
        logits.append(row)
        generated.append(int(row.argmax()))
        if example.targets:
            token = answer[index]
        elif (token := generated[-1]) in runner.stop_ids:
            break
    del full
    # Rows are comparable as far as both were fed the same tokens.
    same = len(answer) if example.targets else _agreeing(generated, answer)
    if example.targets:
        if rest := answer[steps - 1 : -1]:
            logits.append(runner.step(cache, rest))
    elif same < len(answer):
        cache, _ = _compressed(reference, observed, pipeline)
        logits = [runner.step(cache, [example.prompt.ids[-1], *answer[:-1]])]
    rows = torch.cat(logits).float()[: len(answer)]
    targets = torch.tensor(answer, device=rows.device)
    return {
        **found(runner, example, generated),
        "kl": float(kl_divergence(reference.logits, rows).mean()),
        "top1": float(top1_agreement(reference.logits, rows).float().mean()),
        "nll": float(negative_log_likelihood(rows, targets).mean()),
        "scored_tokens": len(answer),
        "entry_ratio": report.entry_ratio,
        "byte_ratio": report.byte_ratio,
        "requested_ratio": report.requested_ratio,
        "entries": report.entries,
        "bytes": report.bytes,
        "full_bytes": report.full_bytes,
        "compress_ms": compress_ms,
        "prefill_ms": reference.prefill_ms,
        "decode_ms": median(times),
        "full_decode_ms": median(full_times),
        "notes": list(report.notes),
    }


def _compressed(reference: Reference, observed: Prefill, pipeline: Pipeline) -> tuple[CompressedCache, float]:
    """A compressed fork that has seen the prompt without its last token, and the milliseconds of compressing it."""
    runner, prompt = reference.runner, reference.example.prompt
    cache = observed.fork(pipeline, prompt.prefix_length, prompt.suffix_length - 1)
    cache.ledger.aloud = False  # the records have its notes
    if not runner.agnostic:
        _, ms = runner.timed(cache.compress)
        return cache, ms
    _, ms = runner.timed(partial(cache.compress, suffix_length=0))
    if question := prompt.ids[-prompt.suffix_length : -1]:
        runner.step(cache, question, keep=1)
    return cache, ms


def _in_turn(
    runner: Runner, cache: Cache, full: Cache, token: int, index: int, timed: int, full_times: list[float]
) -> tuple[Tensor, float]:
    """One step of the compressed cache and, for the first `timed` steps, one of the full cache, each first in turn."""

    def full_step() -> None:
        full_times.append(runner.timed(partial(runner.step, full, [token]))[1])

    if index < timed and index % 2:
        full_step()
    result = runner.timed(partial(runner.step, cache, [token]))
    if index < timed and not index % 2:
        full_step()
    return result


def _agreeing(generated: Sequence[int], answer: Sequence[int]) -> int:
    """How many rows of a greedy run were predicted after the same tokens as the reference's."""
    for index, (a, b) in enumerate(zip(generated, answer, strict=False)):
        if a != b:
            return index + 1
    return min(len(generated), len(answer))
