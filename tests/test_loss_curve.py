"""lab.loss.pull_curve: the weight of a token at each ratio."""

from __future__ import annotations

import pytest
import torch
from handmade import bench
from torch import Tensor

import lab
from lab.loss import pull_curve


def test_the_pull_curve_shows_tokens_that_could_be_sampled() -> None:
    """A log-probability above 0 shows pulls that no token has: dual_clip around A log p, which
    never acts (A < 0 and log p <= 0 lie above c A), would seem to stop CISPO at ratio 6.
    """

    @lab.surrogate
    def probability(logp: Tensor, advantages: Tensor) -> Tensor:
        """A log p where log p is one, and elsewhere a slope that would show."""
        return torch.where(logp <= 0, logp, -5 * logp) * advantages

    b = bench(probability, surrogate="probability", ratio="none")
    assert pull_curve(b, (0.5, 1.0, 6.0, 30.0), 1.0) == [1, 1, 1, 1]
    b = bench(surrogate={"name": "cispo", "cap": 4.0}, wrap=["dual_clip"])
    assert pull_curve(b, (0.5, 6.0), -1.0) == pytest.approx([-0.5, -4.0])
