"""Sampled rows as tensors: what a policy samples and scores, what a critic reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Samples:
    """Prompts and their sampled responses: B rows, [prompt | response].

    Attributes:
        prompt_ids: [B,P], padded on the left.
        prompt_mask: [B,P], 1 on real tokens.
        ids: [B,T] responses, padded on the right; a generated end token is part of them.
        mask: [B,T] float, 1 on response tokens.
        logp: [B,T] under the distribution that each token was drawn from, as the sampler had it.
        stop_reason: [B] lab.StopReason.
        kept: [B,T,V] the sampler's support; None where nothing was left out.
        seen: [B,T] 1 on every token that later ones attend to: responses and, between them, what
            the policy did not write (tool output); None: the mask.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    ids: Tensor
    mask: Tensor
    logp: Tensor
    stop_reason: Tensor
    kept: Tensor | None = None
    seen: Tensor | None = None

    @property
    def present(self) -> Tensor:
        """[B,T] 1 on every token of the row, whoever wrote it: the mask may have gaps."""
        return self.mask if self.seen is None else self.seen

    def __len__(self) -> int:
        return self.ids.shape[0]

    def rows(self, index: Tensor) -> Samples:
        """Some of the rows, in that order."""
        out: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        out |= {n: x[index] for n, x in out.items() if x is not None}
        return Samples(**out)

    @staticmethod
    def joined(parts: Sequence[Samples]) -> Samples:
        """Rows of several batches of one budget, one after another; prompts to the widest."""
        width = max(p.prompt_ids.shape[1] for p in parts)
        out: dict[str, Any] = {}
        for f in fields(Samples):
            found = [getattr(p, f.name) for p in parts]
            if f.name in ("prompt_ids", "prompt_mask"):
                found = [nn.functional.pad(x, (width - x.shape[1], 0)) for x in found]
            out[f.name] = None if found[0] is None else torch.cat(found)
        return Samples(**out)


@dataclass(frozen=True)
class Scored:
    """What one forward pass says of the responses.

    Attributes:
        logp: [B,T].
        entropy: [B,T], where asked for.
        values: [B,T+1] of a critic on the same backbone; the last column follows the last token.
    """

    logp: Tensor
    entropy: Tensor | None = None
    values: Tensor | None = None
