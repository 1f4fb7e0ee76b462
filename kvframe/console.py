"""What the commands share: options, errors as one sentence, consoles, overrides."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvframe.errors import InputError, KvframeError, SpecError

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvframe.pipeline import Pipeline

MOST_SAID = 80

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Model = Annotated[str, typer.Option(help="'smollm2' (embedded), a folder, a .gguf file or a hub id.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="Where the model runs, such as cpu or cuda:0.")]
SpecName = Annotated[str, typer.Argument(metavar="SPEC", help="A spec's name, or a YAML file.")]
Override = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a value in the spec: budget.ratio=8.")
]


@contextmanager
def one_sentence(debug: bool, interrupted: str = "interrupted.") -> Iterator[None]:
    """Turn errors into one sentence on stderr: status 2 for those that the user can mend, 130 for an interrupt (for
    which the sentence is `interrupted`), 1 for any other."""
    try:
        yield
    except KvframeError as error:
        _fail(str(error), 2, debug)
    except KeyboardInterrupt:
        _fail(interrupted, 130, debug)
    except BrokenPipeError:
        # Whoever read the output has gone, such as `head`: what is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
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


def read_overrides(items: list[str] | None) -> dict[str, Any]:
    """Values from texts such as "budget.ratio=8"; a value is read as YAML. Raises InputError for what is not so."""
    from kvframe.yamlfile import read_yaml

    values: dict[str, Any] = {}
    for item in items or []:
        key, sign, value = item.partition("=")
        said = item if len(item) <= MOST_SAID else f"{item[:MOST_SAID]} ..."
        if not sign or not key.strip():
            raise InputError(f"--set takes KEY=VALUE, such as budget.ratio=8, but got '{said}'.")
        try:
            values[key.strip()] = read_yaml(value, "value")[0]
        except SpecError as error:
            raise InputError(f"--set {said}: {str(error).partition(': ')[2]}") from error
    return values


def load_pipeline(spec: str, override: list[str] | None) -> Pipeline:
    """The pipeline of a spec's name or file, with overrides."""
    from kvframe import load
    from kvframe.specfile import spec_source

    return load(spec_source(spec), read_overrides(override))


def load_quietly(name: str, dtype: str, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model; what libraries would say meanwhile gives way to one status line."""
    with quiet(f"Loading {name}"):
        from kvframe.hf import load_model

        return load_model(name, dtype=dtype, device=device)


@contextmanager
def quiet(status: str) -> Iterator[None]:
    """One status line instead of what transformers and the hub's library would say, now and later."""
    with errors().status(status):
        from huggingface_hub.utils import logging as hub
        from transformers.utils import logging

        for library in (hub, logging):
            library.set_verbosity_error()
        logging.disable_progress_bar()
        yield


def errors() -> Console:
    """Standard error."""
    from rich.console import Console

    return Console(stderr=True)


def output() -> Console:
    """Standard output; what is piped is not cut at 80 columns."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=200)
