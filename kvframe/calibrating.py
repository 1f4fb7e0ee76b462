"""The command that calibrates an encoder on a text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvframe.console import Debug, Device, Dtype, Model, Override, errors, load_pipeline, load_quietly, one_sentence
from kvframe.errors import InputError


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(calibrate)


def calibrate(
    spec: Annotated[str, typer.Option(help="The spec whose encoder is to be calibrated: a name, or a YAML file.")],
    text: Annotated[list[Path] | None, typer.Option(help="UTF-8 text to learn from; several are read in turn.")] = None,
    model: Model = "smollm2",
    tokens: Annotated[int, typer.Option(help="Tokens to read, in windows of 1024.")] = 32768,
    out: Annotated[
        Path | None, typer.Option(help="The file to write; without it, where `calibration: auto` looks.")
    ] = None,
    override: Override = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    debug: Debug = False,
) -> None:
    """Learn what a spec's encoder must know of a model, once, and keep it in a file."""
    with one_sentence(debug):
        from kvframe.artefact import check_target
        from kvframe.calibration import CalibratedEncoder
        from kvframe.eval.text import embedded_text, read_text
        from kvframe.hf import model_info
        from kvframe.hf.reading import read_text_windows

        if out is not None:
            check_target(out, "calibration")
        encoder = load_pipeline(spec, override).spec.encoder
        if not isinstance(encoder, CalibratedEncoder):
            raise InputError(f"The encoder '{encoder.name}' of the spec '{spec}' learns nothing from a text.")
        words = "\n\n".join(read_text(file) for file in text) if text else embedded_text()
        title = ", ".join(file.name for file in text) if text else "the Python language reference"
        loaded, tokenizer = load_quietly(model, dtype, device)
        info = model_info(loaded)
        path = encoder.artefact_path(info) if out is None else out
        with _progress() as progress:
            bar = progress.add_task(f"reading {title}", total=tokens)

            def listener(done: int) -> None:
                progress.update(bar, completed=done)

            reading = read_text_windows(loaded, tokenizer, words, title, tokens, encoder.calibration_needs, listener)
            artefact = encoder.calibrate(reading, info)
        artefact.save(path)
        typer.echo(f"{encoder.name} has learned from {reading.tokens} tokens of {title}; written to {path}.", err=True)
        if out is not None:
            typer.echo(f"Use it with: --set encoder.calibration={out}", err=True)


def _progress() -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=errors(), transient=True)
