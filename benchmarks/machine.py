"""What the benchmarks share: the machine in words, and the speed at which it reads memory."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def describe() -> dict[str, object]:
    """The processor, its threads, and the versions that matter."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0] if names else model
    packages = {name: version(name) for name in ("torch", "transformers")}
    try:
        packages["numba"] = version("numba")
    except ModuleNotFoundError:
        packages["numba"] = "none"
    return {"processor": model, "threads": torch.get_num_threads(), **packages}


def milliseconds(call: Callable[[], object], repeats: int = 21, warm: int = 2) -> float:
    """Median time of a call."""
    times = []
    for index in range(repeats + warm):
        begin = time.perf_counter()
        call()
        if index >= warm:
            times.append((time.perf_counter() - begin) * 1000)
    return statistics.median(times)


def read_speed(megabytes: int = 512) -> float:
    """Bytes a millisecond at which all threads together read memory once, summing it up."""
    block = torch.ones(megabytes << 18)
    return block.numel() * 4 / milliseconds(block.sum, 7)


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    """Write measurements with the machine's description, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps({"machine": describe(), "rows": rows}, indent=1) + "\n")
    partial.replace(path)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure beside the file of its figures, as PNG and SVG."""
    for kind in ("png", "svg"):
        figure.savefig(path.with_suffix(f".{kind}"), dpi=110)
