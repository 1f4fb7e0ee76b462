"""Runs a pipeline once on small random prompts, so that a stage's mistakes show before any model is loaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvframe.contracts import Untouched, blaming
from kvframe.errors import KvframeError, StageError
from kvframe.pipeline import Compressed, Pipeline
from kvframe.types import Observation, check_shape

# A left-padded batch: the second row is shorter. Body tokens of the rows, protected ones on top.
BODY = (96, 61)
PROTECTED = 4


@dataclass(frozen=True)
class DryRun:
    """What a dry run came to: `done` False if a stage cannot serve the random model, for the reason in `text`."""

    done: bool
    text: str


def dry_run(pipeline: Pipeline, seed: int = 0) -> DryRun:
    """Compress two random prompts, a further block if the spec asks for it, and attend what is kept.

    Raises StageError, naming the stage, for a stage that fails or breaks its contract. A stage that refuses the random
    model (2 layers, 2 KV heads, dimension 64, on the CPU) with a KvframeError of another kind, because it serves one
    model or one device only, ends the run without an error."""
    from kvframe.testing import Geometry, Prompts

    geometry = Geometry(layers=2, kv_heads=2, group=2, head_dim=64)
    lengths = tuple(body + 2 * PROTECTED for body in BODY)
    case = Prompts(lengths=lengths, seed=seed, geometry=geometry, sink=PROTECTED, recent=PROTECTED)
    observation = case.observation(pipeline.needs)
    budget = body_budget(pipeline, observation)
    try:
        bound = pipeline.bind(case.model)
        compressed = pipeline.run(observation, budget, bound=bound)
        attend(pipeline, compressed, observation)
        if pipeline.spec.decode.flush is not None:
            block = Prompts(lengths=(min(pipeline.spec.decode.flush, max(BODY)),) * 2, seed=seed + 1, geometry=geometry)
            later = block.observation(pipeline.needs)
            again = pipeline.run(later, body_budget(pipeline, later), states=compressed.states, bound=bound)
            attend(pipeline, again, later)
    except StageError:
        raise
    except KvframeError as error:
        return DryRun(False, str(error))
    units = geometry.layers * geometry.kv_heads
    kept = sum(int(layer.n_entries.sum()) for layer in compressed.plan.layers)
    return DryRun(True, f"{kept / units:.0f} entries a head made of the {sum(BODY)} tokens of two random prompts")


def body_budget(pipeline: Pipeline, observation: Observation) -> Tensor:
    """Entries for the body of each row, int64 `[B]`; budgets in entries or bytes stand for half of the body, since
    what they allow depends on the model."""
    ratio = pipeline.spec.budget.ratio or 2
    units = observation.model.layers * observation.model.kv_heads
    return (units * observation.body.sum(1).double() / ratio).floor().long()


def attend(pipeline: Pipeline, compressed: Compressed, observation: Observation) -> None:
    """Decode every part and attend it with the spec's kernel. Raises StageError for wrong shapes, dtypes or values."""
    model, kernel = observation.model, pipeline.spec.attention
    shape = (observation.valid.shape[0], model.query_heads, 1, model.head_dim)
    query = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    for layer, parts in zip(compressed.plan.layers, compressed.parts, strict=True):
        rows = 0
        for part in parts:
            untouched = Untouched(part.encoded)
            with blaming(part.encoder):
                decoded = part.decode()
            untouched.check(part.encoder)
            rows += len(decoded.keys)
            check_shape(f"encoder '{part.encoder.name}': decoded", "keys", decoded.keys, (None, model.head_dim))
            with blaming(kernel, part.encoder):
                out, lse = kernel.attend(query, part, model.scale)
            check_shape(f"attention '{kernel.name}'", "out", out, shape)
            check_shape(f"attention '{kernel.name}'", "lse", lse, shape[:3])
            finite = bool((out.isfinite().all(-1) & (lse.isfinite() | torch.isneginf(lse))).all())
            if out.dtype != torch.float32 or lse.dtype != torch.float32 or not finite:
                found = f"{out.dtype} and {lse.dtype}" + ("" if finite else " with values that are not finite")
                raise StageError(f"attention '{kernel.name}' must return finite fp32 tensors, but returned {found}.")
        if rows != int(layer.n_entries.sum()):
            raise StageError(
                f"encoder '{pipeline.spec.encoder.name}' was given {int(layer.n_entries.sum())} entries, but decodes "
                f"{rows}; it must give back as many."
            )
