"""The tasks: what a compressed cache is asked to do. An example depends on the seed, the task and its number only."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvframe.errors import InputError
from kvframe.eval.haystack import Haystack, hide
from kvframe.eval.prompt import Prompt, Template, chat_template
from kvframe.eval.vocabulary import KEYS, VALUES
from kvframe.registry import nearest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The wording of the RULER benchmark (Hsieh et al. 2024, arXiv 2404.06654) for one key with one value.
_INTRO = (
    "A special magic {one} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {one} afterwards.\n"
)
_NEEDLE = "One of the special magic {one}s for {key} is: {value}."
_QUESTION = "\nWhat is the special magic {one} for {key} mentioned in the provided text?"
_ANSWER = "The special magic {one} for {key} mentioned in the provided text is"

# Needles stay clear of both ends of the text, where protected regions would keep them whatever the method does.
_DEPTHS = (0.05, 0.9)
_GOLDEN = 0.6180339887498949
# Tokens that the answer may have beyond the value itself, such as a colon or a quotation mark.
_SLACK = 4
_TARGETS = 64
_LEAST_TEXT = 64


@dataclass(frozen=True)
class Example:
    """One prompt and what should follow it.

    Attributes:
        task, index: whose example it is, and its number from 0.
        prompt: the prompt's tokens. Its last token is always fed after the compression, so that every scored token is
            predicted from the compressed cache.
        answer: text that the continuation must contain; "" if it is not scored.
        targets: the tokens that follow, to be teacher-forced; () = the full cache's own greedy answer.
        new_tokens: how many tokens are scored or generated at most.
        metadata: what was drawn, such as the needle's depth.
    """

    task: str
    index: int
    prompt: Prompt
    answer: str = ""
    targets: tuple[int, ...] = ()
    new_tokens: int = _TARGETS
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def context_ids(self) -> tuple[int, ...]:
        """The prompt without the question."""
        return self.prompt.ids[: len(self.prompt.ids) - self.prompt.suffix_length]

    @property
    def suffix_ids(self) -> tuple[int, ...]:
        """The question, the template's end and the beginning of the reply."""
        return self.prompt.ids[len(self.prompt.ids) - self.prompt.suffix_length :]


@dataclass(frozen=True)
class Source:
    """What all tasks draw from.

    Attributes:
        tokenizer: the model's.
        text: what fills the contexts.
        tokens: tokens of a whole prompt; retrieval prompts may be a word shorter.
        seed: from which everything is drawn.
    """

    tokenizer: PreTrainedTokenizerBase
    text: str
    tokens: int
    seed: int = 0

    @cached_property
    def haystack(self) -> Haystack:
        """The text in pieces."""
        return Haystack(self.text)

    @cached_property
    def ids(self) -> tuple[int, ...]:
        """The whole text's tokens."""
        return tuple(self.tokenizer(self.text, add_special_tokens=False, verbose=False).input_ids)

    @cached_property
    def template(self) -> Template:
        """The model's chat template."""
        return chat_template(self.tokenizer)

    def random(self, task: str, index: int) -> random.Random:
        """The generator of one example."""
        return random.Random(f"{self.seed}/{task}/{index}")


@dataclass(frozen=True)
class Task(ABC):
    """A task by name."""

    name: str
    source: Source

    @abstractmethod
    def example(self, index: int) -> Example:
        """Example number `index`, from 0. Raises InputError if the text or the number of tokens is too small."""


