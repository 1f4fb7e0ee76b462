"""How much the residual stream feels a KV head: static (its output weights) and by input (what it wrote)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kvframe.errors import StageError
from kvframe.types import Observation
from kvframe_gracekv.rows import Row, observed

Sensitivity = Literal["static_input", "static", "none"]


def head_sensitivity(observation: Observation, row: Row, kind: Sensitivity, owner: str) -> Tensor:
    """Return fp32 `[L, H]`, on average 1.

        w_static = (sum over the group's heads of |W_O|_F^2)^(1/2)
        w_input = mean over the probes of |sum over the group's heads of W_O o|
        omega = (w_static * w_input)^(1/2), divided by its mean over all layers and heads

    `kind`: "static_input" (the paper's), "static" (w_static alone), "none" (1 everywhere). Source: GraceKV, value flow,
    head sensitivity. Raises StageError if the outputs of the heads were not observed."""
    model, device, tokens = observation.model, observation.valid.device, observation.shape[-1]
    if kind == "none":
        return torch.ones(model.layers, model.kv_heads, device=device)
    omega = []
    for index, layer in enumerate(observation.layers):
        weight = model.output_weight(index).float().unflatten(0, (model.kv_heads, -1))  # [H, G, D, hidden]
        static = weight.square().sum((1, 2, 3)).sqrt()
        if kind == "static":
            omega.append(static)
            continue
        if layer.head_outputs is None:
            raise StageError(
                f"'{owner}' needs the outputs of the heads, but the observation has none; capture what it `needs`, or "
                "set sensitivity: static."
            )
        columns = observed(row.probes, layer.head_outputs, tokens) - (tokens - layer.head_outputs.shape[2])
        outputs = layer.head_outputs[row.index][:, columns].float()  # [Hq, P, D]
        outputs = outputs.unflatten(0, (model.kv_heads, -1)).transpose(1, 2).flatten(2)  # [H, P, G*D]
        written = (outputs @ weight.flatten(1, 2)).norm(dim=-1)  # [H, P]
        omega.append((static * written.mean(-1)).sqrt() if len(columns) else static)
    sensitivity = torch.stack(omega)
    return sensitivity / sensitivity.mean().clamp_min(torch.finfo(torch.float32).tiny)
