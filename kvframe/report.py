"""What a cache says of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerReport:
    """One compressed layer: `layer` is its index in the model, `entries` the smallest and largest number of compressed
    entries over batch rows and heads, `bytes` the bytes held."""

    layer: int
    entries: tuple[int, int]
    bytes: int


@dataclass(frozen=True)
class CacheReport:
    """The state of a cache.

    Attributes:
        tokens: valid tokens seen, one number a batch row.
        entries: key-value pairs held over all rows, compressed layers and heads, exact ones included.
        bytes: bytes of the storages held for the compressed layers; `bytes_by_part` shares them out.
        full_bytes: what transformers' DynamicCache would hold for the same layers, padding included.
        requested_ratio: context entries / entries that the budget allows, over all compressions so far; before the
            first, what the spec says.
        entry_ratio: context entries / entries held of them. What waits to be compressed counts as it is held; prefix
            and suffix, and tokens of an answer that are still exact, count on neither side.
        byte_ratio: full_bytes / bytes.
        compress_seconds: time spent compressing.
        layers: one LayerReport per compressed layer.
        other_layers: layers left to transformers (sliding window, recurrent).
        notes: what the user should know, e.g. why nothing was compressed.
        asked_bytes: what a budget of bytes asked for, e.g. "8" (times fewer) or "64.0MiB"; "" for one of entries.
        asked_entries: what a budget of entries asked for, e.g. "4.00" (times fewer) or "64 a head"; "" = one of bytes.
        seen_entries: key-value pairs of the valid tokens seen: what `entries` would be, had nothing been compressed.
    """

    tokens: tuple[int, ...]
    entries: int
    bytes: int
    bytes_by_part: dict[str, int]
    full_bytes: int
    requested_ratio: float
    entry_ratio: float
    compress_seconds: float
    layers: tuple[LayerReport, ...]
    other_layers: int = 0
    notes: tuple[str, ...] = ()
    asked_bytes: str = ""
    asked_entries: str = ""
    seen_entries: int = 0

    @property
    def byte_ratio(self) -> float:
        """Bytes of the full cache / bytes held."""
        return self.full_bytes / self.bytes if self.bytes else 1.0

    def __str__(self) -> str:
        tokens = ", ".join(map(str, self.tokens))
        parts = ", ".join(f"{name} {size_text(size)}" for name, size in self.bytes_by_part.items() if size)
        low = min((layer.entries[0] for layer in self.layers), default=0)
        high = max((layer.entries[1] for layer in self.layers), default=0)
        # What a budget of bytes comes to in entries is nothing that anybody asked for.
        by_entries = f" (asked {self.asked_entries})" if self.asked_entries else ""
        by_bytes = f" (asked {self.asked_bytes})" if self.asked_bytes else ""
        lines = [
            f"tokens seen       {tokens}",
            f"entries held      {self.entries} of {self.seen_entries} over {len(self.layers)} layers; {low} to {high} "
            "compressed per head",
            f"bytes held        {size_text(self.bytes)} ({parts}) instead of {size_text(self.full_bytes)}",
            f"ratio             {self.entry_ratio:.2f} in entries{by_entries}, "
            f"{self.byte_ratio:.2f} in bytes{by_bytes}",
            f"compression       {self.compress_seconds * 1000:.1f} ms",
        ]
        if self.other_layers:
            lines.append(f"left as they are  {self.other_layers} layers (sliding window or recurrent)")
        return "\n".join([*lines, *(f"note              {note}" for note in self.notes)])


def size_text(size: int) -> str:
    """Bytes with a binary unit, three significant digits."""
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1000 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.3g} {units[0]}"
