"""Log-probabilities, masks, alignment: tensors in, tensors out.

A batch of rows is ``[prompt | response]``: prompts padded on the left to P, responses on the right
to T. Logits at position t - 1 predict the token at t, so a response's logits are those from P - 1
to P + T - 2. What a token's log-probability means is settled here, once, for sampler, old, current
and reference alike: the log-softmax of logits / temperature over the support that the sampler drew
from, in float32 or wider.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lab.errors import LabError
from lab.hookspecs import StopReason


@dataclass(frozen=True)
class Sampling:
    """What a token is drawn from.

    Attributes:
        temperature: divides the logits.
        top_k: the most likely tokens that stay; 0: all.
        top_p: the smallest set of most likely tokens whose mass reaches it stays; 1: all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def truncates(self) -> bool:
        """Whether tokens are left out, so that the support has to be stored."""
        return self.top_k > 0 or self.top_p < 1


def tempered(logits: Tensor, temperature: float) -> Tensor:
    """Logits divided by the temperature, in float32 or wider."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide if temperature == 1.0 else wide / temperature


def support(logits: Tensor, sampling: Sampling) -> Tensor:
    """The tokens that may be drawn: bool, as logits [..., V]; always the most likely one.

    Ties at the k-th place all stay. top-p counts the mass under top-k, renormalised.
    """
    logits = tempered(logits, sampling.temperature)
    keep = torch.ones_like(logits, dtype=torch.bool)
    if 0 < sampling.top_k < logits.shape[-1]:
        keep = logits >= logits.topk(sampling.top_k, dim=-1).values[..., -1:]
    if sampling.top_p < 1:
        p = logits.masked_fill(~keep, -torch.inf).softmax(-1)
        ordered, order = p.sort(dim=-1, descending=True, stable=True)
        # a token stays while the mass before it is short of top_p: the one that reaches it is in
        stays = ordered.cumsum(-1) - ordered < sampling.top_p
        keep &= torch.zeros_like(keep).scatter(-1, order, stays)
    return keep


def log_probs(logits: Tensor, temperature: float, kept: Tensor | None = None) -> Tensor:
    """The log-probabilities [..., V] that tokens are sampled under; -inf off the support."""
    logits = tempered(logits, temperature)
    if kept is not None:
        logits = logits.masked_fill(~kept, -torch.inf)
    return logits.log_softmax(-1)


def token_logp(
    logits: Tensor, ids: Tensor, mask: Tensor, temperature: float, kept: Tensor | None = None
) -> Tensor:
    """The log-probability of each response token [B,T] under the sampling distribution.

    Args:
        logits: [B,T,V], those that predict the response's tokens.
        ids: [B,T].
        mask: [B,T]; off it the result is 0.
        temperature: divides the logits.
        kept: [B,T,V], the sampler's support; None: all tokens.

    Raises:
        LabError: for a token outside the support: the sampler cannot have drawn it.
    """
    on = mask.bool()
    if kept is not None:
        inside = kept.gather(-1, ids[..., None]).squeeze(-1)
        if not bool((inside | ~on).all()):
            row, t = (on & ~inside).nonzero()[0].tolist()
            raise LabError(
                f"row {row}, token {t}: id {int(ids[row, t])} lies outside the stored support; "
                "the sampler cannot have drawn it"
            )
        kept = kept | ~on[..., None]  # rows of padding keep finite numbers
    every = log_probs(logits, temperature, kept)
    chosen = every.gather(-1, ids[..., None]).squeeze(-1)
    return torch.where(on, chosen, torch.zeros_like(chosen))


def entropy(logits: Tensor, mask: Tensor, temperature: float) -> Tensor:
    """The entropy in nats of each response position [B,T], over the whole vocabulary.

    Of the tempered distribution, without top-k and top-p: how undecided the policy is.
    """
    logp = log_probs(logits, temperature)
    h = -(logp.exp() * logp).sum(-1)
    return torch.where(mask.bool(), h, torch.zeros_like(h))


def ends(
    ids: Tensor, eos_ids: Sequence[int], stop_ids: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """Where each response ends, and why: mask [B,T] in float32, stop reason [B].

    The first end token closes a row and belongs to it: stopping is an action. A row without one
    was cut at the limit. Told by the position of that token, never by ``ids != pad``, since
    padding and end may share an id.
    """
    eos = _is_in(ids, eos_ids)
    end = eos | _is_in(ids, stop_ids)
    before = end.cumsum(1) - end.long()  # end tokens strictly before this one
    mask = (before == 0).float()
    first = end.long().argmax(1, keepdim=True)
    by_eos = eos.gather(1, first).squeeze(1)
    reason = torch.where(by_eos, int(StopReason.EOS), int(StopReason.STOP))
    return mask, torch.where(end.any(1), reason, int(StopReason.LENGTH))


def _is_in(ids: Tensor, wanted: Sequence[int]) -> Tensor:
    return torch.isin(ids, torch.tensor(list(wanted), dtype=ids.dtype))


def left_padded(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Prompts as ids and attention mask, both [B,P] int64, padded on the left.

    Raises:
        LabError: for an empty prompt: there is no position that predicts the first token.
    """
    empty = next((i for i, row in enumerate(rows) if not row), None)
    if empty is not None:
        raise LabError(f"prompt {empty} has no token; at least one is needed to predict the first")
    width = max(len(row) for row in rows)
    ids = torch.tensor([[pad_id] * (width - len(row)) + list(row) for row in rows])
    attention = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, attention


def positions(attention: Tensor) -> Tensor:
    """The position of each token among the real ones: padding on the left does not count."""
    return (attention.long().cumsum(1) - 1).clamp(min=0)


def check_rescored(
    sampled: Tensor, rescored: Tensor, mask: Tensor, limit: float, causes: Sequence[str] = ()
) -> float:
    """The largest |log ratio| of a fresh rollout scored again, if it is below the limit.

    Before the first update the policy that sampled and the policy that trains are one, so the
    ratio of every token is 1 but for rounding. Tokens are compared one by one: under a wrong
    temperature the mean ratio is still 1.

    Args:
        sampled: the sampler's log-probabilities [B,T].
        rescored: those of the training forward.
        mask: [B,T].
        limit: 1e-5 for the float32 presets, 1e-4 for other float32 models.
        causes: what is known to be off, likeliest first.

    Raises:
        LabError: if it is not; it names the likely cause.
    """
    on = mask.bool()
    difference = torch.where(on, (rescored - sampled).abs(), torch.zeros_like(sampled))
    worst = float(difference.max()) if difference.numel() else 0.0
    if worst < limit:  # false for NaN, which is refused too
        return worst
    likely = causes or _causes(sampled[on], rescored[on])
    raise LabError(
        f"re-scored rollout differs: max |log ratio| {worst:.2g} > {limit:g}. "
        f"Likely: {'; '.join(likely)}"
    )


def _causes(sampled: Tensor, rescored: Tensor) -> list[str]:
    """What the pattern of the differences points at."""
    ratio = rescored - sampled
    if bool((ratio <= 1e-6).all()):  # the log of the mass that was kept
        return ["the support (top-k, top-p) of the sampler is not applied when scoring"]
    return [
        "a temperature applied on one side only",
        "padding, or position ids that are not passed",
        "another precision",
        "an alignment off by one",
    ]
