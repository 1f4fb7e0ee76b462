"""The page on models, docs/models.md, written from what kvframe does with each tiny one: python tests/models_page.py"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import families
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

import kvframe
from kvframe.errors import ModelError
from kvframe.hf.layer import CompressedLayer

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
INTRODUCTION = """# Models

kvframe looks at what a model does when it reads a single token, not at its name. It serves a model if each of its
layers with full attention then gives its attention function one key and one value a KV head, of one size, and if the
rotation of the keys can be undone, or there is none. A model that cannot be served says so in a sentence at
`pipeline.cache(model)`, before a prompt is read.

- **Rotation** is a property of each layer: there may be layers that do not rotate, several bases in one model, rotated
  parts of a head, neighbouring channels that turn together, or halves. The types `dynamic` and `longrope` change with
  the length of what is read and are refused.
- **Sliding-window and recurrent layers** bound their memory themselves and stay as transformers keeps them.
- **Quantised weights** and **adapters** (LoRA and its like; active, stacked, switched off, merged): what a stage must
  know of a projection is asked of the layer itself; packed bytes are never taken for numbers.
- **Saved caches** and calibrations belong to the model whose keys and values they hold; a fine-tune is another model,
  and active adapters count.

The tables are made by `python tests/models_page.py` from every causal language model of transformers {version}, in a
tiny size with random weights. The tests hold each of them to the answers that it gives with transformers' own cache, in
fp32 and bfloat16, alone and in a padded batch.
"""


def kinds_of_layers(cache: Any) -> str:
    """Which layers are compressed, and what the others are."""
    others = sorted({type(layer).__name__ for layer in cache.layers if not isinstance(layer, CompressedLayer)})
    said = {"DynamicSlidingWindowLayer": "sliding window", "DummyLayer": "no attention"}
    stay = sorted({said.get(name, "recurrent") for name in others})
    return f"full attention ({', '.join(stay)} as it is)" if stay else "all"


def rotation_of(info: Any) -> str:
    """What is turned."""
    ropes = [info.rope[layer] for layer in range(info.layers)]
    turned = {2 * len(rope.inv_freq) for rope in ropes}
    if turned == {0}:
        return "none"
    text = "neighbouring channels" if info.channel_order is not None else "halves"
    if turned - {0} != {info.head_dim}:
        text += ", in part"
    return text + (", not in all layers" if 0 in turned else "")


def row(kind: str, model: PreTrainedModel) -> str:
    """One line of a table: of those served, with four cells, or of those refused, with three."""
    name = type(model).__name__
    try:
        cache = kvframe.load("identity").cache(model)
    except ModelError as error:
        reason = str(error).removeprefix(f"{name} has no attention contract that kvframe knows: ").partition("; ")[0]
        return f"| {kind} | `{name}` | {reason.removeprefix(f'{name} ')} |"
    return f"| {kind} | `{name}` | {kinds_of_layers(cache)} | {rotation_of(cache.info)} |"


def page() -> str:
    """The whole page."""
    import transformers

    rows = [row(kind, families.make(kind)) for kind in families.kinds()]
    served = [line for line in rows if line.count("|") == 5]
    refused = [line for line in rows if line.count("|") == 4]
    left_out = [f"| {kind} | {reason} |" for kind, reason in sorted(families.LEFT_OUT.items())]
    parts = [
        INTRODUCTION.format(version=transformers.__version__),
        "## Served\n",
        "\n".join(["| transformers' name | class | compressed layers | rotation |", "|---|---|---|---|", *served]),
        "\n## Refused\n",
        "\n".join(["| transformers' name | class | why |", "|---|---|---|", *refused]),
        "\n## Not tried\n",
        "\n".join(["| transformers' name | why |", "|---|---|", *left_out]),
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    transformers_logging.set_verbosity_error()
    PAGE.write_text(page(), encoding="utf-8")
