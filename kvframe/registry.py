"""Finds plugins through entry points, once, at the first use, and keeps their stages and specs by name."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.resources import files
from importlib.resources.abc import Traversable

from kvframe.errors import PluginError, SpecError
from kvframe.naming import nearest
from kvframe.plugins import CORE, DISABLE, GROUP, Offer, Plugin, load_plugin
from kvframe.stages import KINDS, Stage

__all__ = ["CORE", "DISABLE", "GROUP", "Plugin", "Registry", "build", "disabled_plugins", "nearest", "registry"]


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


def disabled_plugins() -> frozenset[str]:
    """Entry-point names in KVFRAME_DISABLE_PLUGINS, separated by commas."""
    return frozenset(name.strip() for name in os.environ.get(DISABLE, "").split(",") if name.strip())


@cache
def registry() -> Registry:
    """The registry of this process, built at the first call. Raises PluginError if a plugin cannot be used."""
    return build(entry_points(group=GROUP), disabled_plugins())


def build(points: Iterable[EntryPoint], disabled: frozenset[str] = frozenset()) -> Registry:
    """Build a registry from core and the given entry points, without those whose name is disabled. Raises PluginError
    if a plugin cannot be used, or if two bring the same name."""
    from kvframe import builtin

    stages: dict[str, dict[str, type[Stage]]] = {kind.kind: {} for kind in KINDS}
    specs: dict[str, Traversable] = {}
    owners: dict[str, Plugin] = {}
    offers = [Offer(CORE, builtin.STAGES, spec_files("kvframe.builtin"))]
    offers += [load_plugin(p) for p in sorted(points, key=lambda p: p.name) if p.name not in disabled]
    names: dict[str, Plugin] = {}
    for offer in offers:
        if (namesake := names.get(offer.plugin.name)) is not None:
            raise PluginError(f"{namesake} and {offer.plugin} have the same entry-point name; uninstall one of them.")
        names[offer.plugin.name] = offer.plugin
        for kind, name in [
            *((stage.kind, stage_name(stage)) for stage in offer.stages),
            *(("spec", n) for n in offer.specs),
        ]:
            if (other := owners.get(f"{kind}:{name}")) is not None:
                raise PluginError(
                    f"{other} and {offer.plugin} both register '{name}'; "
                    f"uninstall one of them or set {DISABLE}={offer.plugin.name}."
                )
            owners[f"{kind}:{name}"] = offer.plugin
        for stage in offer.stages:
            stages[stage.kind][stage_name(stage)] = stage
        specs.update(offer.specs)
    return Registry(stages, specs, owners, tuple(offer.plugin for offer in offers))


def stage_name(stage: type[Stage]) -> str:
    """The name of a stage class."""
    return str(stage.model_fields["name"].default)


def spec_files(package: str) -> dict[str, Traversable]:
    """The YAML files in the folder `specs` of a package, by name without the ending."""
    folder = files(package) / "specs"
    return {f.name.removesuffix(".yaml"): f for f in folder.iterdir() if f.name.endswith(".yaml")}
