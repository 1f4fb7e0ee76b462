"""Every causal language model of transformers that can be made tiny: served right, or refused in a sentence."""

import warnings

import families
import models_page
import pytest
import torch
from transformers import DynamicCache

import kvframe
from kvframe.errors import ModelError
from kvframe.testing.numerics import logits_tolerance

PAGE = models_page.PAGE.read_text(encoding="utf-8").splitlines()
LENGTHS = (27, 14)
RATIO = {"budget.ratio": 2, "protect.recent": 4, "protect.sink": 2}
SPECS = {"snapkv": RATIO, "gracekv": RATIO, "centroidkv": RATIO, "int8": {"protect.recent": 4}}


@pytest.fixture(autouse=True)
def _quiet():
    """Small configurations are odd ones, and transformers says so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def padded(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Left-padded rows as a batch."""
    width = max(map(len, rows))
    ids, mask = torch.zeros(2, len(rows), width, dtype=torch.int64).unbind(0)
    for row, tokens in enumerate(rows):
        ids[row, width - len(tokens) :], mask[row, width - len(tokens) :] = tokens, 1
    return {"input_ids": ids, "attention_mask": mask}


def answer(model, cache, rows: list[torch.Tensor]) -> torch.Tensor:
    """The logits of one more token after a prompt, `[B, V]`."""
    inputs = padded(rows)
    mask = inputs["attention_mask"]
    model(**inputs, position_ids=(mask.cumsum(1) - 1).clamp_min(0), cache=cache)
    longer = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
    token = torch.full((len(rows), 1), 7)
    step = model(input_ids=token, attention_mask=longer, position_ids=mask.sum(1, keepdim=True), cache=cache)
    return step.logits[:, -1].float()


def refusal(model) -> str:
    """Why a model is not served; "" if it is."""
    try:
        kvframe.load("identity").cache(model)
    except ModelError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", families.kinds())
def test_family(kind):
    model = families.make(kind)
    assert models_page.row(kind, model) in PAGE, "make docs/models.md anew: python tests/models_page.py"
    rows = [torch.randint(3, 97, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
    if said := refusal(model):
        assert said.startswith(type(model).__name__)
        assert len(said.splitlines()) == 1
        return
    logits = answer(model, DynamicCache(config=model.config), rows)
    limit = 2 * logits_tolerance(logits, families.LAYERS, 96, max(LENGTHS))

    def padding_costs(make) -> float:
        together = answer(model, make(), rows)
        alone = torch.cat([answer(model, make(), [row]) for row in rows])
        return float((together - alone).abs().max())

    settings = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    inputs = padded(rows)
    want = model.generate(**inputs, **settings)
    assert torch.equal(model.generate(**inputs, cache=kvframe.load("identity").cache(model), **settings), want)
    # Some models do not mask padding where they recur; a cache cannot mend that.
    if padding_costs(lambda: DynamicCache(config=model.config)) <= limit:
        for name, changes in SPECS.items():
            pipeline = kvframe.load(name, changes)
            assert padding_costs(lambda pipeline=pipeline: pipeline.cache(model)) <= limit, name
    low = model.to(torch.bfloat16)
    want = low.generate(**inputs, **settings)
    assert torch.equal(low.generate(**inputs, cache=kvframe.load("identity").cache(low), **settings), want)


def test_the_page_lists_each_kind_once():
    listed = [line.split(" ")[1] for line in PAGE if line.startswith("| ") and not line.startswith("| transformers'")]
    assert sorted(listed) == sorted(families.CLASSES)
