"""Peak memory of reading a long prompt: transformers' cache, and a kvframe cache that compresses between chunks; and
the time of loading a saved cache beside that of reading its prompt again.

    python benchmarks/long_prompts.py --tokens 2048,4096,8192,16384 --spec snapkv --ratio 8 --out runs/long_prompts
    python benchmarks/long_prompts.py --out runs/long_prompts --draw FILE.svg    # what stands there; needs matplotlib

Each reading is a process of its own. Growth is the process's largest resident memory while reading, less what it was
before: cache, activations and what a compression needs in passing. Both read the same chunks, so activations are alike;
`held` is the largest total of the cache's storages, after any chunk."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from threading import Event, Thread


def resident() -> int:
    """Bytes of this process in memory."""
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


class Peak:
    """The largest resident memory while it is watched, every millisecond, less that at the beginning."""

    def __enter__(self) -> Peak:
        self.begin = self.largest = resident()
        self._stop = Event()
        self._thread = Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.001):
            self.largest = max(self.largest, resident())

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self.growth = max(self.largest, resident()) - self.begin


def read(tokens: int, chunk: int, spec: str | None, ratio: float, save: bool) -> dict[str, float]:
    """Read a prompt of the embedded text, and return what it took. `spec` None = transformers' cache."""
    import torch
    from transformers import DynamicCache

    import kvframe
    from kvframe.eval.text import embedded_text
    from kvframe.hf import load_model
    from kvframe.types import storage_bytes

    model, tokenizer = load_model("smollm2")
    ids = tokenizer(embedded_text()[: 8 * tokens], return_tensors="pt", verbose=False).input_ids[:, :tokens]
    held = 0
    with torch.no_grad():
        model(ids[:, :64])  # what is allocated once
        if spec is None:
            cache = DynamicCache(config=model.config)

            def size() -> int:
                return storage_bytes([t for layer in cache.layers for t in (layer.keys, layer.values)])

            begin = time.perf_counter()
            with Peak() as peak:
                for at in range(0, tokens, chunk):
                    model(ids[:, at : at + chunk], cache=cache, logits_to_keep=1)
                    held = max(held, size())
        else:
            cache = kvframe.load(spec, {"budget.ratio": ratio}).cache(model)
            compress = cache.compress_waiting

            def watched(waiting: int = 0) -> None:
                nonlocal held
                held = max(held, cache.report().bytes)
                compress(waiting)

            cache.compress_waiting = watched  # type: ignore[method-assign]
            begin = time.perf_counter()
            with Peak() as peak:
                cache.prefill(model, ids, chunk=chunk)
                held = max(held, cache.report().bytes)
                cache.compress(suffix_length=0)
        seconds = time.perf_counter() - begin
        found = {"growth": peak.growth, "held": held, "seconds": seconds}
        if save and spec is not None:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "cache"
                cache.save(path, tokenizer)
                begin = time.perf_counter()
                loaded = kvframe.load_cache(path, model, tokenizer)
                model(ids[:, :1], cache=loaded)
                found |= {"load_seconds": time.perf_counter() - begin, "file": path.stat().st_size}
    return found


def draw(rows: list[dict], path: Path) -> None:
    """Memory over the prompt's length."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    name = f"{rows[0]['spec']}, ratio {rows[0]['ratio']:g}, chunks of {rows[0]['chunk']}"
    for kind, label, color in (("full", "transformers' cache", "C3"), ("compressed", name, "C0")):
        tokens = [row["tokens"] for row in rows]
        for what, style, meaning in (("growth", "-", "the process grew by"), ("held", "--", "storages of the cache")):
            sizes = [row[kind][what] / 1e6 for row in rows]
            axis.plot(tokens, sizes, style, marker="o", color=color, label=f"{label}: {meaning}")
    axis.set(xlabel="tokens of the prompt", ylabel="MB at most, while reading", xlim=(0, None), ylim=(0, None))
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    """Run every reading in a process of its own; print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="2048,4096,8192")
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--spec", default="snapkv")
    parser.add_argument("--ratio", type=float, default=8)
    parser.add_argument("--out", type=Path, default=Path("runs/long_prompts"))
    parser.add_argument("--draw", type=Path, help="draw the table that stands in --out, and measure nothing")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.draw is not None:
        draw(json.loads((options.out / "long_prompts.json").read_text()), options.draw)
        return
    if options.one is not None:
        tokens, kind = options.one.split(",")
        spec = None if kind == "full" else options.spec
        print(json.dumps(read(int(tokens), options.chunk, spec, options.ratio, save=True)))
        return
    rows = []
    print(f"{'tokens':>8} {'full MB':>9} {'held':>7} {options.spec + ' MB':>12} {'held':>7} {'growth':>8} {'held':>7}"
          f" {'time':>6} {'load':>7}")  # fmt: skip
    for tokens in map(int, options.tokens.split(",")):
        found = {}
        for kind in ("full", "compressed"):
            command = [sys.executable, __file__, "--one", f"{tokens},{kind}", "--chunk", str(options.chunk)]
            command += ["--spec", options.spec, "--ratio", str(options.ratio)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[kind] = json.loads(done.stdout.splitlines()[-1])
        full, ours = found["full"], found["compressed"]
        rows.append({"tokens": tokens, "chunk": options.chunk, "spec": options.spec, "ratio": options.ratio, **found})
        sizes = [size / 1e6 for size in (full["growth"], full["held"], ours["growth"], ours["held"])]
        shares = [ours[name] / full[name] for name in ("growth", "held", "seconds")]
        print("{:8d} {:9.0f} {:7.0f} {:12.0f} {:7.0f} {:8.2f} {:7.2f} {:6.2f} {:6.0f}x".format(
            tokens, *sizes, *shares, full["seconds"] / ours["load_seconds"]), flush=True)  # fmt: skip
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "long_prompts.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
