"""Shared fixtures: tiny random models and observations. Everything is offline and seeded."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def _no_grad():
    """Tests run as users run inference."""
    with torch.no_grad():
        yield


@pytest.fixture(scope="session")
def llama():
    """A tiny random Llama with grouped-query attention, made once; tests must not change it."""
    from tiny import tiny_model

    return tiny_model("llama")
