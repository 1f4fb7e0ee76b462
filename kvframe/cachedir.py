"""The directory for what can be made again."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def cache_dir() -> Path:
    """`KVFRAME_CACHE_DIR`, or the platform's own directory for users' caches."""
    chosen = os.environ.get("KVFRAME_CACHE_DIR")
    return Path(chosen).expanduser() if chosen else platformdirs.user_cache_path("kvframe")
