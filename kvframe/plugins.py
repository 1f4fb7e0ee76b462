"""Loads one plugin and checks what its hooks return. Whatever is wrong is a PluginError that names the plugin, its
distribution and version, and what to mend."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from importlib.resources.abc import Traversable
from types import ModuleType
from typing import Any, get_args

import pluggy

from kvframe import hookspecs
from kvframe.errors import PluginError
from kvframe.naming import nearest
from kvframe.stages import KINDS, Stage

GROUP = "kvframe"
DISABLE = "KVFRAME_DISABLE_PLUGINS"
STAGES_HOOK, SPECS_HOOK = "kvframe_register_stages", "kvframe_register_specs"


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
class Offer:
    """What a plugin brings."""

    plugin: Plugin
    stages: tuple[type[Stage], ...] = ()
    specs: Mapping[str, Traversable] = field(default_factory=dict)


def load_plugin(point: EntryPoint) -> Offer:
    """Import the plugin of an entry point, call its hooks and check what they return. Raises PluginError."""
    owner = Plugin(point.name, *((point.dist.name, point.dist.version) if point.dist else ("unknown", "?")))
    if point.name == CORE.name:
        raise PluginError(f"{owner} has a name that belongs to kvframe itself; name the entry point otherwise.")
    try:
        module = point.load()
    # An exit at import would end the user's program without a word.
    except (Exception, SystemExit) as error:
        raise PluginError(f"{owner} fails to import: {_reason(error)}; {_way_out(owner)}.") from error
    _check_hooks(module, owner)
    stages = _call(module, STAGES_HOOK, owner, "the list of stage classes, [] for none")
    specs = _call(module, SPECS_HOOK, owner, "a mapping from names to YAML files, {} for none")
    return Offer(owner, _checked_stages(stages, owner), _checked_specs(specs, owner))


def _check_hooks(module: Any, owner: Plugin) -> None:
    """Hold the module's hooks against kvframe's."""
    known = (STAGES_HOOK, SPECS_HOOK)
    functions = {name: value for name, value in vars(module).items() if inspect.isroutine(value)}
    marked = {name for name, value in functions.items() if hasattr(value, f"{GROUP}_impl")}
    for name in sorted(marked - set(known)):
        raise PluginError(f"{owner} implements the hook '{name}', which kvframe does not have{nearest(name, known)}")
    for name in sorted(set(known) & functions.keys() - marked):
        raise PluginError(
            f"{owner} defines {name} without @hookimpl; write `from kvframe import hookimpl` and mark it."
        )
    if not marked:
        raise PluginError(
            f"{owner} brings nothing: its module {getattr(module, '__name__', module)!r} has neither {STAGES_HOOK} nor "
            f"{SPECS_HOOK}; write one, marked with @hookimpl, or point the entry point at the module that has it."
        )
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(module, owner.name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise PluginError(f"{owner} does not fit kvframe's hooks: {' '.join(str(error).split())}.") from error


def _call(module: ModuleType, hook: str, owner: Plugin, expected: str) -> Any:
    """What a hook returns, generators run to their end; None if the plugin does not have it."""
    function = getattr(module, hook, None)
    if function is None:
        return None
    try:
        found = function()
        found = list(found) if inspect.isgenerator(found) else found
    # A plugin's own code may raise anything.
    except Exception as error:
        raise PluginError(f"{owner} fails in {hook}: {_reason(error)}; {_way_out(owner)}.") from error
    wanted = Mapping if hook == SPECS_HOOK else (list, tuple, set, frozenset)
    if not isinstance(found, wanted):
        raise PluginError(f"{owner} must return from {hook} {expected}, but returned {found!r}.")
    return found


def _checked_stages(found: Any, owner: Plugin) -> tuple[type[Stage], ...]:
    for stage in found or ():
        if isinstance(stage, Stage):
            raise PluginError(f"{owner} registers an instance, {stage!r}; register the class {type(stage).__name__}.")
        if not (isinstance(stage, type) and issubclass(stage, KINDS)):
            raise PluginError(f"{owner} registers {stage!r}, which is not a class of one of the five stage kinds.")
        if missing := sorted(getattr(stage, "__abstractmethods__", ())):
            raise PluginError(f"{owner} registers {stage.__name__}, which does not define {', '.join(missing)}.")
        info = stage.model_fields["name"]
        if (name := info.default) is None or not isinstance(name, str) or get_args(info.annotation) != (name,):
            example = (
                f'name: Literal["{owner.name}.{stage.__name__.lower()}"] = "{owner.name}.{stage.__name__.lower()}"'
            )
            raise PluginError(f"{owner} registers {stage.__name__} without one fixed name; write {example}.")
        if not name.removeprefix(f"{owner.name}.") or not name.startswith(f"{owner.name}."):
            raise PluginError(
                f"{owner} registers the stage {stage.__name__} under the name {name!r}; "
                f"it must be '{owner.name}.<stage>'."
            )
    return tuple(found or ())


def _checked_specs(found: Any, owner: Plugin) -> Mapping[str, Traversable]:
    for name, file in (found or {}).items():
        if not isinstance(name, str) or not isinstance(file, Traversable):
            raise PluginError(
                f"{owner} registers the spec {name!r} as {file!r}; a spec is a name and a file, such as "
                "importlib.resources.files(__name__) / 'specs' / 'mine.yaml'."
            )
        if not file.is_file():
            raise PluginError(f"{owner} registers the spec '{name}', but there is no file {file}; is it in the wheel?")
    return found or {}


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(".: ")


def _way_out(owner: Plugin) -> str:
    return f"mend or uninstall it, or set {DISABLE}={owner.name} to go on without it"
