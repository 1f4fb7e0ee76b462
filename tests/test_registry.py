"""Finding plugins, and what is said of those that cannot be used."""

from __future__ import annotations

import sys
import textwrap
from importlib.metadata import EntryPoint

import pytest

from kvframe.errors import PluginError
from kvframe.registry import build, disabled_plugins, registry

STAGE = """
    from typing import Literal
    import torch
    from kvframe.hookspecs import hookimpl
    from kvframe.stages import Scorer

    class Mine(Scorer):
        name: Literal["{name}"] = "{name}"
        def score(self, observation, segments):
            return torch.ones(observation.shape)
"""
HOOK = """
    @hookimpl
    def kvframe_register_stages():
        return [Mine]
"""
SPECS = """
    from pathlib import Path
    from kvframe.hookspecs import hookimpl

    @hookimpl
    def kvframe_register_specs():
        return {}
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name, source, module="probe_module"):
        monkeypatch.delitem(sys.modules, module, raising=False)
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(source))
        return EntryPoint(name, module, "kvframe")

    return write


def test_a_plugin_is_found(plugin):
    found = build([plugin("probe", STAGE.format(name="probe.mine") + HOOK)])
    assert found.stages["scorer"]["probe.mine"].__name__ == "Mine"
    assert found.owners["scorer:probe.mine"].name == "probe"
    assert [p.name for p in found.plugins] == ["core", "probe"]


def test_a_disabled_plugin_is_not_even_imported(plugin, monkeypatch):
    monkeypatch.setenv("KVFRAME_DISABLE_PLUGINS", "other, probe")
    found = build([plugin("probe", "raise SystemError")], disabled_plugins())
    assert [p.name for p in found.plugins] == ["core"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import nothing_of_this_name", "plugin 'probe' .*fails to import: ModuleNotFoundError.*DISABLE_PLUGINS=probe"),
        ("raise SystemExit(0)", "fails to import: SystemExit: 0; .*DISABLE_PLUGINS=probe"),
        ("def (", "fails to import: SyntaxError"),
        (
            STAGE.format(name="probe.mine") + HOOK.replace("stages", "stage"),
            "implements the hook 'kvframe_register_stage', which kvframe does not have; did you mean 'kvframe_reg",
        ),
        (
            STAGE.format(name="probe.mine") + HOOK.replace("@hookimpl", ""),
            "defines kvframe_register_stages without @hookimpl; write `from kvframe import hookimpl`",
        ),
        (
            STAGE.format(name="probe.mine"),
            "brings nothing: its module 'probe_module' has neither kvframe_register_stages",
        ),
        (STAGE.format(name="probe.mine") + HOOK.replace("()", "(extra)"), "does not fit kvframe's hooks: .*extra"),
        (
            STAGE.format(name="probe.mine") + HOOK.replace("[Mine]", "None"),
            r"must return from kvframe_register_stages the list .*, \[\] for none, but returned None",
        ),
        (STAGE.format(name="probe.mine") + HOOK.replace("[Mine]", "Mine"), "but returned <class 'probe_module.Mine'>"),
        (
            STAGE.format(name="probe.mine") + HOOK.replace("[Mine]", "[1 / 0]"),
            "fails in kvframe_register_stages: ZeroDivisionError: .*DISABLE_PLUGINS=probe",
        ),
        (
            STAGE.format(name="probe.mine") + HOOK.replace("[Mine]", "[Mine()]"),
            "an instance, .*register the class Mine",
        ),
        (STAGE.format(name="probe.mine") + HOOK.replace("[Mine]", "[Scorer]"), "Scorer, which does not define score"),
        (
            STAGE.format(name="probe.mine").replace("def score", "def scores") + HOOK,
            "registers Mine, which does not define score",
        ),
        (
            STAGE.format(name="probe.mine").replace("Literal[", "str  # ") + HOOK,
            "Mine without one fixed name; write name",
        ),
        (
            STAGE.format(name="probe.mine").replace('Literal["probe.mine"]', 'Literal["probe.other"]') + HOOK,
            r'without one fixed name; write name: Literal\["probe.mine"\] = "probe.mine"',
        ),
        (STAGE.format(name="probe.") + HOOK, "under the name 'probe.'; it must be 'probe.<stage>'"),
        (
            SPECS.format("None"),
            r"must return from kvframe_register_specs a mapping .*, \{\} for none, but returned None",
        ),
        (SPECS.format("['a']"), r"must return from kvframe_register_specs a mapping .* but returned \['a'\]"),
        (SPECS.format("{'a': 'a.yaml'}"), r"registers the spec 'a' as 'a.yaml'; a spec is a name and a file"),
        (SPECS.format("{'a': Path('none.yaml')}"), r"the spec 'a', but there is no file none.yaml; is it in the wheel"),
        (STAGE.format(name="mine") + HOOK, "under the name 'mine'; it must be 'probe.<stage>'"),
        (STAGE.format(name="baselines.snapkv") + HOOK, "it must be 'probe.<stage>'"),
        (STAGE.format(name="probe.mine") + HOOK.replace("[Mine]", "[Mine, Mine]"), "both register 'probe.mine'"),
        (
            STAGE.format(name="probe.mine") + HOOK.replace("[Mine]", "[int]"),
            "not a class of one of the five",
        ),
    ],
)
def test_plugins_that_cannot_be_used_are_named(plugin, source, message):
    with pytest.raises(PluginError, match=message):
        build([plugin("probe", source)])


def test_two_plugins_with_one_spec_name(plugin):
    source = SPECS.format("{'same': Path(__file__)}")
    points = [plugin("one", source, "probe_one"), plugin("two", source, "probe_two")]
    with pytest.raises(PluginError, match=r"'one' .* and plugin 'two' .*both register 'same'"):
        build(points)


def test_two_plugins_of_one_name(plugin):
    points = [plugin("same", SPECS.format("{}"), "probe_one"), plugin("same", SPECS.format("{}"), "probe_two")]
    with pytest.raises(PluginError, match=r"plugin 'same' .* and plugin 'same' .* have the same entry-point name"):
        build(points)
    with pytest.raises(PluginError, match="has a name that belongs to kvframe itself"):
        build([plugin("core", SPECS.format("{}"))])


def test_a_stage_needs_no_docstring_and_hooks_may_be_generators(plugin):
    hook = HOOK.replace("return [Mine]", "yield Mine")
    assert list(build([plugin("probe", STAGE.format(name="probe.mine") + hook)]).stages["scorer"])[-1] == "probe.mine"


def test_the_baselines_come_through_their_entry_point():
    assert registry().owners["spec:snapkv"].name == "baselines"
    assert registry().owners["spec:snapkv"].distribution == "kvframe"
