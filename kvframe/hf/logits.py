"""Models that cap their attention's logits or let a sink share in the softmax: what the stages are told of it, from
what each layer gives to its attention function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from kvframe.errors import ModelError


def shared_softcap(settings: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """The cap on logits that all layers give; None = there is none. Raises ModelError, naming the model, if they
    differ."""
    caps = {given.get("softcap") for given in settings}
    if len(caps) > 1:
        raise ModelError(
            f"{name} caps its attention's logits differently from layer to layer "
            f"({', '.join(sorted(map(str, caps)))}); kvframe needs one cap for all layers with full attention."
        )
    cap: float | None = next(iter(caps), None)
    return cap


def sinks_of(settings: Mapping[str, Any]) -> Tensor | None:
    """The sinks that a layer gives, fp32 `[Hq]`; None = there are none."""
    sinks: Tensor | None = settings.get("s_aux")
    return None if sinks is None else sinks.detach().float().flatten()
