"""Ragged attention on a CPU in one pass over the entries, where they lie: dense fp32, bf16, fp16, and int8."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numba import carray, njit
from numba.extending import overload
from torch import Tensor

from kvframe.errors import InputError
from kvframe.ops import native
from kvframe.ops.native.numba import FAST, as_float, cap, compiled, f32, pointer, softmax, take
from kvframe.ops.ragged_attention.plan import work_items
from kvframe.ops.ragged_attention.vectors import LANES, ROWS, gather_rows, score_rows
from kvframe.types import Encoded

TILE = 64  # entries at once: their keys and values stay in the first-level cache
AT_ONCE = (4, 3, 2, 1)  # numbers of queries that share a load; the first that divides and whose sums fit is taken
IN_REGISTERS = 256  # sums that stay in registers: of queries times channels
# How numpy, which has no bfloat16, sees the rows. Signed halves tell float16 from bfloat16.
VIEWS = {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.float16: np.int16, torch.int8: np.int8}


def rows_of(codes, first, n, tile):
    """Rows `first` to `first + n` as fp32 `[n, D]`: a view, or converted into `tile`."""


@overload(rows_of)
def _rows_of(codes, first, n, tile):
    kind = str(codes.dtype)
    if kind == "float32":
        return lambda codes, first, n, tile: codes[first : first + n]
    if kind == "int8":

        def whole(codes, first, n, tile):
            for j in range(n):
                for d in range(codes.shape[1]):
                    tile[j, d] = f32(codes[first + j, d])
            return tile[:n]

        return whole
    if kind == "uint16":

        def brain(codes, first, n, tile):
            for j in range(n):
                for d in range(codes.shape[1]):
                    tile[j, d] = as_float(np.int32(np.uint32(codes[first + j, d]) << np.uint32(16)))
            return tile[:n]

        return brain

    def half(codes, first, n, tile):
        for j in range(n):
            for d in range(codes.shape[1]):
                bits = np.int32(codes[first + j, d])
                # The exponent's bias moves from 15 to 127; multiplying does that for subnormal numbers too.
                size = as_float((bits & np.int32(0x7FFF)) << np.int32(13)) * f32(2.0**112)
                if (bits & np.int32(0x7C00)) == np.int32(0x7C00):
                    size = as_float(((bits & np.int32(0x3FF)) << np.int32(13)) | np.int32(0x7F800000))
                tile[j, d] = -size if bits < 0 else size
        return tile[:n]

    return half


@njit(fastmath=FAST)
def scores(query, keys, n, logits):
    """Products of a query with the first `n` keys, of any number of channels."""
    for j in range(n):
        total = f32(0.0)
        for x in range(query.shape[0]):
            total += query[x] * keys[j, x]
        logits[j] = total


@njit(fastmath=FAST)
def gather(weights, values, n, held):
    """Add the first `n` values, times their weights, of any number of channels."""
    for j in range(n):
        for x in range(held.shape[0]):
            held[x] += weights[j] * values[j, x]


@cache
def attend_kernel(dim: int, at_once: int, view: type, scaled: bool, caps: bool):
    """The kernel for heads of `dim` channels, which takes so many queries at once (0 and 1: any number of channels);
    `scaled` rows have a bfloat16 factor each; it `caps` logits or leaves them."""

    kind, width = np.dtype(view).name, np.dtype(view).itemsize

    def kernel(arguments):
        a = carray(arguments, (16,))
        n_items, pairs, queries, entries = a[1], a[2], a[3], a[4]
        size = dim if dim else a[12]
        items = carray(pointer(a[5]), (n_items, 3), np.int64)
        query = carray(pointer(a[6]), (pairs, queries, size), f32)
        keys = carray(pointer(a[7]), (entries, size), view)
        values = carray(pointer(a[8]), (entries, size), view)
        bias = carray(pointer(a[9]), (entries,), f32)
        key_scale = carray(pointer(a[10]), (entries,), np.uint16)
        value_scale = carray(pointer(a[11]), (entries,), np.uint16)
        softcap = as_float(np.int32(a[13]))
        out = carray(pointer(a[14]), (n_items, queries, size), f32)
        lse = carray(pointer(a[15]), (n_items, queries), f32)
        weighted = a[9] != 0
        tile = np.empty((TILE, size), f32)
        logits = np.empty((queries, TILE), f32)
        state = np.empty((queries, 2), f32)
        while True:
            item = take(a[0])
            if item >= n_items:
                break
            pair, begin, end = items[item, 0], items[item, 1], items[item, 2]
            held = out[item]
            held[:] = f32(0.0)
            state[:, 0] = f32(-np.inf)
            state[:, 1] = f32(0.0)
            for first in range(begin, end, TILE):
                n = min(TILE, end - first)
                quads = n // ROWS if dim else 0
                if dim:
                    source = a[7] + first * dim * width
                    for m in range(0, queries, at_once):
                        asked, found = query[pair, m].ctypes.data, logits[m].ctypes.data
                        score_rows(asked, source, quads, found, TILE, at_once, dim, kind)
                rest = quads * ROWS
                rows = rows_of(keys, first + rest, n - rest, tile)
                for m in range(queries):
                    row = logits[m]
                    scores(query[pair, m], rows, n - rest, row[rest:])
                    if scaled:
                        for j in range(n):
                            row[j] *= as_float(np.int32(np.uint32(key_scale[first + j]) << np.uint32(16)))
                    if caps:
                        cap(row, n, softcap)
                    if weighted:
                        for j in range(n):
                            row[j] += bias[first + j]
                    state[m, 0], state[m, 1] = softmax(row, n, state[m, 0], state[m, 1], held[m])
                if scaled:
                    for m in range(queries):
                        for j in range(n):
                            logits[m, j] *= as_float(np.int32(np.uint32(value_scale[first + j]) << np.uint32(16)))
                if dim:
                    source = a[8] + first * dim * width
                    for m in range(0, queries, at_once):
                        weights, target = logits[m].ctypes.data, held[m].ctypes.data
                        gather_rows(weights, TILE, source, n, target, at_once, dim, kind)
                else:
                    rows = rows_of(values, first, n, tile)
                    for m in range(queries):
                        gather(logits[m], rows, n, held[m])
            for m in range(queries):
                total = state[m, 1]
                for x in range(size):
                    held[m, x] = held[m, x] / total if total > 0 else f32(0.0)
                lse[item, m] = state[m, 0] + f32(np.log(total)) if total > 0 else f32(-np.inf)

    return compiled(kernel)


@compiled
def merge_kernel(arguments):
    """Merge the pieces of each pair by their log-sum-exps; a pair without pieces gets 0 and -inf."""
    a = carray(arguments, (10,))
    n_items, pairs, queries, dim = a[1], a[2], a[3], a[4]
    first = carray(pointer(a[5]), (pairs + 1,), np.int64)
    outs = carray(pointer(a[6]), (n_items, queries, dim), f32)
    lses = carray(pointer(a[7]), (n_items, queries), f32)
    out = carray(pointer(a[8]), (pairs, queries, dim), f32)
    lse = carray(pointer(a[9]), (pairs, queries), f32)
    for pair in range(pairs):
        for m in range(queries):
            top = f32(-np.inf)
            for item in range(first[pair], first[pair + 1]):
                top = max(top, lses[item, m])
            total = f32(0.0)
            for x in range(dim):
                out[pair, m, x] = f32(0.0)
            if top > f32(-np.inf):
                for item in range(first[pair], first[pair + 1]):
                    weight = f32(np.exp(lses[item, m] - top))
                    total += weight
                    for x in range(dim):
                        out[pair, m, x] += weight * outs[item, m, x]
                for x in range(dim):
                    out[pair, m, x] /= total
                lse[pair, m] = top + f32(np.log(total))
            else:
                lse[pair, m] = top


def ragged_attention(
    query: Tensor, encoded: Encoded, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attend codes of the formats "dense" and "int8" where they lie; contract as `Kernel.attend`.

    Raises InputError for another format, another device than the CPU, fp64, or codes that are not contiguous."""
    check(query, encoded, ("dense", "int8"))
    keys, values = (encoded.codes[name] for name in ("keys", "values"))
    scaled = encoded.format == "int8"
    factors = [encoded.codes[f"{name}_scale"] for name in ("keys", "values")] if scaled else [None, None]
    batch, query_heads, length, dim = query.shape
    # Addresses are handed over, so what does not fit would be read from elsewhere.
    if keys.dtype != values.dtype or keys.shape != values.shape or keys.shape[-1] != dim:
        described = (f"{t.dtype} {list(t.shape)}" for t in (keys, values))
        raise InputError(
            f"The cpu kernel takes keys and values alike, [N, {dim}], but they are {' and '.join(described)}."
        )
    pairs = len(encoded.bounds) - 1
    queries = batch * query_heads * length // pairs
    packed = (query.float() * scale).reshape(pairs, queries, dim).contiguous()
    known = dim % LANES == 0 and 64 <= dim <= 256
    at_once = next(n for n in AT_ONCE if queries % n == 0 and n * dim <= IN_REGISTERS) if known else 1
    kernel = attend_kernel(dim if known else 0, at_once, VIEWS[keys.dtype], scaled, softcap is not None)
    count = encoded.log_multiplicity
    count = None if count is None else count.float().contiguous()
    given = (keys, values, count, *factors, dim, None if softcap is None else native.bits(softcap))
    out, lse = attended(kernel, packed, encoded.bounds, dim, TILE, len(keys), given)
    shape = (batch, query_heads, length)
    return out.view(*shape, dim), lse.view(shape)


