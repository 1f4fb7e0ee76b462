"""The codes: the laws of the conformance kit, errors against theory, storage, and what is refused."""

from __future__ import annotations

import pytest
import torch

from kvframe.errors import StageError
from kvframe.testing import parametrize_with_checks
from kvframe.types import Entries, storage_bytes
from kvframe_baselines.integer import PerToken
from kvframe_baselines.kivi import Kivi
from kvframe_baselines.rotation import Rotation, rotation

STAGES = [Kivi(), Kivi(bits=4, group=64), PerToken(), PerToken(bits=3), Rotation(), Rotation(bits=4, seed=3)]


@parametrize_with_checks(STAGES)
def test_conformance(stage, check):
    check(stage)


def rows(lengths: list[int], dim: int = 64, seed: int = 0) -> Entries:
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    keys, values = (torch.randn(int(offsets[-1]), dim, generator=generator) for _ in range(2))
    return Entries(offsets, keys, values)


def back(stage, entries: Entries) -> Entries:
    return stage.decode(stage.encode(entries, ()), ())


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("group", [32, 64])
def test_kivi_errs_by_half_a_step_of_its_group(bits, group):
    entries = rows([3 * group, group, 7])
    entries.keys[:, 5] += 40  # an outlier channel, which is why keys are grouped by channel
    found = back(Kivi(bits=bits, group=group), entries)
    for begin, end in ((0, group), (group, 2 * group), (4 * group, 4 * group + 7)):
        block = entries.keys[begin:end]
        low, high = block.amin(0), block.amax(0)
        # Half a step, and what float16 loses of the smallest value and of the step, over all steps.
        limit = (high - low) / (2**bits - 1) / 2 + (low.abs() + (high - low)) * 2**-10
        assert bool(((found.keys[begin:end] - block).abs() <= limit).all())
    values = entries.values.view(-1, 64 // group, group)
    low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    limit = (high - low) / (2**bits - 1) / 2 + (low.abs() + (high - low)) * 2**-10
    assert bool(((found.values.view(values.shape) - values).abs() <= limit).all())


@pytest.mark.parametrize(
    ("stage", "bits"),
    [(Kivi(), 3.0), (Kivi(group=64), 2.5), (PerToken(), 4.5), (PerToken(bits=2), 2.5), (Rotation(), 2.25)],
)
def test_overheads_are_counted(stage, bits):
    entries = rows([128, 64])
    held = storage_bytes(stage.encode(entries, ()).codes.values())
    assert held * 8 == bits * 2 * 64 * 192


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_the_rotation_meets_its_theory(bits):
    expected = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.0095}[bits]
    entries = rows([512])
    # One large channel in each row: the rotation spreads it out.
    entries.keys[:, 3] *= 20
    found = back(Rotation(bits=bits), entries)
    error = (found.keys - entries.keys).square().sum() / entries.keys.square().sum()
    assert float(error) < 1.6 * expected
    plain = back(PerToken(bits=bits), entries)
    assert float((plain.keys - entries.keys).square().sum()) > 2 * float(error) * float(entries.keys.square().sum())


@pytest.mark.parametrize("dim", [1, 8, 48, 64, 80])
def test_rotations_are_orthogonal(dim):
    matrix = rotation(dim, 0, torch.device("cpu"))
    assert torch.allclose(matrix @ matrix.T, torch.eye(dim), atol=1e-5)
    assert dim < 3 or not torch.equal(matrix, rotation(dim, 1, torch.device("cpu")))


def test_a_group_that_is_not_full_takes_no_more_rows():
    stage, first, second = Kivi(), rows([32, 33]), rows([32, 31])
    codes = [stage.encode(entries, ()) for entries in (first, second)]
    assert stage.join(codes[0], codes[1], ()) is None
    whole = stage.encode(rows([32, 64]), ())
    joined = stage.join(whole, codes[1], ())
    assert joined is not None
    assert joined.offsets.tolist() == [0, 64, 159]


@pytest.mark.parametrize("stage", STAGES[::2], ids=lambda stage: stage.name)
def test_infinities_are_refused(stage):
    entries = rows([5])
    entries.values[2, 3] = float("inf")
    with pytest.raises(StageError, match="infinities or NaN"):
        stage.encode(entries, ())
