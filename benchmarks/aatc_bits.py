"""The picture of how many bits each channel gets, layer by layer.

    python benchmarks/aatc_bits.py --spec aatc --bits 2.5 --out docs/methods/img/aatc-bits.png

Needs matplotlib."""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib as mpl
import torch
import yaml

import kvframe
from kvframe.hf import load_model

mpl.use("agg")
import matplotlib.pyplot as plt


def widths(states: tuple, side: str, channels: int) -> torch.Tensor:
    """Bits by channel, widest first, `[channels, L]`."""
    table = torch.zeros(channels, len(states))
    for layer, state in enumerate(states):
        found = sorted((w for group in state.groups for w in getattr(group, side).channels.widths), reverse=True)
        table[: len(found), layer] = torch.tensor(found, dtype=torch.float32)
    return table


def main() -> None:
    """Draw it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--spec", action="append", help="a spec; several are drawn below each other")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="override")
    parser.add_argument("--bits", type=float, default=2.5)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--out", type=Path, default=Path("aatc-bits.png"))
    args = parser.parse_args()
    model, _ = load_model(args.model)
    specs = args.spec or ["aatc"]
    overrides = {key: yaml.safe_load(value) for key, value in (item.split("=", 1) for item in args.override)}
    overrides |= {"encoder.key_bits": args.bits, "encoder.value_bits": args.bits}
    figure, axes = plt.subplots(len(specs), 2, figsize=(10, 3.6 * len(specs)), squeeze=False, layout="constrained")
    for row, name in zip(axes, specs, strict=True):
        pipeline = kvframe.load(name, overrides)
        cache = pipeline.cache(model)
        states = pipeline.bind(cache.info)
        for axis, side in zip(row, ("keys", "values"), strict=True):
            table = widths(states, side, cache.info.kv_heads * cache.info.head_dim)
            image = axis.imshow(table, aspect="auto", cmap="viridis", vmin=0, vmax=8, interpolation="nearest")
            mean = float(table.mean())
            axis.set(title=f"{name}, {side}: {mean:.2f} bits a channel", xlabel="layer", ylabel="channel, widest first")
        figure.colorbar(image, ax=row, label="bits (8 and more)")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=110)


if __name__ == "__main__":
    main()
