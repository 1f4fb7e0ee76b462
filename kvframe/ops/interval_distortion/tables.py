"""What the interval tables hold."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

# Least mass, and its square, that an error is held against: masses are shares of 1, so far below any that counts.
LEAST_MASS, EPS = 1e-15, 1e-30
# A merged key may win more attention than the whole region has; e^10 times as much is as wrong as anything can be.
LOGIT_LIMIT = 10.0


@dataclass(frozen=True, eq=False)
class IntervalTables:
    """Tables over all intervals `[a, a + n)` of up to `longest` tokens, found at `[u, n - 1, a]`.

    Attributes:
        distortion: `[U, longest, N]`, share of the probes' attention that one entry for the interval gets wrong; 0 for
            single tokens, inf where the interval reaches over the end.
        multiplicity: `[U, longest, N]`, between 1 and n.
        mass: `[U, N]`, the probes' mean attention on each token within the region; what is lost if it is dropped.
    """

    distortion: Tensor
    multiplicity: Tensor
    mass: Tensor


def interval_sums(tokens: Tensor, longest: int) -> Tensor:
    """Return `[..., longest, N]`: the sum of `tokens [..., N]` over `[a, a + n)` at `[n - 1, a]`, by additions only;
    intervals that reach over the end are cut there."""
    sums = tokens.new_empty(*tokens.shape[:-1], longest, tokens.shape[-1])
    sums[..., 0, :] = tokens
    for length in range(2, longest + 1):
        now = sums[..., length - 1, :]
        now[:] = sums[..., length - 2, :]
        now[..., : max(0, tokens.shape[-1] - length + 1)] += tokens[..., length - 1 :]
    return sums
