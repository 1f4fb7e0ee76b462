"""The kernels as one operator of torch, so that `torch.compile` does not look inside them."""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

from kvframe.types import Encoded


def run(
    query: Tensor, encoded: Encoded, scale: float, impl: str, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """The kernel `impl` ("cpu" or "triton") on codes; while a model is compiled, through the operator."""
    if torch.compiler.is_compiling():
        names = list(encoded.codes)
        codes = [encoded.codes[name] for name in names]
        bounds = list(encoded.bounds)
        held = (encoded.log_multiplicity, encoded.offsets, bounds, encoded.format)
        return attend(query, codes, names, *held, impl, scale, softcap)
    module = import_module(f"kvframe.ops.ragged_attention.{'numba' if impl == 'cpu' else impl}")
    return module.ragged_attention(query, encoded, scale, softcap)


def _attend(
    query: Tensor,
    codes: list[Tensor],
    names: list[str],
    log_multiplicity: Tensor | None,
    offsets: Tensor,
    bounds: list[int],
    format: str,
    impl: str,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    encoded = Encoded(offsets, dict(zip(names, codes, strict=True)), format, query.dtype, log_multiplicity)
    encoded.__dict__["bounds"] = tuple(bounds)  # known already: no transfer from the device
    return run(query, encoded, scale, impl, softcap)


SCHEMA = (
    "(Tensor query, Tensor[] codes, str[] names, Tensor? log_multiplicity, Tensor offsets, int[] bounds, str format, "
    "str impl, float scale, float? softcap=None) -> (Tensor, Tensor)"
)
attend = torch.library.custom_op("kvframe::attend_codes", _attend, mutates_args=(), schema=SCHEMA)


@attend.register_fake
def _(query, codes, names, log_multiplicity, offsets, bounds, format, impl, scale, softcap=None):  # type: ignore[no-untyped-def]
    return (
        query.new_empty(query.shape, dtype=torch.float32),
        query.new_empty(query.shape[:-1], dtype=torch.float32),
    )
