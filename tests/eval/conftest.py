"""A tiny model with a tokenizer of its own, and specs that need no plugin."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kvframe.eval import Source, embedded_text

CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE with a chat template, trained on a piece of the embedded text."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    inner.train_from_iterator([embedded_text()[:60_000]], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", chat_template=CHAT)


@pytest.fixture(scope="session")
def plain(tokenizer) -> PreTrainedTokenizerFast:
    """The same tokenizer, without a chat template and with a token that begins every text."""
    from tokenizers.processors import TemplateProcessing

    inner = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    inner.add_special_tokens(["<s>"])
    inner.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", inner.token_to_id("<s>"))])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", bos_token="<s>")


@pytest.fixture(scope="session")
def model(tokenizer):
    """A tiny random Llama for that tokenizer."""
    from tiny import tiny_model

    return tiny_model("llama", vocab_size=len(tokenizer) + 1, max_position_embeddings=1024, eos_token_id=None)


@pytest.fixture(scope="session")
def prose() -> str:
    """Text of our own: sentences of random words."""
    draw = random.Random(0)
    words = "the old cat sat by a warm red stove and the small dog ran off to the far hill with his friend"
    sentences = (" ".join(draw.choices(words.split(), k=draw.randint(4, 12))).capitalize() + "." for _ in range(700))
    return " ".join(sentences)


@pytest.fixture(scope="session")
def source(tokenizer, prose) -> Source:
    """Prompts of 500 tokens."""
    return Source(tokenizer, prose, 500, seed=3)


@pytest.fixture
def top_k_file(tmp_path):
    """A spec of core stages that drops tokens."""
    file = tmp_path / "chunky.yaml"
    file.write_text("budget: {ratio: 2}\nprotect: {sink: 4, recent: 16}\nscorer: uniform\nallocator: top_k\n")
    return file
