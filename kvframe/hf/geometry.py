"""A model's geometry without its weights, for estimates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import DummyLayer

from kvframe.errors import ModelError
from kvframe.hf.checkpoint import find_checkpoint, first_line
from kvframe.hf.embedded import NAME, embedded_checkpoint
from kvframe.hf.finding import fresh_layers
from kvframe.hf.info import model_info
from kvframe.types import ModelInfo


@dataclass(frozen=True, eq=False)
class Geometry:
    """What an estimate needs of a model.

    Attributes:
        info: of the layers that are compressed; its weights are not there.
        itemsize: bytes of one value in the dtype that the checkpoint names (fp32 if it names none).
        other_layers: layers that transformers keeps itself (sliding window, recurrent).
    """

    info: ModelInfo
    itemsize: int
    other_layers: int


def read_geometry(name: str | Path) -> Geometry:
    """Read a model's configuration; `name` as for `load_model`, but a folder needs no more than its config.json.

    Raises ModelError if it cannot be read, or if kvframe does not know the model's attention."""
    checkpoint = embedded_checkpoint() if name == NAME else find_checkpoint(name)
    where = {"gguf_file": checkpoint.gguf_file} if checkpoint.gguf_file is not None else {}
    try:
        config = AutoConfig.from_pretrained(checkpoint.location, local_files_only=checkpoint.local, **where)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    # Readers of checkpoints fail with almost any type of exception.
    except Exception as error:
        raise ModelError(
            f"No configuration could be read from {checkpoint} ({first_line(error)}); {checkpoint.remedy}."
        ) from error
    text = config.get_text_config(decoder=True)
    dtype = getattr(text, "dtype", None) or getattr(config, "dtype", None) or torch.float32
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    info = model_info(model)
    holding = [not isinstance(layer, DummyLayer) for layer in fresh_layers(model)]
    return Geometry(info, dtype.itemsize, sum(holding) - info.layers)
