"""Finds plugins through entry points, once, at the first use, and keeps their stages and specs by name."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.resources import files
from importlib.resources.abc import Traversable

import pluggy

from kvframe import hookspecs
from kvframe.errors import PluginError, SpecError
from kvframe.stages import KINDS, Stage

GROUP = "kvframe"
DISABLE = "KVFRAME_DISABLE_PLUGINS"


@dataclass(frozen=True)
class Plugin:
    """A loaded plugin: its entry-point name and the distribution that brought it."""

    name: str
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"plugin '{self.name}' ({self.distribution} {self.version})"


CORE = Plugin("core", "kvframe", "built in")


@dataclass(frozen=True)
class Registry:
    """All stages and named specs.

    Attributes:
        stages: kind -> name -> class.
        specs: name -> YAML file.
        owners: "kind:name" of a stage or "spec:name" -> the plugin it came from.
        plugins: the plugins loaded, core first.
    """

    stages: Mapping[str, Mapping[str, type[Stage]]]
    specs: Mapping[str, Traversable]
    owners: Mapping[str, Plugin]
    plugins: tuple[Plugin, ...]

    def spec_file(self, name: str) -> Traversable:
        """The file of a named spec; SpecError with the nearest names if there is none."""
        if name not in self.specs:
            raise SpecError(f"There is no spec named '{name}'{nearest(name, self.specs)}")
        return self.specs[name]


def nearest(name: str, choices: Iterable[str]) -> str:
    """The end of a sentence: the name most like `name`, or the list of all."""
    names = sorted(choices)
    tails = {n.rpartition(".")[2]: n for n in names}
    close = difflib.get_close_matches(name, names, n=1) or difflib.get_close_matches(name, list(tails), n=1, cutoff=0.5)
    if close:
        return f"; did you mean '{tails.get(close[0], close[0])}'?"
    return f"; there are: {', '.join(names) or 'none'}."


def disabled_plugins() -> frozenset[str]:
    """Entry-point names in KVFRAME_DISABLE_PLUGINS, separated by commas."""
    return frozenset(name.strip() for name in os.environ.get(DISABLE, "").split(",") if name.strip())


@cache
def registry() -> Registry:
    """The registry of this process, built at the first call. Raises PluginError if a plugin cannot be used."""
    return build(entry_points(group=GROUP), disabled_plugins())


def build(points: Iterable[EntryPoint], disabled: frozenset[str] = frozenset()) -> Registry:
    """Build a registry from core and the given entry points, without those whose name is disabled."""
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(hookspecs)
    stages: dict[str, dict[str, type[Stage]]] = {kind.kind: {} for kind in KINDS}
    specs: dict[str, Traversable] = {}
    owners: dict[str, Plugin] = {}
    plugins = [CORE]

    def claim(key: str, owner: Plugin) -> None:
        if key in owners:
            raise PluginError(
                f"{owners[key]} and {owner} both register '{key.partition(':')[2]}'; "
                f"uninstall one of them or set {DISABLE}={owner.name}."
            )
        owners[key] = owner

    def add_stages(classes: Iterable[type[Stage]], owner: Plugin) -> None:
        for stage in classes:
            if not (isinstance(stage, type) and issubclass(stage, KINDS)):
                raise PluginError(f"{owner} registers {stage!r}, which is not a class of one of the five stage kinds.")
            name = stage.model_fields["name"].default
            if owner is not CORE and not (isinstance(name, str) and name.startswith(f"{owner.name}.")):
                raise PluginError(
                    f"{owner} registers the stage {stage.__name__} under the name {name!r}; "
                    f"it must be '{owner.name}.<stage>'."
                )
            claim(f"{stage.kind}:{name}", owner)
            stages[stage.kind][name] = stage

    def add_specs(files_by_name: Mapping[str, Traversable], owner: Plugin) -> None:
        for name, file in files_by_name.items():
            claim(f"spec:{name}", owner)
            specs[name] = file

    from kvframe import builtin

    add_stages(builtin.STAGES, CORE)
    add_specs(spec_files("kvframe.builtin"), CORE)
    for point in sorted(points, key=lambda p: p.name):
        if point.name in disabled:
            continue
        owner = Plugin(point.name, *((point.dist.name, point.dist.version) if point.dist else ("unknown", "?")))
        try:
            module = point.load()
        except Exception as error:
            raise PluginError(
                f"{owner} fails to import: {type(error).__name__}: {error}; mend or uninstall it, or set "
                f"{DISABLE}={point.name} to go on without it."
            ) from error
        try:
            manager.register(module, point.name)
            manager.check_pending()
        except (pluggy.PluginValidationError, ValueError) as error:
            raise PluginError(f"{owner} does not fit kvframe's hooks: {' '.join(str(error).split())}") from error
        plugins.append(owner)
        callers = manager.subset_hook_caller
        others = [m for m in manager.get_plugins() if m is not module]
        for classes in callers("kvframe_register_stages", others)():
            add_stages(classes, owner)
        for found in callers("kvframe_register_specs", others)():
            add_specs(found, owner)
    return Registry(stages, specs, owners, tuple(plugins))


def spec_files(package: str) -> dict[str, Traversable]:
    """The YAML files in the folder `specs` of a package, by name without the ending."""
    folder = files(package) / "specs"
    return {f.name.removesuffix(".yaml"): f for f in folder.iterdir() if f.name.endswith(".yaml")}
