"""Loading a model and its tokenizer by one name."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvframe.errors import InputError
from kvframe.hf.checkpoint import find_checkpoint
from kvframe.hf.devices import usable
from kvframe.hf.embedded import NAME, embedded_checkpoint
from kvframe.hf.kept import read_kept

DTYPES = ("float32", "bfloat16", "float16")


def load_model(
    name: str | Path, *, dtype: torch.dtype | str = "auto", device: str = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model, in evaluation mode, and its tokenizer, which pads on the left as generation needs.

    Args:
        name: "smollm2" for the embedded SmolLM2-135M-Instruct; or a folder that `save_pretrained` wrote; or a GGUF
            file, which is dequantised once and kept in the user's cache directory; or the id of a model on the hub. A
            string that names something on disk is a path; a `Path` is never taken for an id.
        dtype: of the weights, as a torch dtype or one of "float32", "bfloat16", "float16"; "auto" is the dtype that the
            checkpoint holds, which for "smollm2" is float32.
        device: where the model goes, such as "cpu" or "cuda:0".

    Raises:
        ModelError: there is no model of that name, or it cannot be read.
        InputError: no such dtype or device.
    """
    dtype = _dtype(dtype)
    target = usable(device)
    checkpoint = embedded_checkpoint() if name == NAME else find_checkpoint(name)
    model, tokenizer = checkpoint.read(dtype) if checkpoint.gguf_file is None else read_kept(checkpoint, dtype)
    tokenizer.padding_side = "left"
    # transformers wraps `to` without its types.
    return model.to(target), tokenizer  # type: ignore[arg-type]


def _dtype(dtype: torch.dtype | str) -> torch.dtype | str:
    if isinstance(dtype, torch.dtype) or dtype == "auto":
        return dtype
    if dtype not in DTYPES:
        raise InputError(f"dtype is {dtype!r}; expected 'auto' or one of {', '.join(DTYPES)}.")
    return getattr(torch, dtype)
