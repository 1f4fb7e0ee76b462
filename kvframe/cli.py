"""The command line. Heavy imports wait until a command needs them: `kvframe --help` must answer at once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvframe import __version__, calibrating
from kvframe.authoring import commands
from kvframe.console import (
    Debug,
    Device,
    Dtype,
    Model,
    Override,
    SpecName,
    errors,
    load_pipeline,
    load_quietly,
    one_sentence,
    read_overrides,
)
from kvframe.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvframe.eval import Comparison, Contender, Settings
    from kvframe.eval.results import Results

app = typer.Typer(
    name="kvframe",
    help="Compress the KV cache of Hugging Face models with pipelines of small stages.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Entry point of the `kvframe` command."""
    app()


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvframe {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Compress the KV cache of Hugging Face models with pipelines of small stages."""


@app.command()
def compare(
    specs: Annotated[str, typer.Option(help="Names or YAML files, separated by commas.")],
    ratios: Annotated[
        str, typer.Option(help="Context entries / kept entries, separated by commas; empty = each spec's own budget.")
    ] = "",
    model: Model = "smollm2",
    tasks: Annotated[str, typer.Option(help="Tasks, separated by commas.")] = "niah,multikey,words,continuation",
    tokens: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 768,
    limit: Annotated[int, typer.Option(help="Examples of each task.")] = 4,
    out: Annotated[Path, typer.Option(help="Folder for results.jsonl and summary.md; what is there is reused.")] = Path(
        "runs/compare"
    ),
    seed: Annotated[int, typer.Option(help="From which the examples are drawn.")] = 0,
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 text that fills the prompts; else the Python reference.")
    ] = None,
    query_agnostic: Annotated[
        bool, typer.Option("--query-agnostic", help="Compress before the question is seen.")
    ] = False,
    override: Override = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    debug: Debug = False,
) -> None:
    """Compare specs on a model: quality, bytes and milliseconds side by side."""
    with one_sentence(debug, "interrupted; run the same command again to go on from what was measured."):
        from rich.console import Console

        from kvframe.eval import (
            Settings,
            embedded_text,
            make_contenders,
            markdown,
            open_results,
            print_table,
            read_text,
        )

        settings = Settings(model, tuple(_names(tasks)), tokens, limit, seed, query_agnostic)
        contenders = make_contenders(_names(specs), _numbers(ratios), read_overrides(override))
        words = embedded_text() if text is None else read_text(text)
        results = open_results(out)
        loaded, tokenizer = load_quietly(model, dtype, device)
        comparison = _compare(loaded, tokenizer, contenders, settings, words, results)
        print_table(comparison, Console())
        summary = results.path.with_name("summary.md")
        try:
            summary.write_text(markdown(comparison), encoding="utf-8")
        except OSError as error:
            raise InputError(
                f"{summary} cannot be written ({error.strerror or error}); the measurements are in {results.path}."
            ) from error
        old = len(comparison.records) - comparison.measured
        reused = f"; {old} of {len(comparison.records)} measurements were there already" if old else ""
        typer.echo(f"\nWritten to {results.path} and {summary}{reused}.", err=True)
        if comparison.failures:
            raise typer.Exit(2)


def _compare(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    contenders: list[Contender],
    settings: Settings,
    text: str,
    results: Results,
) -> Comparison:
    """Run the comparison under a progress bar."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from kvframe.eval import compare as run

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        # Some measurements take many times longer than others: the speed is averaged over minutes.
        TimeRemainingColumn(elapsed_when_finished=False),
    )
    for note in results.notes:
        typer.echo(note, err=True)
    with Progress(*columns, console=errors(), speed_estimate_period=300, transient=True) as progress:
        bar = progress.add_task("starting")

        def listener(done: int, total: int, what: str) -> None:
            progress.update(bar, completed=done, total=total, description=what)

        return run(model, tokenizer, contenders, settings, text, results, listener)


@app.command()
def run(
    spec: SpecName,
    prompt_file: Annotated[Path, typer.Option(help="UTF-8 text of the prompt.")],
    question: Annotated[
        str, typer.Option(help="What is asked about the prompt; kept exactly, and seen by the compression.")
    ] = "",
    model: Model = "smollm2",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 64,
    override: Override = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    debug: Debug = False,
) -> None:
    """Compress a prompt, generate greedily, and report what the cache holds."""
    with one_sentence(debug):
        import torch

        from kvframe.eval import read_text
        from kvframe.eval.prompt import chat_template

        pipeline = load_pipeline(spec, override)
        text = read_text(prompt_file)
        loaded, tokenizer = load_quietly(model, dtype, device)
        after = f"\n{question}" if question else ""
        prompt = chat_template(tokenizer).prompt(tokenizer, "", text, after, "")
        # Without a question nothing says where one would begin, so the spec's own suffix holds.
        cache = pipeline.cache(loaded, prompt.prefix_length, prompt.suffix_length if question else None)
        cache.ledger.aloud = False  # the report has its notes
        ids = torch.tensor([prompt.ids], device=loaded.device)
        generate: Any = loaded.generate
        with torch.no_grad():
            out = generate(
                ids, attention_mask=torch.ones_like(ids), cache=cache, max_new_tokens=max_new_tokens, do_sample=False
            )
        typer.echo(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
        typer.echo(f"\n{cache.report()}", err=True)


commands.register(app)
calibrating.register(app)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _numbers(text: str) -> list[float]:
    """Ratios from text; InputError for what is no number >= 1."""
    ratios = []
    for name in _names(text):
        try:
            ratio = float(name)
        except ValueError:
            ratio = 0
        if not 1 <= ratio < float("inf"):
            raise InputError(
                f"--ratios takes numbers of at least 1 (context entries / kept entries), but got '{name}'."
            )
        if ratio in ratios:
            raise InputError(f"--ratios names {ratio:g} twice; name it once.")
        ratios.append(ratio)
    return ratios
