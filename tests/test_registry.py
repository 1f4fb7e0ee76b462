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
        (STAGE.format(name="probe.mine") + HOOK.replace("stages", "stage"), "does not fit kvframe's hooks"),
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


def test_two_plugins_with_one_spec_name(plugin, tmp_path):
    source = """
        from pathlib import Path
        from kvframe.hookspecs import hookimpl

        @hookimpl
        def kvframe_register_specs():
            return {"same": Path("same.yaml")}
    """
    points = [plugin("one", source, "probe_one"), plugin("two", source, "probe_two")]
    with pytest.raises(PluginError, match=r"'one' .* and plugin 'two' .*both register 'same'"):
        build(points)


def test_the_baselines_come_through_their_entry_point():
    assert registry().owners["spec:snapkv"].name == "baselines"
    assert registry().owners["spec:snapkv"].distribution == "kvframe"
