"""lab.tokens: what a token's log-probability means, where a row ends, what is drawn from."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import PI, f64
from torch import Tensor

from lab.errors import LabError
from lab.hookspecs import StopReason
from lab.tokens import (
    Sampling,
    ends,
    entropy,
    left_padded,
    log_probs,
    positions,
    support,
    tempered,
    token_logp,
)

PI_LOGITS = f64(*PI).log()
EOS, STOP, LENGTH = (int(s) for s in StopReason)


def close(got: Tensor, want: Any, atol: float = 1e-12) -> None:
    due = torch.as_tensor(want, dtype=got.dtype)
    torch.testing.assert_close(got, due, rtol=0, atol=atol)


def kept(probabilities: Any, **sampling: Any) -> list[int]:
    """Which tokens stay."""
    logits = f64(*probabilities).log()
    return support(logits, Sampling(**sampling)).nonzero().squeeze(1).tolist()


def one_row(logits: Tensor, ids: list[int], temperature: float = 1.0, on: Any = None) -> Tensor:
    """token_logp where every position of one row has the same logits."""
    width = len(ids)
    return token_logp(
        logits.expand(1, width, -1),
        torch.tensor([ids]),
        torch.ones(1, width),
        temperature,
        None if on is None else on.expand(1, width, -1),
    )[0]


# the distribution that tokens are drawn from


def test_temperature_divides_logits() -> None:
    """F3: p^(1/.6) / sum = (.314980, .134442, .068399) / .517821.

    Log-probabilities divided by T do not sum to 1: (.315, .134, .068).
    """
    close(log_probs(PI_LOGITS, 0.6).exp(), (0.608280, 0.259630, 0.132090), 5e-7)
    power = f64(*PI) ** (1 / 0.6)
    close(log_probs(PI_LOGITS, 0.6).exp(), power / power.sum())
    assert abs(float((PI_LOGITS / 0.6).exp().sum()) - 1) > 0.4


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_token_logp_is_under_the_temperature(temperature: float) -> None:
    """A temperature that only the sampler knows, or only the scorer."""
    want = (PI_LOGITS / temperature) - (PI_LOGITS / temperature).exp().sum().log()
    close(one_row(PI_LOGITS, [0, 1, 2], temperature), want)


@pytest.mark.parametrize("sampling", [{"top_k": 2}, {"top_p": 0.7}], ids=str)
def test_a_truncated_sampler_stores_renormalised_log_probs(sampling: dict[str, Any]) -> None:
    """F4: of (.5,.3,.2), two stay: .5/.8 = .625, .3/.8 = .375; over all tokens .8 of each.

    One factor on both: that the ratios are equal says nothing, and the scorer needs the support.
    """
    on = support(PI_LOGITS, Sampling(**sampling))
    stored = one_row(PI_LOGITS, [0, 1], on=on)
    close(stored.exp(), (0.625, 0.375))
    close((one_row(PI_LOGITS, [0, 1]) - stored).exp(), (0.8, 0.8))
    assert float(log_probs(PI_LOGITS, 1.0, on)[2]) == -math.inf
    with pytest.raises(LabError, match=r"^row 0, token 1: id 2 lies outside the stored support"):
        one_row(PI_LOGITS, [0, 2], on=on)


def test_an_impossible_token_is_refused_by_its_own_row_and_place() -> None:
    on = torch.ones(2, 3, 3, dtype=torch.bool)
    on[1, 2, 0] = False
    ids = torch.tensor([[0, 0, 0], [1, 2, 0]])
    with pytest.raises(LabError, match="row 1, token 2: id 0"):
        token_logp(PI_LOGITS.expand(2, 3, 3), ids, torch.ones(2, 3), 1.0, on)
    off = f64([1, 1, 1], [1, 1, 0])  # a padding token is nobody's choice
    close(token_logp(PI_LOGITS.expand(2, 3, 3), ids, off, 1.0, on)[1, 2:], [0])


def test_top_p_keeps_the_token_that_reaches_the_mass() -> None:
    """R4: (.6,.3,.1), .85: .6 is short of it, .9 is not, so log(2/3), log(1/3).

    Stopping before the token that crosses keeps .6 alone, a log-probability of 0.
    """
    logits = f64(0.6, 0.3, 0.1).log()
    on = support(logits, Sampling(top_p=0.85))
    stored = one_row(logits, [0, 1], on=on)
    close(stored, (math.log(2 / 3), math.log(1 / 3)))
    close((one_row(logits, [0, 1]) - stored).exp(), (0.9, 0.9))
    assert kept((0.1, 0.3, 0.6), top_p=0.85) == [1, 2]  # not the first ones in the vocabulary


def test_top_p_counts_the_mass_under_top_k() -> None:
    """(.4,.3,.2,.1), top-k 2: 4/7 = .571 reaches .5 alone; of all tokens .4 does not."""
    p = (0.4, 0.3, 0.2, 0.1)
    assert kept(p, top_p=0.5) == [0, 1]
    assert kept(p, top_k=2, top_p=0.5) == [0]
    assert kept(p, top_k=2, top_p=0.6) == [0, 1]
    assert kept(p, top_k=2, top_p=0.999) == [0, 1]  # never a token that top-k left out


def test_top_p_counts_the_mass_under_the_temperature() -> None:
    """At T .6 the first token has .608, enough for .6; at 1 it has .5, and two are needed."""
    assert kept(PI, top_p=0.6) == [0, 1]
    assert kept(PI, top_p=0.6, temperature=0.6) == [0]


@pytest.mark.parametrize(
    ("sampling", "want"),
    [
        ({"top_p": 1e-9}, [1]),  # always the likeliest one
        ({"top_p": 0.5}, [1]),  # .5 reaches .5
        ({"top_p": 0.51}, [0, 1]),  # of two at .25, the first in the vocabulary
        ({"top_p": 0.75}, [0, 1]),  # .5 + .25
        ({"top_p": 0.76}, [0, 1, 2]),
        ({"top_p": 1.0}, [0, 1, 2]),
        ({"top_k": 1}, [1]),
        ({"top_k": 2}, [0, 1, 2]),  # a tie for the second place: both stay
        ({"top_k": 3}, [0, 1, 2]),
        ({"top_k": 99}, [0, 1, 2]),  # more than there are
        ({"top_k": 0}, [0, 1, 2]),
        ({"top_k": 2, "top_p": 0.75}, [0, 1]),
    ],
    ids=str,
)
def test_edges_and_ties(sampling: dict[str, Any], want: list[int]) -> None:
    """Logits (-log 2, 0, -log 2): exactly (.25, .5, .25)."""
    logits = f64(-math.log(2), 0, -math.log(2))
    assert support(logits, Sampling(**sampling)).nonzero().squeeze(1).tolist() == want


def test_each_position_has_its_own_support() -> None:
    logits = torch.stack([PI_LOGITS, PI_LOGITS.flip(0)])[None]
    on = support(logits, Sampling(top_k=1))
    assert on.shape == (1, 2, 3)
    assert on[0].tolist() == [[True, False, False], [False, False, True]]


@pytest.mark.parametrize(
    ("sampling", "want"),
    [
        ({}, False),
        ({"temperature": 0.6}, False),
        ({"top_k": 1}, True),
        ({"top_p": 0.99}, True),
        ({"top_k": 0, "top_p": 1.0}, False),
    ],
    ids=str,
)
def test_a_support_is_stored_only_where_tokens_are_left_out(
    sampling: dict[str, Any], want: bool
) -> None:
    assert Sampling(**sampling).truncates is want


# log-probabilities of tokens


def test_logits_at_t_minus_1_predict_token_t() -> None:
    """N1: prompt of 2, response of 3; each log-softmax by hand, at the position before."""
    generator = torch.Generator().manual_seed(3)
    every = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64)
    ids = torch.randint(7, (2, 5), generator=generator)
    got = token_logp(every[:, 1:4], ids[:, 2:], torch.ones(2, 3), 1.7)
    for row in range(2):
        for t in range(2, 5):
            z = [float(x) / 1.7 for x in every[row, t - 1]]
            by_hand = z[int(ids[row, t])] - math.log(sum(map(math.exp, z)))
            assert float(got[row, t - 2]) == pytest.approx(by_hand, abs=1e-12)
    shifted = token_logp(every[:, 2:5], ids[:, 2:], torch.ones(2, 3), 1.7)
    assert float((got - shifted).abs().max()) > 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_logits_are_widened_first(dtype: torch.dtype) -> None:
    """N25: in bfloat16 the log-softmax of (.., 20) is off by .026; in float32 it is not."""
    narrow = torch.tensor([0.0, 1.5, -3.25, 20.0, 19.5]).to(dtype)
    want = narrow.double().log_softmax(-1)
    got = one_row(narrow, [0, 1, 2, 3, 4])
    assert got.dtype == tempered(narrow, 0.6).dtype == log_probs(narrow, 0.6).dtype
    assert got.dtype == torch.float32
    close(got.double(), want, 1e-5)
    assert float((narrow.log_softmax(-1).double() - want).abs().max()) > 1e-3
    # and divided by the temperature after it, not before
    assert torch.equal(tempered(narrow, 0.6), narrow.float() / 0.6)
    assert entropy(narrow[None, None], torch.ones(1, 1), 1.0).dtype == torch.float32


def test_wide_logits_stay_wide() -> None:
    assert one_row(PI_LOGITS, [0]).dtype == torch.float64


def test_far_logits_are_finite() -> None:
    """log(softmax(x)) is -inf at -200 in float32; the log-softmax is not."""
    logits = torch.tensor([0.0, -200.0, 100.0])
    close(one_row(logits, [0, 1, 2]), (-100, -300, 0), 1e-5)


@pytest.mark.parametrize("padding", [0, 2])
def test_off_the_mask_the_log_probability_is_0(padding: int) -> None:
    """Also where a row of padding has nothing in its support, which alone would be NaN."""
    logits = PI_LOGITS.expand(1, 3, 3).clone()
    on = torch.ones(1, 3, 3, dtype=torch.bool)
    on[0, 2] = False
    got = token_logp(logits, torch.tensor([[0, 1, padding]]), f64([1, 1, 0]), 1.0, on)
    close(got, [[math.log(0.5), math.log(0.3), 0]])


def test_gradients_through_a_support_are_finite() -> None:
    """d log p_a / dz_k = 1[k = a] - p_k on the support (.625,.375), 0 off it and off the mask.

    -inf filled in *after* the log-softmax, or multiplied by a mask, makes NaN of the gradient.
    """
    z = PI_LOGITS.expand(1, 3, 3).clone().requires_grad_()
    on = torch.tensor([True, True, False]).expand(1, 3, 3).clone()
    on[0, 2] = False
    logp = token_logp(z, torch.tensor([[0, 1, 2]]), f64([1, 1, 0]), 1.0, on)
    (got,) = torch.autograd.grad(logp.sum(), z)
    close(got[0], [[0.375, -0.375, 0], [-0.625, 0.625, 0], [0, 0, 0]])


def test_the_temperature_divides_the_gradient_too() -> None:
    """(1[k = a] - p_k) / T with p of F3."""
    z = PI_LOGITS.clone().requires_grad_()
    (got,) = torch.autograd.grad(one_row(z, [0], 0.6).sum(), z)
    p = f64(*PI) ** (1 / 0.6) / (f64(*PI) ** (1 / 0.6)).sum()
    close(got, (f64(1, 0, 0) - p) / 0.6)


# entropy


def test_the_entropy_and_its_gradient() -> None:
    """N20: H = 1.029653, dH/dz_k = -p_k (log p_k + H): -.5 (-.693147 + 1.029653) = -.168253."""
    z = PI_LOGITS.expand(1, 2, 3).clone().requires_grad_()
    h = entropy(z, f64([1, 0]), 1.0)
    close(h, [[1.029653, 0]], 5e-7)
    (got,) = torch.autograd.grad(h.sum(), z)
    close(got[0], [[-0.168253, 0.052296, 0.115957], [0, 0, 0]], 5e-7)
    p = f64(*PI)
    close(got[0, 0], -p * (p.log() + float(-(p * p.log()).sum())))


def test_the_entropy_is_that_of_the_tempered_policy() -> None:
    """At T .6: -(.60828 log .60828 + .25963 log .25963 + .13209 log .13209) = .919885."""
    p = f64(*PI) ** (1 / 0.6) / (f64(*PI) ** (1 / 0.6)).sum()
    close(entropy(PI_LOGITS[None, None], torch.ones(1, 1), 0.6), [[float(-(p * p.log()).sum())]])


# where a row ends


@pytest.mark.parametrize(
    ("ids", "eos", "stops", "mask", "reason"),
    [
        ([7, 2, 2], (2,), (), [1, 1, 0], EOS),  # G2: padding has the id of the end
        ([7, 8, 2, 2, 2], (2,), (), [1, 1, 1, 0, 0], EOS),  # M1
        ([7, 8, 9], (2,), (), [1, 1, 1], LENGTH),  # G3: nothing ended it
        ([2, 7, 2], (2,), (), [1, 0, 0], EOS),  # an empty answer still has its end
        ([7, 8, 2], (2,), (), [1, 1, 1], EOS),  # an end in the last column is an end
        ([7, 5, 2], (2, 5), (), [1, 1, 0], EOS),  # M2: each of several ends counts
        ([7, 2, 5], (2, 5), (), [1, 1, 0], EOS),
        ([7, 1, 8, 2], (2,), (), [1, 1, 1, 1], EOS),  # id 1 may pad; here it was sampled
        ([7, 9, 2], (2,), (9,), [1, 1, 0], STOP),
        ([7, 2, 9], (2,), (9,), [1, 1, 0], EOS),  # the first of both kinds says why
        ([7, 8, 9], (2,), (4, 9), [1, 1, 1], STOP),
        ([7, 7, 7], (2,), (9,), [1, 1, 1], LENGTH),
        ([7, 9, 7], (2, 9), (9,), [1, 1, 0], EOS),
    ],
)
def test_where_a_row_ends_and_why(
    ids: list[int], eos: tuple[int, ...], stops: tuple[int, ...], mask: list[int], reason: int
) -> None:
    """Kills mask = ids != pad, a dropped end, tokens kept after it, one end id of several."""
    got, why = ends(torch.tensor([ids]), eos, stops)
    assert got.tolist() == [mask]
    assert got.dtype == torch.float32
    assert why.tolist() == [reason]


def test_the_width_never_decides() -> None:
    """T2: rows of 3, 5 and 8 tokens; the full row ended, and wider padding makes no row finished.

    "Ends before the last column" calls row 2 cut; "as long as the longest" too.
    """
    ids = torch.tensor(
        [[7, 7, 2, 2, 2, 2, 2, 2], [7, 7, 7, 7, 2, 2, 2, 2], [7, 7, 7, 7, 7, 7, 7, 2]]
    )
    mask, why = ends(ids, (2,))
    assert mask.sum(1).tolist() == [3, 5, 8]
    assert why.tolist() == [EOS, EOS, EOS]
    wide, same = ends(torch.nn.functional.pad(ids, (0, 4), value=2), (2,))
    assert torch.equal(wide[:, :8], mask)
    assert float(wide[:, 8:].sum()) == 0
    assert torch.equal(same, why)


# prompts


def test_prompts_are_padded_on_the_left() -> None:
    """The last column is the last token of every prompt: it predicts the first of a response."""
    ids, attention = left_padded([[5, 6, 7], [8], [9, 1]], pad_id=1)
    assert ids.tolist() == [[5, 6, 7], [1, 1, 8], [1, 9, 1]]
    assert attention.tolist() == [[1, 1, 1], [0, 0, 1], [0, 1, 1]]  # 1 in row 2 is a real token
    assert ids.dtype == attention.dtype == torch.int64


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(LabError, match="prompt 1 has no token"):
        left_padded([[5], []], pad_id=0)


def test_positions_count_real_tokens() -> None:
    """R5: arange gives the second row's first token position 2; a cumsum alone starts at 1."""
    attention = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 0], [1, 1, 0, 1, 1]])
    got = positions(attention)
    assert got[0].tolist() == [0, 1, 2, 3, 4]
    assert got[1, 2:4].tolist() == [0, 1]
    assert got[2][attention[2].bool()].tolist() == [0, 1, 2, 3]
    assert int(got.min()) == 0  # an embedding has no place -1
