"""The core's tiny models and observations serve here too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "tests"))


@pytest.fixture(autouse=True)
def _no_grad():
    """Tests run as users run inference."""
    with torch.no_grad():
        yield
