"""Broken attention kernels: each decodes the part and attends it with one fault."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvframe.ops import cap_logits, ragged_attention
from kvframe.stages import Kernel
from kvframe.types import Entries, Part


class FixedScale(Kernel):
    """Takes the usual scale for granted."""

    name: Literal["broken.fixed_scale"] = "broken.fixed_scale"
    breaks: ClassVar = ("attention_matches_the_reference", "soft_caps_match_the_reference")

    def attend(self, query: Tensor, part: Part, scale: float, softcap: float | None = None) -> tuple[Tensor, Tensor]:
        """Attend with D ** -0.5."""
        return ragged_attention(query, part.decode(), query.shape[-1] ** -0.5, softcap=softcap)


class ForgetsCounts(Kernel):
    """Counts an entry once, however many tokens it stands for."""

    name: Literal["broken.forgets_counts"] = "broken.forgets_counts"
    breaks: ClassVar = (
        "multiplicity_counts_copies",
        "attention_matches_the_reference",
        "soft_caps_match_the_reference",
    )

    def attend(self, query: Tensor, part: Part, scale: float, softcap: float | None = None) -> tuple[Tensor, Tensor]:
        """Attend without log multiplicity."""
        return ragged_attention(query, replace(part.decode(), log_multiplicity=None), scale, softcap=softcap)


class BinaryLogarithm(Kernel):
    """Returns the log-sum-exp in bits, so that parts are weighed wrongly."""

    name: Literal["broken.binary_logarithm"] = "broken.binary_logarithm"
    breaks: ClassVar = (
        "parts_merge_to_the_whole",
        "attention_matches_the_reference",
        "soft_caps_match_the_reference",
    )

    def attend(self, query: Tensor, part: Part, scale: float, softcap: float | None = None) -> tuple[Tensor, Tensor]:
        """Attend; lse in base 2."""
        out, lse = ragged_attention(query, part.decode(), scale, softcap=softcap)
        return out, lse / math.log(2)


class PrefersTheLast(Kernel):
    """Weighs later entries more."""

    name: Literal["broken.prefers_the_last"] = "broken.prefers_the_last"
    breaks: ClassVar = (
        "order_does_not_matter",
        "attention_matches_the_reference",
        "soft_caps_match_the_reference",
        "multiplicity_counts_copies",
        "parts_merge_to_the_whole",
        "empty_heads_give_nothing",
        "row_alone_equals_row_in_batch",
    )

    def attend(self, query: Tensor, part: Part, scale: float, softcap: float | None = None) -> tuple[Tensor, Tensor]:
        """Attend with a bias that grows from row to row."""
        entries = part.decode()
        bias = torch.arange(len(entries.keys)) * 0.01
        if entries.log_multiplicity is not None:
            bias = bias + entries.log_multiplicity
        return ragged_attention(query, replace(entries, log_multiplicity=bias), scale, softcap=softcap)


class NanForNothing(Kernel):
    """Divides by the sum of no weights."""

    name: Literal["broken.nan_for_nothing"] = "broken.nan_for_nothing"
    breaks: ClassVar = (
        "empty_heads_give_nothing",
        "attention_matches_the_reference",
        "soft_caps_match_the_reference",
        "parts_merge_to_the_whole",
        "huge_logits_stay_finite",
    )

    def attend(self, query: Tensor, part: Part, scale: float, softcap: float | None = None) -> tuple[Tensor, Tensor]:
        """Attend; NaN where a head is empty."""
        out, lse = ragged_attention(query, part.decode(), scale, softcap=softcap)
        return out.masked_fill((lse == -torch.inf)[..., None], torch.nan), lse


class PlainExponential(Kernel):
    """Exponentiates without subtracting the largest logit."""

    name: Literal["broken.plain_exponential"] = "broken.plain_exponential"
    breaks: ClassVar = ("huge_logits_stay_finite",)

    def attend(self, query: Tensor, part: Part, scale: float, softcap: float | None = None) -> tuple[Tensor, Tensor]:
        """Attend head by head."""
        entries = part.decode()
        batch, query_heads = query.shape[:2]
        group = query_heads * batch // (len(entries.bounds) - 1)
        heads = query.double().reshape(-1, group, *query.shape[2:])
        outs, lses = [], []
        for pair, (begin, end) in enumerate(zip(entries.bounds, entries.bounds[1:], strict=False)):
            logits = cap_logits(heads[pair] @ entries.keys[begin:end].double().T * scale, softcap)
            if entries.log_multiplicity is not None:
                logits = logits + entries.log_multiplicity[begin:end]
            weights = logits.exp()
            total = weights.sum(-1)
            tiny = torch.finfo(total.dtype).tiny
            outs.append((weights @ entries.values[begin:end].double() / total.clamp_min(tiny)[..., None]).float())
            lses.append(total.log().float())
        return torch.stack(outs).reshape(query.shape), torch.stack(lses).reshape(query.shape[:-1])


class IgnoresCaps(Kernel):
    """Takes a cap on logits, and leaves them as they are."""

    name: Literal["broken.ignores_caps"] = "broken.ignores_caps"
    breaks: ClassVar = ("soft_caps_match_the_reference",)

    def attend(self, query: Tensor, part: Part, scale: float, softcap: float | None = None) -> tuple[Tensor, Tensor]:
        """Attend as if there were no cap."""
        return ragged_attention(query, part.decode(), scale)


class CapsCounts(Kernel):
    """Caps logits with their log multiplicity, which is no part of them."""

    name: Literal["broken.caps_counts"] = "broken.caps_counts"
    breaks: ClassVar = ("soft_caps_match_the_reference",)

    def attend(self, query: Tensor, part: Part, scale: float, softcap: float | None = None) -> tuple[Tensor, Tensor]:
        """Attend, the cap around the sum: an entry beside its key has one more channel, that of its count."""
        entries = part.decode()
        if softcap is None or entries.log_multiplicity is None:
            return ragged_attention(query, entries, scale, softcap=softcap)
        keys = torch.cat([entries.keys, entries.log_multiplicity[:, None].to(entries.keys.dtype)], 1)
        asked = torch.cat([query, torch.full_like(query[..., :1], 1 / scale)], -1)
        values = torch.cat([entries.values, torch.zeros_like(entries.values[:, :1])], 1)
        out, lse = ragged_attention(asked, Entries(entries.offsets, keys, values), scale, softcap=softcap)
        return out[..., :-1], lse
