"""Installs distributions into a temporary folder, offline, and runs Python that sees them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def install(source: Path, target: Path) -> None:
    """pip-install a distribution without its dependencies, without an index and without an isolated build."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-build-isolation", "--no-index", "--target", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def python(target: Path, *arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in `cwd` with `target` on its path."""
    given = {**os.environ, "PYTHONPATH": str(target), "OMP_NUM_THREADS": "1", "COLUMNS": "160", **environment}
    return subprocess.run(
        [sys.executable, "-P", *arguments], cwd=cwd, env=given, capture_output=True, text=True, check=False
    )