@dataclass(frozen=True)
class Retrieval(Task):
    """Needles in a text: the answer must contain the value that belongs to the key that is asked for.

    Attributes:
        one: what a value is: a "number" of seven digits, or a common "word".
        distractors: further needles with other keys and values.
    """

    one: str = "number"
    distractors: int = 0

    def example(self, index: int) -> Example:
        """See Task. Depths are spread evenly over any number of examples."""
        source, draw = self.source, self.source.random(self.name, index)
        keys = draw.sample(KEYS, self.distractors + 1)
        values = draw.sample(VALUES, len(keys)) if self.one == "word" else self._numbers(draw, len(keys))
        low, high = _DEPTHS
        spread = (random.Random(f"{source.seed}/{self.name}").random() + index * _GOLDEN) % 1
        depths = [low + (high - low) * spread, *(draw.uniform(low, high) for _ in keys[1:])]
        needles = [
            (depth, _NEEDLE.format(one=self.one, key=key, value=value))
            for depth, key, value in zip(depths, keys, values, strict=True)
        ]
        start = draw.choice(source.haystack.starts)
        prompt = self._fill(start, needles, keys[0])
        length = len(source.tokenizer(f" {values[0]}", add_special_tokens=False).input_ids)
        metadata = {"key": keys[0], "depth": round(depths[0], 4)}
        return Example(self.name, index, prompt, values[0], (), length + _SLACK, metadata)

    @staticmethod
    def _numbers(draw: random.Random, count: int) -> list[str]:
        return [str(number) for number in draw.sample(range(1_000_000, 10_000_000), count)]

    def _fill(self, start: int, needles: list[tuple[float, str]], key: str) -> Prompt:
        """The longest prompt of at most the wanted number of tokens."""
        source, wanted, available = self.source, self.source.tokens, len(self.source.haystack.pieces)

        def build(length: int) -> Prompt:
            return source.template.prompt(
                source.tokenizer,
                _INTRO.format(one=self.one),
                hide(source.haystack.window(start, length), needles),
                _QUESTION.format(one=self.one, key=key),
                _ANSWER.format(one=self.one, key=key),
            )

        least = len(build(0).ids)
        if wanted < least + _LEAST_TEXT:
            raise InputError(
                f"{wanted} tokens are too few for the task '{self.name}': its prompt has {least} without any text; "
                f"give at least {least + _LEAST_TEXT}."
            )
        short, long = 0, min(available, wanted)
        while len(build(long).ids) <= wanted:
            if long == available:
                raise InputError(
                    f"The text is too short for prompts of {wanted} tokens: all of it makes {len(build(long).ids)}; "
                    "give fewer tokens or a longer text."
                )
            short, long = long, min(available, 2 * long)
        while long - short > 1:
            middle = (short + long) // 2
            short, long = (middle, long) if len(build(middle).ids) <= wanted else (short, middle)
        return build(short)


@dataclass(frozen=True)
class Continuation(Task):
    """Plain text, no question: the text's next 64 tokens, teacher-forced."""

    def example(self, index: int) -> Example:
        """See Task. Examples are windows of the text at random places."""
        source = self.source
        last = len(source.ids) - source.tokens - _TARGETS
        if last < 0:
            raise InputError(
                f"The text is too short for the task '{self.name}': it has {len(source.ids)} tokens, "
                f"but {source.tokens} of context and {_TARGETS} more are asked for; give fewer tokens or a longer text."
            )
        start = source.random(self.name, index).randint(0, last)
        first = list(source.tokenizer("a", verbose=False).input_ids[:1])
        begin = first if first == [source.tokenizer.bos_token_id] else []
        end = start + source.tokens - len(begin)
        ids = (*begin, *source.ids[start:end])
        targets = source.ids[end : end + _TARGETS]
        return Example(self.name, index, Prompt(ids, len(begin), 1), targets=targets, metadata={"start": start})


def check_task_names(names: Sequence[str]) -> None:
    """Raise InputError for no name, a name that is none of `TASKS`, or one that stands twice."""
    if not names:
        raise InputError("No task is named; name at least one.")
    for name in names:
        if name not in TASKS:
            raise InputError(f"There is no task '{name}'{nearest(name, TASKS)}")
        if list(names).count(name) > 1:
            raise InputError(f"The task '{name}' stands twice; name it once.")


def make_tasks(names: Sequence[str], source: Source) -> list[Task]:
    """The tasks of the given names, in that order. Raises InputError as `check_task_names` does."""
    check_task_names(names)
    return [TASKS[name](name, source) for name in names]


TASKS: Mapping[str, Any] = {
    "niah": Retrieval,
    "multikey": lambda name, source: Retrieval(name, source, distractors=4),
    "words": lambda name, source: Retrieval(name, source, one="word"),
    "continuation": Continuation,
}
