"""The law of caches on disk."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from kvframe.pipeline import Pipeline
from kvframe.spec import Decode, spec_class
from kvframe.testing.law import expect, law
from kvframe.testing.session import FLUSH, Batch, Session, batches, small


@law(
    "pipeline",
    lambda pipeline: batches(pipeline, 2),
    applies=lambda pipeline: isinstance(pipeline.spec, spec_class()),
    weight=0.08,
)
def a_saved_cache_goes_on(pipeline: Pipeline, batch: Batch) -> None:
    """A cache that was written to a file and read again answers bit by bit as it would have, and reports what it did.
    Only specs whose stages are all registered are held to it."""
    from kvframe.hf import load_cache

    streams = pipeline.spec.allocator.streams
    pipeline = small(pipeline, decode=Decode(flush=FLUSH if streams else None))
    session = Session(pipeline, batch)
    session.answer(2)
    session.cache.bound = None  # what an encoder learned goes into the file, as if it were the prompt's own
    other: Any = Session(None, batch)
    with TemporaryDirectory() as folder:
        session.cache.save(Path(folder) / "cache")
        other.cache, other.mask = load_cache(Path(folder) / "cache", session.model), session.mask
    mine, theirs = session.cache.report(), other.cache.report()
    for name in ("tokens", "entries", "requested_ratio", "entry_ratio"):
        before, after = getattr(mine, name), getattr(theirs, name)
        expect(before == after, f"{name} {before} after loading", str(after))
    wanted, got = session.answer(FLUSH + 1), other.answer(FLUSH + 1)
    expect(torch.equal(got, wanted), "the logits that the saved cache gives", f"others by {(got - wanted).abs().max()}")
