"""Prompts in the model's chat template, cut into prefix, context and suffix by tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvframe.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONTENT = "KVFRAME-CONTENT"


@dataclass(frozen=True)
class Prompt:
    """A tokenised prompt.

    Attributes:
        ids: all tokens.
        prefix_length: first tokens, which belong to the template and what introduces the text.
        suffix_length: last tokens, which belong to the question and what follows it.
    """

    ids: tuple[int, ...]
    prefix_length: int
    suffix_length: int


@dataclass(frozen=True)
class Template:
    """The text around a user's message; `special` says whether the tokenizer must add its own special tokens."""

    head: str
    tail: str
    special: bool

    def prompt(self, tokenizer: PreTrainedTokenizerBase, before: str, context: str, after: str, answer: str) -> Prompt:
        """Tokenise `before + context + after` as the user's message and `answer` as the beginning of the reply.

        The text is tokenised in one piece; a token that reaches over a border belongs to the side of the question."""
        text = self.head + before
        ids = self._tokens(tokenizer, text + context + after + self.tail + answer)
        prefix = _common(ids, self._tokens(tokenizer, text))
        suffix = len(ids) - _common(ids, self._tokens(tokenizer, text + context))
        return Prompt(tuple(ids), prefix, suffix)

    def _tokens(self, tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
        ids = list(tokenizer(text, add_special_tokens=self.special, verbose=False).input_ids)
        # What a tokenizer puts at the end of a text would end the reply before it begins.
        while self.special and ids and ids[-1] == tokenizer.eos_token_id and ids[-1] != tokenizer.bos_token_id:
            ids.pop()
        return ids


def chat_template(tokenizer: PreTrainedTokenizerBase) -> Template:
    """The tokenizer's chat template around one user's message; nothing for a tokenizer without one.

    Raises InputError for a template that does not contain the message as it stands."""
    if not getattr(tokenizer, "chat_template", None):
        return Template("", "", special=True)
    message = [{"role": "user", "content": _CONTENT}]
    text = str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
    head, found, tail = text.partition(_CONTENT)
    if not found:
        raise InputError("The tokenizer's chat template does not contain the user's message; use another tokenizer.")
    return Template(head, tail, special=False)


def _common(first: list[int], second: list[int]) -> int:
    """How many tokens at the beginning are the same."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return min(len(first), len(second))
