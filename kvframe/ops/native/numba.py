"""The pieces that kernels are made of. Numba's cache of a kernel looks at the kernel's own file: after a change here,
remove `__pycache__`, or change that file too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import cfunc, njit, types
from numba.extending import intrinsic

f32 = np.float32
# Sums may be reordered and contracted, but infinities keep their meaning.
FAST = {"reassoc", "contract", "nsz", "arcp"}
FLOAT, INT, LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)


def at(builder, address, index, kind):
    """The pointer to element `index` of the array at an address."""
    return builder.gep(builder.inttoptr(address, kind.as_pointer()), [index])


def load(builder, address, index, kind):
    """A vector of neighbouring fp32 numbers, the first of them at `index`."""
    return builder.load(builder.bitcast(at(builder, address, index, FLOAT), kind.as_pointer()), align=4)


def store(builder, vector, address, index):
    """The inverse of `load`."""
    builder.store(vector, builder.bitcast(at(builder, address, index, FLOAT), vector.type.as_pointer()), align=4)


def splat(builder, value, lanes):
    """A number in all lanes."""
    start = ir.Constant(ir.VectorType(FLOAT, lanes), ir.Undefined)
    one = builder.insert_element(start, value, ir.Constant(INT, 0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(INT, lanes), [0] * lanes))


def compiled(function: Callable) -> Any:
    """A kernel `(pointer to int64) -> None` as a C function, kept on disk where numba finds a place for it."""
    signature = types.void(types.CPointer(types.int64))
    try:
        return cfunc(signature, nopython=True, cache=True)(function)
    except RuntimeError:  # numba has no folder to write to
        return cfunc(signature, nopython=True)(function)


@intrinsic
def pointer(context, address):
    """An address as a pointer, for `numba.carray`."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@intrinsic
def take(context, address):
    """The counter at an address before one is added to it, in one indivisible step."""

    def generate(context, builder, signature, arguments):
        counter = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", counter, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.int64), generate


@intrinsic
def as_float(context, bits):
    """The fp32 number of 32 bits."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@njit(fastmath=FAST, inline="always")
def exp(x):
    """`e ** x` for `x <= 0`, within 2e-7, as a polynomial that loops turn into vectors; below -87 that of -87."""
    # 2 ** n * e ** r with |r| <= ln(2) / 2, where e ** r is its Taylor series: the rest is below r ** 7 / 5040.
    t = max(x, f32(-87.0)) * f32(1.4426950408889634)
    n = np.int32(t - f32(0.5))
    r = (t - f32(n)) * f32(0.6931471805599453)
    p = f32(1 / 720)
    p = p * r + f32(1 / 120)
    p = p * r + f32(1 / 24)
    p = p * r + f32(1 / 6)
    p = p * r + f32(0.5)
    p = p * r + f32(1.0)
    p = p * r + f32(1.0)
    return p * as_float((n + np.int32(127)) << np.int32(23))


@njit(fastmath=FAST)
def cap(logits, n, softcap):
    """Cap the first `n` logits of a row at `softcap * tanh(logit / softcap)`, within a few roundings of the cap."""
    for j in range(n):
        e = exp(f32(-2.0) * abs(logits[j] / softcap))
        size = softcap * (f32(1.0) - e) / (f32(1.0) + e)
        logits[j] = -size if logits[j] < f32(0.0) else size


@njit(fastmath=FAST)
def softmax(logits, n, top, total, held):
    """Turn the first `n` logits of a row into weights relative to the highest seen; return that and the weights' sum so
    far, and shrink what is `held` accordingly."""
    high = top
    for j in range(n):
        high = max(high, logits[j])
    if high == f32(-np.inf):
        for j in range(n):
            logits[j] = f32(0.0)
        return top, total
    weight = f32(0.0)
    for j in range(n):
        logits[j] = exp(logits[j] - high)
        weight += logits[j]
    shrink = f32(0.0) if top == f32(-np.inf) else exp(top - high)
    for d in range(held.shape[0]):
        held[d] *= shrink
    return high, total * shrink + weight
