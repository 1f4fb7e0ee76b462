"""GGUF files that were read once. Reading one means to dequantise it, which takes long, so the model is kept as a
folder in the user's cache directory, under a name that holds the file's hash."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvframe.cachedir import cache_dir
from kvframe.errors import ModelError
from kvframe.hf.checkpoint import Checkpoint

# Counts up when what is written into the folder changes.
FORMAT = 1
log = logging.getLogger("kvframe")


def kept_folder(gguf: Path, name: str) -> Path:
    """Where the model that a GGUF file holds is kept: the folder's name holds the file's hash and the version of
    transformers, so that a copy made from another file or by another reader is never taken.

    Raises OSError if the file cannot be read."""
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return cache_dir() / f"{name}-{digest[:16]}-transformers-{transformers.__version__}-v{FORMAT}"


def kept_checkpoint(folder: Path) -> Checkpoint:
    """A folder that `write_model` wrote."""
    return Checkpoint(str(folder), remedy="delete that folder, which is written anew at the next load")


def write_model(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **words: str) -> None:
    """Keep a model and its tokenizer; raises what `write_whole` does, which takes the `words`."""

    def write(target: Path) -> None:
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)

    write_whole(folder, write, **words)


def read_kept(source: Checkpoint, dtype: torch.dtype | str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Read a GGUF file as `Checkpoint.read` does, from the folder where it was kept at an earlier time, if it was. What
    is read anew is kept, one folder a dtype; if it cannot be kept, a warning says why, and the model is there all the
    same. `dtype` "auto" is float32, to which weights are dequantised.

    Raises what `Checkpoint.read` does."""
    path = Path(source.location, source.gguf_file or "")
    dtype = torch.float32 if dtype == "auto" else dtype
    name = f"gguf-{str(dtype).removeprefix('torch.')}"
    try:
        folder = kept_folder(path, name)
    except OSError:
        return source.read(dtype)  # which says what is wrong with the file
    if folder.is_dir():
        return kept_checkpoint(folder).read(dtype)
    model, tokenizer = source.read(dtype)
    try:
        write_model(folder, model, tokenizer, what=f"The model of {path.name}")
    except ModelError as error:
        log.warning("%s", error)
    else:
        log.warning("%s was read, once; what it holds is kept in %s, from which it loads in no time", path, folder)
    return model, tokenizer


def write_whole(folder: Path, write: Callable[[Path], None], what: str = "The model", room: str = "") -> None:
    """Let `write` fill a new folder beside `folder`, then put it in place in one step.

    If another process was faster, its folder stays and this one is dropped.

    Raises:
        ModelError: the folder cannot be written; nothing of it is left then. It says `what` was to be kept, and how
            much `room` that takes.
    """
    partial = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    try:
        partial.mkdir(parents=True)
        write(partial)
        try:
            os.replace(partial, folder)
        except OSError:
            if not folder.is_dir():
                raise
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{what} could not be kept in {folder.parent} ({error}); "
            f"set KVFRAME_CACHE_DIR to a directory with room for it{room} that you may write to."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
