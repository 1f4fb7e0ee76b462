"""Operations with a readable reference and faster implementations held against it."""

from kvframe.ops import bitpack, lloyd_max, native
from kvframe.ops.interval_distortion import IntervalTables, gram_band, interval_distortion, interval_sums
from kvframe.ops.packed_attention import Packed, PackedRows, Rebuild, packed_attention
from kvframe.ops.ragged_attention import (
    attention_weights,
    cap_logits,
    dense_attention,
    merge_attention,
    merge_sinks,
    ragged_attention,
)
from kvframe.ops.segment_pool import segment_pool
from kvframe.ops.select_top import select_top
from kvframe.ops.soft_matching import soft_matching
from kvframe.ops.spend_grades import grade_tokens, settled, spend_grades

__all__ = [
    "IntervalTables",
    "Packed",
    "PackedRows",
    "Rebuild",
    "attention_weights",
    "bitpack",
    "cap_logits",
    "dense_attention",
    "grade_tokens",
    "gram_band",
    "interval_distortion",
    "interval_sums",
    "lloyd_max",
    "merge_attention",
    "merge_sinks",
    "native",
    "packed_attention",
    "ragged_attention",
    "segment_pool",
    "select_top",
    "settled",
    "soft_matching",
    "spend_grades",
]
