"""Models whose layers live on several devices: a cache gives what it gives on one device, bit for bit."""

from __future__ import annotations

import pytest
import torch
from pretend import pretend_devices, spread_model
from tiny import batch, greedy, tiny_model


@pytest.fixture(autouse=True)
def transfers():
    with pretend_devices() as counted:
        yield counted


def at_home(inputs):
    return {name: tensor.to("pretend:0") for name, tensor in inputs.items()}


def test_pretended_devices_are_as_strict_as_real_ones(transfers):
    here, there = torch.arange(4, device="pretend:0"), torch.tensor([1.0, 2.0], device="pretend:1")
    assert (there * torch.tensor(2.0)).device == there[torch.tensor([0])].device == torch.device("pretend:1")
    for wrong in (lambda: here[:2] + there, lambda: there[here[:2]], lambda: torch.stack([there, torch.ones(2)])):
        with pytest.raises(RuntimeError, match="was given tensors on"):
            wrong()
    with pytest.raises(RuntimeError, match="numpy"):
        there.numpy()
    transfers.clear()
    there.zero_()
    assert here.to("pretend:0") is here
    assert torch.equal(here.to("pretend:1").cpu(), torch.arange(4))
    assert there.copy_(here[:2]) is there
    expected = {("pretend:0", "pretend:1"): 2, ("pretend:1", "cpu"): 1}
    assert there.tolist() == [0.0, 1.0]
    assert transfers == expected


def test_a_spread_model_answers_as_one_on_the_cpu():
    inputs = batch([20, 13])
    assert torch.equal(greedy(spread_model("llama", 2), at_home(inputs)).cpu(), greedy(tiny_model("llama"), inputs))
