"""Kernels are launched on the device of their tensors, not on the current one."""

from __future__ import annotations

import ast
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch

import kvframe.ops
from kvframe.ops.launch import beside_its_tensors


def test_the_device_is_changed_for_the_launch_alone(monkeypatch):
    current = [0]

    @contextmanager
    def device(wanted):
        before, current[0] = current[0], wanted.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    launch = beside_its_tensors(lambda tensor, more, last=0: (current[0], more, last))
    for index in (0, 1):
        tensor = SimpleNamespace(is_cuda=True, device=torch.device("cuda", index))
        assert launch(tensor, 5, last=6) == (index, 5, 6)
        assert current == [0]
    assert launch(torch.ones(1), 5) == (0, 5, 0)


def test_every_launch_is_guarded():
    """A launch is a call of something that stands with a grid in brackets."""
    found = 0
    for file in Path(kvframe.ops.__file__).parent.glob("*/triton.py"):
        for function in ast.parse(file.read_text()).body:
            if not isinstance(function, ast.FunctionDef):
                continue
            calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
            kernels = {
                call.value.id for call in calls if isinstance(call, ast.Subscript) and isinstance(call.value, ast.Name)
            }
            if kernels:
                found += 1
                names = [getattr(mark, "id", "") for mark in function.decorator_list]
                assert names == ["beside_its_tensors"], f"{file}: {function.name} launches {kernels}"
    assert found == 6
