"""Compares pipelines on tasks: every example is read once by the stock cache and once for all pipelines."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

import kvframe
from kvframe.errors import InputError, KvframeError
from kvframe.eval.contenders import Contender
from kvframe.eval.measure import Reference, Runner, observe, run_compressed, run_reference
from kvframe.eval.results import Record, Results
from kvframe.eval.tasks import Example, Source, Task, check_task_names, make_tasks
from kvframe.hf.embedded import NAME
from kvframe.hf.info import model_info

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FULL = "full"

# done, total, what is being measured
Listener = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Settings:
    """What is run.

    Attributes:
        model: the model's name, for the records.
        tasks: names from `kvframe.eval.TASKS`.
        tokens: tokens of each prompt.
        limit: examples of each task.
        seed: from which the examples are drawn.
        agnostic: compress before the question is seen.
    """

    model: str
    tasks: tuple[str, ...] = ("niah", "multikey", "words", "continuation")
    tokens: int = 768
    limit: int = 4
    seed: int = 0
    agnostic: bool = False

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise InputError(f"The number of examples must be at least 1, but is {self.limit}.")
        if self.tokens < 1:
            raise InputError(f"The number of tokens must be at least 1, but is {self.tokens}.")
        check_task_names(self.tasks)

    @property
    def mode(self) -> str:
        """When the pipelines compress: with the question in sight or before."""
        return "query-agnostic" if self.agnostic else "query-aware"


@dataclass(frozen=True)
class Comparison:
    """The outcome of a run.

    Attributes:
        settings: what was run.
        contenders: the pipelines, in order.
        records: the measurements of this run's examples, the stock cache's (fingerprint "full") among them.
        failures: fingerprint -> why that pipeline could not go on.
        text: hash of the text.
        measured: how many records this run made; the others were there already.
    """

    settings: Settings
    contenders: tuple[Contender, ...]
    records: tuple[Record, ...]
    failures: dict[str, str]
    text: str
    measured: int

    def of(self, fingerprint: str, task: str | None = None) -> list[Record]:
        """The records of one pipeline, of one task or all."""
        return [r for r in self.records if r["fingerprint"] == fingerprint and task in (None, r["task"])]


@dataclass
class _Run:
    runner: Runner
    settings: Settings
    contenders: Sequence[Contender]
    text: str
    results: Results
    listener: Listener
    failures: dict[str, str] = field(default_factory=dict)
    done: int = 0
    total: int = 0

    @cached_property
    def common(self) -> dict[str, Any]:
        """What all records of a run share."""
        model, settings = self.runner.model, self.settings
        return {
            "model": settings.model,
            "checkpoint": checkpoint_hash(model, settings.model),
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": model.device.type,
            "tokens": settings.tokens,
            "seed": settings.seed,
            "mode": settings.mode,
            "text": text_hash(self.text),
            "versions": {
                "kvframe": kvframe.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
        }

    def identity(self, task: str, example: int, fingerprint: str) -> dict[str, Any]:
        return {"task": task, "example": example, "fingerprint": fingerprint, **self.common}

    def missing(self, task: str, example: int) -> list[Contender]:
        """The contenders that were not measured on an example and may still be."""
        return [
            c
            for c in self.contenders
            if c.fingerprint not in self.failures and not self.results.find(self.identity(task, example, c.fingerprint))
        ]

    def example(self, task: Task, index: int) -> None:
        """Measure what is missing of one example."""
        missing = self.missing(task.name, index)
        own = self.results.find(self.identity(task.name, index, FULL))
        if not missing and own:
            return
        self.tell(f"{task.name} {index + 1}/{self.settings.limit}: full cache")
        example = task.example(index)
        reference = run_reference(self.runner, example)
        if not own:
            self.keep(example, FULL, {"spec": FULL, **reference.score()})
            self.done += 1
        if missing:
            self.tell(f"{task.name} {index + 1}/{self.settings.limit}: reading the prompt for all specs")
            observed, observe_ms = observe(self.runner, example, [c.pipeline for c in missing])
            for contender in missing:
                self.tell(f"{task.name} {index + 1}/{self.settings.limit}: {contender.label} {contender.budget}")
                self.contend(reference, observed, contender, {"observe_ms": observe_ms})
                self.done += 1

    def contend(self, reference: Reference, observed: Any, contender: Contender, extra: dict[str, Any]) -> None:
        """Measure one contender on one example; what it cannot do ends its run, not the comparison."""
        try:
            scores = run_compressed(reference, observed, contender.pipeline)
        except KvframeError as error:
            self.failures[contender.fingerprint] = str(error)
            return
        spec = contender.pipeline.spec
        about = {"spec": contender.label, "budget": contender.budget}
        dump = {"spec_dump": spec.dump()}
        self.keep(reference.example, contender.fingerprint, {**about, **scores, **extra, **dump})

    def keep(self, example: Example, fingerprint: str, scores: dict[str, Any]) -> None:
        identity = self.identity(example.task, example.index, fingerprint)
        prompt = {"prompt_tokens": len(example.prompt.ids), "suffix_tokens": example.prompt.suffix_length}
        machine = {"threads": torch.get_num_threads(), "machine": platform.machine()}
        self.results.append({**identity, **scores, **prompt, **example.metadata, **machine})

    def tell(self, what: str) -> None:
        self.listener(self.done, self.total, what)


def compare(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    contenders: Sequence[Contender],
    settings: Settings,
    text: str,
    results: Results,
    listener: Listener = lambda done, total, what: None,
) -> Comparison:
    """Measure every contender on every example, but for what `results` already holds.

    Raises InputError if the text or the number of tokens does not suit a task or the model. A contender that raises a
    KvframeError is left out from there on and named in `Comparison.failures`."""
    tasks = make_tasks(settings.tasks, Source(tokenizer, text, settings.tokens, settings.seed))
    check_length(model, tasks)
    run = _Run(Runner(model, tokenizer, settings.agnostic), settings, contenders, text, results, listener)
    places = [(task, index) for task in tasks for index in range(settings.limit)]
    run.total = sum(
        len(run.missing(task.name, i)) + (not results.find(run.identity(task.name, i, FULL))) for task, i in places
    )
    before = len(results)
    for task, index in places:
        run.example(task, index)
    run.tell("done")
    names = [FULL, *(c.fingerprint for c in contenders)]
    found = [results.find(run.identity(task.name, i, name)) for task, i in places for name in names]
    records = tuple(record for record in found if record is not None)
    measured = len(results) - before
    return Comparison(settings, tuple(contenders), records, run.failures, text_hash(text), measured)


def checkpoint_hash(model: PreTrainedModel, name: str) -> str:
    """12 hexadecimal digits of weights and configuration: a name may come to mean another model. "" for the embedded
    one, which is always the same."""
    if name == NAME:
        return ""
    config = model.config.to_dict()
    for volatile in ("_name_or_path", "transformers_version", "dtype"):
        config.pop(volatile, None)
    data = json.dumps(config, sort_keys=True, default=str) + model_info(model).fingerprint
    return hashlib.sha256(data.encode()).hexdigest()[:12]


def check_length(model: PreTrainedModel, tasks: Sequence[Task]) -> None:
    """Raise InputError if a task's first example cannot be made, or is longer than the model's positions."""
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    for task in tasks:
        example = task.example(0)
        length = len(example.prompt.ids) + example.new_tokens
        if limit is not None and length > limit:
            raise InputError(
                f"The task '{task.name}' needs {length} positions, but the model has {limit}; give fewer tokens."
            )


def text_hash(text: str) -> str:
    """12 hexadecimal digits of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def open_results(folder: str | Path) -> Results:
    """The results in a folder, which is created if need be. Raises InputError if it cannot be written."""
    return Results(Path(folder).expanduser())
