"""What is recorded of an update beside the ratio: KL(ref) and the entropy."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from cases import PI, PLAIN, Q, f64
from lab_watch import kl_ref

from lab import masked_mean, observe
from lab.bench import Bench
from lab.loss import evaluate, observed
from lab.recipe import Recipe, Use
from lab.shelf import Shelf
from lab.step import complete

near = functools.partial(pytest.approx, rel=0, abs=1e-12)


@observe
def exchanged_ref(logp, ref_logp, mask):
    """pi and ref exchanged (K2): k3 then estimates KL(ref || pi) from pi's samples."""
    return kl_ref(ref_logp, logp, mask)


@observe
def sampled_entropy(logp, mask):
    """-log p of the sampled tokens: its mean over pi's samples, another number on each batch."""
    return {"entropy": float(masked_mean(-logp, mask))}


@pytest.fixture(scope="module")
def wrong() -> Shelf:
    return Shelf.installed((exchanged_ref, sampled_entropy))


def watch(shelf: Shelf, name: str, batch: Mapping[str, Any]) -> Any:
    """What one observer records of an update."""
    b = Bench(Recipe.of(PLAIN, "test", shelf), shelf, [Use(name=name)])
    return b.observe("update", observed(b, complete(batch), evaluate(b, **batch)))


def of_pi() -> dict[str, Any]:
    """Ten samples as pi has them, 5, 3, 2, of one token each; the reference is q."""
    rows = torch.repeat_interleave(torch.arange(3), torch.tensor([5, 3, 2]))
    logp, ref = (f64(*p).log()[rows, None] for p in (PI, Q))
    same = {"logp": logp, "old_logp": logp, "ref_logp": ref, "advantages": 0 * logp + 1}
    entropy = -sum(p * math.log(p) for p in PI)
    return {**same, "mask": 0 * logp + 1, "entropy": 0 * logp + entropy}


def test_two_estimates_of_kl_ref(wrong: Shelf) -> None:
    """H7, K2: pi (.5, .3, .2), ref (.2, .3, .5): .5 log 2.5 + 0 - .2 log 2.5 = .3 log 2.5.

    Log-ratios (.916, 0, -.916): k1 of a token may be negative (K5), k3 = e^-d - 1 + d may not.
    """
    exact = 0.3 * math.log(2.5)
    assert exact == pytest.approx(0.274887, rel=0, abs=5e-7)
    numbers = watch(wrong, "kl_ref", of_pi())
    assert numbers == near({"kl_ref_k1": exact, "kl_ref_k3": exact})
    d = math.log(2.5)
    last = {n: x[-1:] if isinstance(x, torch.Tensor) else x for n, x in of_pi().items()}
    want = {"kl_ref_k1": -d, "kl_ref_k3": math.exp(d) - 1 - d}
    assert watch(wrong, "kl_ref", last) == near(want)
    turned = watch(wrong, "exchanged_ref", of_pi())
    assert turned["kl_ref_k3"] == pytest.approx(0.355113, rel=0, abs=5e-7)


def test_kl_ref_does_not_cancel() -> None:
    """As KL(old): d = 1e-4 in float32, k3 5e-9."""
    x = torch.full((1, 1), 1e-4)
    assert kl_ref(x, 0 * x, x * 0 + 1)["kl_ref_k3"] == pytest.approx(5e-9, rel=5e-3, abs=0)


def test_kl_ref_is_not_kl_old(shelf: Shelf) -> None:
    """Two anchors: at old = pi the one is 0 and the other is not."""
    assert watch(shelf, "kl_old", of_pi())["kl_old_k3"] == 0
    assert watch(shelf, "kl_ref", of_pi())["kl_ref_k3"] > 0.2


def test_the_entropy_is_the_distributions(wrong: Shelf) -> None:
    """N20: of pi 1.029653, whichever tokens were sampled; token by token, padding left out."""
    batch, some = of_pi(), torch.tensor([0, 1, 2, 9])
    part = {n: x[some] if isinstance(x, torch.Tensor) else x for n, x in batch.items()}
    for given in (batch, part):
        numbers = watch(wrong, "entropy", given)
        assert numbers["entropy"] == pytest.approx(1.029653, rel=0, abs=5e-7)
    assert watch(wrong, "sampled_entropy", part)["entropy"] != pytest.approx(1.03, abs=0.05)
    mask = f64([1, 0, 0, 0], [1, 1, 1, 1])
    rows = {**dict.fromkeys(("logp", "old_logp", "advantages"), 0 * mask), "mask": mask}
    entropy = f64([1, 99, 99, 99], [2, 2, 2, 2])
    # one token of 1 and four of 2; a mean of row means would say 1.5
    assert watch(wrong, "entropy", {**rows, "entropy": entropy}) == near({"entropy": 9 / 5})
