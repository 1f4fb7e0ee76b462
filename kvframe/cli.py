"""The command line. Heavy imports wait until a command needs them: `kvframe --help` must answer at once."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvframe import __version__
from kvframe.errors import InputError, KvframeError

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvframe.eval import Comparison, Contender, Settings
    from kvframe.eval.results import Results
    from kvframe.pipeline import Pipeline

app = typer.Typer(
    name="kvframe",
    help="Compress the KV cache of Hugging Face models with pipelines of small stages.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Model = Annotated[str, typer.Option(help="'smollm2' (embedded), a folder, a .gguf file or a hub id.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="Where the model runs, such as cpu or cuda:0.")]
SpecName = Annotated[str, typer.Argument(metavar="SPEC", help="A spec's name, or a YAML file.")]
Override = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a value in the spec: budget.ratio=8.")
]


def main() -> None:
    """Entry point of the `kvframe` command."""
    app()


@contextmanager
def one_sentence(debug: bool) -> Iterator[None]:
    """Turn errors into one sentence on stderr: status 2 for those that the user can mend, 1 for any other."""
    try:
        yield
    except KvframeError as error:
        _fail(str(error), 2, debug)
    except KeyboardInterrupt:
        _fail("interrupted.", 130, debug)
    except typer.Exit:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, the user gets a sentence; --debug shows the rest
        lines = str(error).strip().splitlines() or ["no message"]
        _fail(f"unexpected {type(error).__name__}: {lines[0].rstrip('.')}; --debug shows where.", 1, debug)


def _fail(message: str, status: int, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    for line in message.splitlines():
        typer.echo(f"error: {line}", err=True)
    raise typer.Exit(status) from None


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
    dtype: Dtype = "auto",
    device: Device = "cpu",
    debug: Debug = False,
) -> None:
    """Compare specs on a model: quality, bytes and milliseconds side by side."""
    with one_sentence(debug):
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
        contenders = make_contenders(_names(specs), _numbers(ratios))
        words = embedded_text() if text is None else read_text(text)
        results = open_results(out)
        loaded, tokenizer = _load(model, dtype, device)
        comparison = _compare(loaded, tokenizer, contenders, settings, words, results)
        print_table(comparison, Console())
        summary = results.path.with_name("summary.md")
        summary.write_text(markdown(comparison), encoding="utf-8")
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
    with Progress(*columns, console=_errors(), speed_estimate_period=300, transient=True) as progress:
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

        pipeline = _pipeline(spec, override)
        text = read_text(prompt_file)
        loaded, tokenizer = _load(model, dtype, device)
        after = f"\n{question}" if question else ""
        prompt = chat_template(tokenizer).prompt(tokenizer, "", text, after, "")
        # Without a question nothing says where one would begin, so the spec's own suffix holds.
        cache = pipeline.cache(loaded, prompt.prefix_length, prompt.suffix_length if question else None)
        ids = torch.tensor([prompt.ids], device=loaded.device)
        generate: Any = loaded.generate
        with torch.no_grad():
            out = generate(
                ids, attention_mask=torch.ones_like(ids), cache=cache, max_new_tokens=max_new_tokens, do_sample=False
            )
        typer.echo(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
        typer.echo(f"\n{cache.report()}", err=True)


@app.command()
def validate(spec: SpecName, override: Override = None, debug: Debug = False) -> None:
    """Check a spec and print it with all its values."""
    with one_sentence(debug):
        import yaml

        resolved = _pipeline(spec, override).spec
        typer.echo(yaml.safe_dump(resolved.dump(), sort_keys=False, allow_unicode=True), nl=False)
        typer.echo(f"# fingerprint: {resolved.fingerprint}")


@app.command()
def schema(debug: Debug = False) -> None:
    """Print the JSON schema of specs, with the stages of all installed plugins."""
    with one_sentence(debug):
        import json

        from kvframe.spec import spec_class

        typer.echo(json.dumps(spec_class().model_json_schema(), indent=2))


@app.command("list")
def list_(debug: Debug = False) -> None:
    """List the plugins, stages and specs that are installed."""
    with one_sentence(debug):
        from kvframe.listing import print_registry

        print_registry(_output())


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


def _pipeline(spec: str, override: list[str] | None) -> Pipeline:
    """Load a spec with overrides such as "budget.ratio=8"; a value is read as YAML."""
    import yaml

    from kvframe import load
    from kvframe.eval.contenders import spec_source

    values = {}
    for item in override or []:
        key, sign, value = item.partition("=")
        if not sign or not key.strip():
            raise InputError(f"--set takes KEY=VALUE, such as budget.ratio=8, but got '{item}'.")
        try:
            values[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise InputError(f"--set {item}: the value is not valid YAML.") from error
    return load(spec_source(spec), values)


def _load(name: str, dtype: str, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model; what transformers would say meanwhile gives way to one status line."""
    with _errors().status(f"Loading {name}"):
        from transformers.utils import logging

        from kvframe.hf import load_model

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        return load_model(name, dtype=dtype, device=device)


def _errors() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def _output() -> Console:
    """Standard output; what is piped is not cut at 80 columns."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=200)
