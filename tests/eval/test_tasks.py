"""Prompts: exactly as long as asked, the same for a seed, and cut where the question begins."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvframe.errors import InputError
from kvframe.eval import TASKS, Source, embedded_text, make_tasks
from kvframe.eval.haystack import Haystack, hide
from kvframe.eval.prompt import chat_template
from kvframe.eval.vocabulary import KEYS, VALUES

RETRIEVAL = ["niah", "multikey", "words"]


def task(name, source):
    return make_tasks([name], source)[0]


@pytest.mark.parametrize("name", RETRIEVAL)
@pytest.mark.parametrize("index", [0, 3])
def test_a_retrieval_prompt_holds_what_it_asks_for(name, index, source, tokenizer):
    example = task(name, source).example(index)
    prompt, key = example.prompt, example.metadata["key"]
    assert source.tokens - 8 <= len(prompt.ids) <= source.tokens
    assert example.context_ids + example.suffix_ids == prompt.ids
    text = tokenizer.decode(prompt.ids)
    assert text.count(f" for {key} is: {example.answer}.") == 1
    assert len(re.findall(r"One of the special magic", text)) == (5 if name == "multikey" else 1)
    kind = "word" if name == "words" else "number"
    assert re.fullmatch("[a-z]+" if name == "words" else "[1-9][0-9]{6}", example.answer)
    assert tokenizer.decode(example.suffix_ids).strip() == (
        f"What is the special magic {kind} for {key} mentioned in the provided text?</s>\n<|assistant|>\n"
        f"The special magic {kind} for {key} mentioned in the provided text is"
    )
    prefix = tokenizer.decode(prompt.ids[: prompt.prefix_length])
    assert prefix.startswith("<|user|>\nA special magic")
    assert prefix.rstrip().endswith("afterwards.")


def test_depths_are_spread_and_clear_of_both_ends(source):
    depths = sorted(task("niah", source).example(i).metadata["depth"] for i in range(8))
    assert 0.05 <= depths[0] <= 0.25
    assert 0.7 <= depths[-1] <= 0.9
    assert max(b - a for a, b in pairwise(depths)) < 0.25


@pytest.mark.parametrize("name", list(TASKS))
def test_an_example_depends_on_seed_task_and_number_only(name, source, tokenizer, prose):
    again = Source(tokenizer, prose, 500, seed=3)
    assert task(name, source).example(2) == task(name, again).example(2)
    assert task(name, source).example(2) != task(name, source).example(1)
    assert task(name, source).example(2) != task(name, Source(tokenizer, prose, 500, seed=4)).example(2)


def test_a_continuation_is_a_window_of_the_text(source, tokenizer):
    example = task("continuation", source).example(0)
    assert len(example.prompt.ids) == 500
    assert len(example.targets) == 64
    assert tokenizer.decode([*example.prompt.ids, *example.targets]) in source.text


def test_a_tokenizer_without_template_that_adds_a_first_token(plain, prose):
    source = Source(plain, prose, 500)
    for name in TASKS:
        ids = task(name, source).example(0).prompt.ids
        assert ids[0] == plain.bos_token_id
        assert ids.count(plain.bos_token_id) == 1
        assert plain.eos_token_id not in ids
        assert 492 <= len(ids) <= 500


def test_the_words_are_distinct():
    assert len(set(KEYS)) == len(KEYS)
    assert len(set(VALUES)) == len(VALUES)
    assert not set(KEYS) & set(VALUES)


def test_too_few_tokens_and_too_short_texts(tokenizer, prose):
    with pytest.raises(InputError, match=r"100 tokens are too few for the task 'multikey'.*give at least"):
        task("multikey", Source(tokenizer, prose, 100)).example(0)
    for name in ("niah", "continuation"):
        with pytest.raises(InputError, match="too short"):
            task(name, Source(tokenizer, "A short text. It ends here.", 500)).example(0)


def test_wrong_task_names(source):
    with pytest.raises(InputError, match="no task 'nia'; did you mean 'niah'"):
        make_tasks(["nia"], source)
    with pytest.raises(InputError, match="twice"):
        make_tasks(["niah", "niah"], source)
    with pytest.raises(InputError, match="No task"):
        make_tasks([], source)


@given(st.text(max_size=200))
def test_pieces_give_the_text_back(text):
    assert "".join(Haystack(text).pieces) == " ".join(text.split())


@settings(max_examples=50)
@given(st.lists(st.floats(0, 1), max_size=5), st.integers(0, 60))
def test_hiding_loses_nothing(depths, length):
    pieces = Haystack("One two three. Four five six! Seven (eight.) Nine ten? " * 3).window(4, min(length, 28))
    sentences = [(depth, f"<{i}>") for i, depth in enumerate(depths)]
    text = hide(pieces, sentences)
    assert re.sub(r"<\d> ?", "", text + " ").split() == "".join(pieces).split()
    assert sorted(re.findall(r"<\d>", text)) == sorted(s for _, s in sentences)


def test_needles_stand_between_sentences():
    pieces = Haystack("One two three. Four five six! Seven eight nine. Ten eleven twelve.").pieces
    assert hide(pieces, [(0.4, "X.")]) == "One two three. Four five six! X. Seven eight nine. Ten eleven twelve."
    assert hide(pieces, [(0, "X."), (1, "Y.")]).startswith("X. One")
    assert hide(Haystack("no end in sight").pieces, [(0.5, "X.")]) == "no end X. in sight"


def test_a_template_that_swallows_the_message():
    class Broken:
        chat_template = "x"

        def apply_chat_template(self, messages, **settings):
            return "nothing"

    with pytest.raises(InputError, match="chat template"):
        chat_template(Broken())


@pytest.mark.model
def test_the_embedded_model_gets_prompts_of_the_asked_length():
    from kvframe.hf import load_model

    _, tokenizer = load_model("smollm2")
    source = Source(tokenizer, embedded_text(), 768)
    for name in TASKS:
        for index in range(3):
            assert 764 <= len(task(name, source).example(index).prompt.ids) <= 768
