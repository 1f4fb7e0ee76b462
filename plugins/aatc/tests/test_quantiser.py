"""The scalar codes: what a code means, how wrong it may be, and what is stored of it."""

from __future__ import annotations

import pytest
import torch

from kvframe.errors import StageError
from kvframe.ops import bitpack
from kvframe_aatc.quantiser import Channels, _upwards
from kvframe_aatc.tables import measure


def channels(widths: list[int], code: str = "max", symmetric: bool = True, bits: int = 16) -> Channels:
    one_bit = torch.full((len(widths),), 0.4) if symmetric and code == "max" else None
    return Channels(tuple(widths), code, one_bit, bits, 1.0)


def draw(count: int, rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, rows, generator=torch.Generator().manual_seed(seed))


def rebuilt(coded: Channels, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = coded.loaded(coded.scale(latent))
    return coded.meant(coded.codes(latent, scale)) * scale, scale


@pytest.mark.parametrize("width", range(2, 17))
@pytest.mark.parametrize("bits", [8, 16])
def test_a_max_code_is_wrong_by_half_a_step(width, bits):
    latent = draw(5, 33)
    coded = channels([width] * 5, bits=bits)
    found, scale = rebuilt(coded, latent)
    step = 2 * scale / 2**width
    assert bool((scale >= latent.abs().amax(0)).all()), "scales are rounded up"
    # The largest code lies a step below the scale: only there may the error reach a whole step.
    limit = torch.where(latent > scale - step, step, step / 2)
    assert bool(((found - latent).abs() <= limit * (1 + 1e-5) + 4e-7 * scale).all())


def test_sixteen_bits_are_the_identity_within_rounding():
    latent = draw(8, 64) * torch.logspace(-6, 4, 64)
    found, scale = rebuilt(channels([16] * 8), latent)
    assert ((found - latent).abs() <= scale * 2**-15).all()


def test_one_bit_is_a_sign_or_the_papers_half_of_it():
    latent = torch.tensor([[0.9, 0.2, -0.2, -0.9, 0.0]])
    ones = torch.ones(5)
    assert channels([1]).meant(channels([1]).codes(latent, ones)).tolist()[0] == pytest.approx(
        [0.4, 0.4, -0.4, -0.4, 0.4]
    )
    paper = channels([1], symmetric=False)
    assert paper.meant(paper.codes(latent, ones)).tolist() == [[0, 0, 0, -1, 0]]


@pytest.mark.parametrize("width", [1, 2, 3, 5, 8, 12, 16])
def test_lloyd_codes_find_the_nearest_level(width):
    latent = draw(3, 40)
    coded = channels([width] * 3, "lloyd")
    scale = coded.loaded(coded.scale(latent))
    from kvframe.ops.lloyd_max import normal_levels

    levels = normal_levels(width).float()
    found = coded.meant(coded.codes(latent, scale))
    nearest = (latent / scale)[..., None].sub(levels).abs().amin(-1)
    assert torch.allclose((found - latent / scale).abs(), nearest, atol=1e-5)


def test_the_normal_levels_have_maxs_errors():
    from kvframe.ops.lloyd_max import normal_borders, normal_levels

    # The errors of 2, 4, 8, 16 and 32 levels: Max (1960), table I, to the three digits that his iteration had reached.
    for width, expected in ((1, 0.3634), (2, 0.1175), (3, 0.0345), (4, 0.0095), (5, 0.0025)):
        levels, borders = normal_levels(width), normal_borders(width)
        x = torch.linspace(-8, 8, 200001, dtype=torch.float64)
        density = (-x.square() / 2).exp()
        error = (x - levels[torch.bucketize(x, borders)]).square()
        assert float((error * density).sum() / density.sum()) == pytest.approx(expected, rel=2e-3)


def test_mixed_widths_go_through_the_words():
    widths = [11, 9, 8, 8, 3, 2, 2, 1]
    coded = channels(widths)
    runs = bitpack.Runs((37, 0, 5))
    latent = draw(8, 42)
    codes = coded.codes(latent, coded.loaded(coded.scale(latent)))
    words = coded.pack(runs.pad(codes))
    assert words.shape == (3, sum(widths))
    back = torch.cat([part.int() for part in coded.unpack(words)])
    assert torch.equal(runs.trim(back), codes.int())


@pytest.mark.parametrize("code", ["max", "lloyd"])
@pytest.mark.parametrize("bits", [8, 16])
def test_rows_of_zeros_and_extremes(code, bits):
    coded = channels([4, 1], code, bits=bits)
    latent = torch.tensor([[0.0, 1e-18, 1e18, -1.0], [0.0, -1e-18, 3e17, 0.0]])
    found, _ = rebuilt(coded, latent)
    assert bool(found.isfinite().all())
    assert bool((found[:, 0] == 0).all())


def test_no_channels_at_all():
    coded = channels([])
    assert coded.scale(torch.zeros(0, 3)).tolist() == [0, 0, 0]
    assert coded.pack(torch.zeros(0, 32, dtype=torch.uint8)).shape == (1, 0)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("code", ["max", "lloyd"])
def test_infinities_are_refused(code, bad):
    with pytest.raises(StageError, match="infinities or NaN"):
        channels([3], code).scale(torch.tensor([[1.0, bad]]))


def test_upwards_is_the_next_bfloat16():
    exact = torch.tensor([0.0, 1.0, 1.0000001, 3.14159, 1e-20])
    found = _upwards(exact).float()
    assert bool((found >= exact).all())
    assert bool((found <= exact * (1 + 2**-7)).all())
    assert found[:2].tolist() == [0, 1]


def test_eight_bit_scales_stay_near():
    coded = Channels((4,), "max", None, 8, 0.7)
    latent = torch.logspace(-2.5, 2.5, 101)[None]
    stored = coded.scale(latent)
    assert stored.dtype == torch.uint8
    ratio = coded.loaded(stored) / latent[0]
    assert bool((ratio >= 1 - 1e-5).all())
    assert bool((ratio <= 2 ** (1 / 12) * (1 + 1e-5)).all())


def test_the_measured_distortion_is_what_theory_says():
    latent = draw(64, 2048) / 2.576  # as after division by the 99th percentile
    one_bit, distortion, median = measure(latent, "max", "symmetric")
    assert float(median) == pytest.approx(1, rel=0.1), "the largest of 64 normal numbers is about 2.6"
    paper = measure(latent, "max", "paper")[1]
    assert bool((distortion.diff() < 0).all())
    # A uniform code whose range is the row's maximum loses a factor of about 3 to the model, and the paper's one bit
    # is nearly worthless.
    assert 2 < float(paper[3] * 64) < 5
    assert float(paper[1]) > 0.7
    assert float(distortion[1]) < 0.45
    # The best level of a sign: E|x| of a normal variable, relative to the row's maximum.
    assert float(one_bit.mean()) == pytest.approx(0.7979 / 2.576 / float(median), rel=0.1)
    lloyd = measure(draw(64, 2048), "lloyd", "symmetric")[1]
    assert float(lloyd[2]) == pytest.approx(0.1175, rel=0.1)