def attended(kernel, packed: Tensor, bounds: tuple[int, ...], dim: int, tile: int, entries: int, given):
    """Run a kernel over the items of all pairs for queries `[P, M, …]`; merge to out `[P, M, dim]`, lse `[P, M]`."""
    threads = torch.get_num_threads()
    items, first = work_items(bounds, threads, tile)
    pairs, queries = packed.shape[:2]
    outs, lses = torch.empty(len(items), queries, dim), torch.empty(len(items), queries)
    if len(items):
        sizes = (len(items), pairs, queries, entries)
        native.run(kernel, (*sizes, items, packed, *given, outs, lses), min(threads, len(items)))
    out, lse = torch.empty(pairs, queries, dim), torch.empty(pairs, queries)
    native.run(merge_kernel, (len(items), pairs, queries, dim, first, outs, lses, out, lse), 1)
    return out, lse


def check(query: Tensor, encoded: Encoded, formats: tuple[str, ...]) -> None:
    """Raise InputError for what the kernel cannot take."""
    if encoded.format not in formats:
        raise InputError(
            f"The cpu kernel has no loader for the format '{encoded.format}' (it has: {', '.join(formats)}); "
            "use attention: auto."
        )
    if query.device.type != "cpu":
        raise InputError(f"The cpu kernel runs on the CPU, but the query is on {query.device}; use attention: auto.")
    if query.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise InputError(f"The cpu kernel takes fp32, bf16 or fp16, not {query.dtype}; use attention: auto.")
    for name, tensor in encoded.codes.items():
        if tensor.dtype not in VIEWS:
            raise InputError(f"The cpu kernel takes codes in fp32, bf16, fp16 or int8, but '{name}' is {tensor.dtype}.")
        if not tensor.is_contiguous():
            raise InputError(f"The cpu kernel needs contiguous codes, but '{name}' is not; call .contiguous() on it.")
