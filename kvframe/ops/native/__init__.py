"""Machine code for the CPU, made by numba where it is installed: what kernels share, and the threads that run them.

A kernel is a C function of one pointer, to an array of 64-bit integers: addresses and sizes. It takes its work items
from a counter until none is left, so that any number of threads share them out evenly. The threads are torch's own,
which wait for their next task without sleeping: those of another pool would have to fight them for the cores."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("kvframe")

INSTALL = "pip install 'kvframe[cpu]'"


@torch.compiler.assume_constant_result
def available() -> bool:
    """Whether numba can be used. Said once in the log if it cannot."""
    return _usable()


@cache
def _usable() -> bool:
    try:
        import_module("numba")
    except ImportError as error:  # also where it does not know the numpy that is there
        log.warning("Attention on the CPU decodes first, as numba cannot be used (%s); %s is faster.", error, INSTALL)
        return False
    return True


def run(kernel: Any, arguments: Sequence[Tensor | int | None], threads: int) -> None:
    """Run a kernel (what `compiled` returns) with a counter, then the arguments, in `threads` of torch's threads.

    Tensors are handed over by address (None = 0): they must be contiguous, on the CPU, and outlive the call."""
    counter = ctypes.c_int64(0)
    words = [a.data_ptr() if isinstance(a, Tensor) else (a or 0) for a in arguments]
    block = (ctypes.c_int64 * (len(words) + 1))(ctypes.addressof(counter), *words)
    parallel = _parallel() if threads > 1 else None
    if parallel is None:
        _alone(kernel.address)(ctypes.addressof(block))
    else:
        parallel(kernel.address, ctypes.addressof(block), threads, 0)


def bits(number: float) -> int:
    """The bits of an fp32 number, as which a kernel is given one."""
    return ctypes.c_int32.from_buffer(ctypes.c_float(number)).value


@cache
def _alone(address: int) -> Callable[[int], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)


@cache
def _parallel() -> Callable[[int, int, int, int], None] | None:
    """The entry point of the OpenMP runtime that torch itself runs on; None where there is none (one thread then)."""
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        file = Path(torch.__file__).parent / "lib" / name
        if file.exists():
            start = getattr(ctypes.CDLL(str(file)), "GOMP_parallel", None)
            if start is not None:
                start.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
                start.restype = None
                return start
    return None


__all__ = ["INSTALL", "available", "bits", "run"]
