"""The commands for authors of specs and plugins. Heavy imports wait until a command runs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvframe.console import Debug, Override, SpecName, errors, load_pipeline, one_sentence, output, quiet


class Kind(StrEnum):
    """The stage kinds, as a spec calls them."""

    segmenter = "segmenter"
    scorer = "scorer"
    allocator = "allocator"
    encoder = "encoder"
    attention = "attention"


class Profile(StrEnum):
    """How many cases are drawn for each law."""

    dev = "dev"
    ci = "ci"
    deep = "deep"


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command()(validate)
    app.command()(explain)
    app.command()(schema)
    app.command()(new)
    app.command()(check)
    app.command("list")(list_)


def validate(
    spec: SpecName,
    override: Override = None,
    dry_run: Annotated[bool, typer.Option(help="Run the stages once on small random prompts.")] = True,
    debug: Debug = False,
) -> None:
    """Check a spec, run its stages once on small random prompts, and print it with all its values."""
    with one_sentence(debug):
        import yaml

        pipeline = load_pipeline(spec, override)
        typer.echo(yaml.safe_dump(pipeline.spec.dump(), sort_keys=False, allow_unicode=True), nl=False)
        typer.echo(f"# fingerprint: {pipeline.spec.fingerprint}")
        if dry_run:
            from kvframe.authoring.dryrun import dry_run as run_once

            result = run_once(pipeline)
            typer.echo(f"{'Dry run' if result.done else 'Not run, as a stage refuses'}: {result.text}", err=True)


def explain(
    spec: SpecName,
    model: Annotated[
        str | None,
        typer.Option(help="Estimate for this model: 'smollm2', a folder with a config.json, a .gguf file or a hub id."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the context that is estimated.")] = 4096,
    override: Override = None,
    debug: Debug = False,
) -> None:
    """Say what a spec does, stage by stage; with --model, estimate its entries and bytes."""
    with one_sentence(debug):
        from kvframe.authoring.explain import print_explanation

        pipeline = load_pipeline(spec, override)
        size = None
        if model is not None:
            from kvframe.authoring.estimate import estimate

            with quiet(f"Reading the configuration of {model}"):
                from kvframe.hf.geometry import read_geometry

                geometry = read_geometry(model)
            size = estimate(pipeline, geometry.info, geometry.itemsize, tokens)
        print_explanation(pipeline, output(), size)
        if size is None:
            typer.echo("\nWith --model, entries and bytes are estimated.", err=True)


def schema(debug: Debug = False) -> None:
    """Print the JSON schema of spec files, with the stages of all installed plugins."""
    with one_sentence(debug):
        import json

        from kvframe.authoring.schema import spec_schema

        typer.echo(json.dumps(spec_schema(), indent=2, ensure_ascii=False))


def new(
    name: Annotated[str, typer.Argument(help="The method's name: lower-case words joined by hyphens.")],
    kind: Annotated[Kind, typer.Option(help="Which kind of stage the package starts with.")],
    folder: Annotated[Path, typer.Option("--dir", help="Where the package's folder is made.")] = Path(),
    debug: Debug = False,
) -> None:
    """Write a plugin package with one working stage, a spec and a conformance test."""
    with one_sentence(debug):
        from kvframe.authoring.new import write_package

        package = write_package(name, kind.value, folder)
        for file in package.files:
            typer.echo(file)
        typer.echo(f"\nNext: cd {package.folder} && pip install -e '.[test]' && pytest", err=True)


def check(
    target: Annotated[str, typer.Argument(help="A plugin, its package, a stage, a spec's name or a spec's file.")],
    profile: Annotated[Profile, typer.Option(help="How many cases are drawn for each law.")] = Profile.ci,
    override: Override = None,
    debug: Debug = False,
) -> None:
    """Hold a plugin, a stage or a spec to kvframe's laws; the exit status is 1 if one is broken."""
    with one_sentence(debug):
        from kvframe.authoring.check import check_target
        from kvframe.console import read_overrides

        if not check_target(target, profile.value, read_overrides(override), output(), errors()):
            raise typer.Exit(1)


def list_(
    plugins: Annotated[
        bool, typer.Option("--plugins", help="Only the plugins: distribution, version, stages, papers.")
    ] = False,
    debug: Debug = False,
) -> None:
    """List the plugins, stages and specs that are installed."""
    with one_sentence(debug):
        from kvframe.listing import print_plugins, print_registry

        (print_plugins if plugins else print_registry)(output())
