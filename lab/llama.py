"""A lean forward pass over the weights of a small Llama model: scoring, training, sampling.

The same function as transformers' forward, to rounding, with fewer operations: rotation tables
once, in the last layer only the positions that are read, a cache that is a list. Measured on two
layers of width 64, back to back in one process: forward and backward of 16 rows of 13 tokens take
.87 of the time, sampling 6 x 8 answers of 7 tokens .71.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.tokens import positions


def _rms(x: Tensor, norm: Any) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)


def hidden(backbone: Any, ids: Tensor, attention: Tensor, place: Tensor, keep: int) -> Tensor:
    """The last hidden states [B,keep,width] of the last `keep` positions.

    Args:
        backbone: a LlamaModel without attention bias, one key head per query head.
        ids: [B,L].
        attention: [B,L], 1 on real tokens: padding on the left is never attended to. On the right
            no real token can see it.
        place: [B,L] positions.
        keep: how many positions are read.
    """
    x = backbone.embed_tokens(ids)  # its padding row is held at 0, where the norm is steep
    cos, sin = _rotation(backbone.rotary_emb.inv_freq, place, x.dtype)
    mask = _mask(attention, x.dtype)
    for layer in backbone.layers[:-1]:
        x = _layer(layer, x, (cos, sin), mask, ids.shape[1])
    x = _layer(backbone.layers[-1], x, (cos, sin), mask, keep)
    return _rms(x, backbone.norm)


def _rotation(frequency: Tensor, place: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and signed sin [B,1,L,D]: rotating is then u cos + swap(u) sin, without a negation."""
    angle = place[:, None, :, None].to(frequency.dtype) * frequency
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def _rotated(u: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    half = u.shape[-1] // 2
    swapped = torch.cat((u[..., half:], u[..., :half]), -1)
    return torch.addcmul(u * table[0], swapped, table[1])


def _mask(attention: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to the attention's logits: [L,L], or [B,1,L,L] where there is padding."""
    length = attention.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    first = attention.argmax(1)  # the first real token: padding stands on the left of it
    if bool((first > 0).any()):
        real = torch.arange(length) >= first[:, None]
        # a padding position sees itself: over nothing at all the softmax would be NaN
        causal = (causal & real[:, None, :]) | torch.eye(length, dtype=torch.bool)
        causal = causal[:, None]
    return torch.zeros(causal.shape, dtype=dtype).masked_fill(~causal, -torch.inf)


class Decoder:
    """Sampling with a cache of keys and values: each prompt computed once, repeated for its rows.

    Args:
        backbone: as in `hidden`.
        head: from hidden states to logits.
        ids: [N,P] prompts, padded on the left.
        attention: [N,P].
        group_size: rows a prompt.

    Attributes:
        logits: [N * group_size, V] of the next token.
    """

    def __init__(
        self, backbone: Any, head: Any, ids: Tensor, attention: Tensor, group_size: int
    ) -> None:
        self._backbone, self._head = backbone, head
        place = positions(attention)
        x = backbone.embed_tokens(ids)
        table, mask = self._table(place, x), _mask(attention, x.dtype)
        self._past: list[list[Tensor]] = [[] for _ in backbone.layers]
        for layer, past in zip(backbone.layers, self._past, strict=True):
            x = _layer(layer, x, table, mask, ids.shape[1], past)
        first = head(_rms(x[:, -1], backbone.norm))
        self.logits: Tensor = first.repeat_interleave(group_size, 0)
        for past in self._past:
            past[:] = [y.repeat_interleave(group_size, 0) for y in past]
        # with no padding anywhere there is nothing to hide from a new token
        hidden_keys = torch.zeros(attention.shape, dtype=x.dtype).masked_fill(
            attention == 0, -torch.inf
        )
        padded = bool((attention == 0).any())
        self._hidden = hidden_keys.repeat_interleave(group_size, 0) if padded else None

    def feed(self, ids: Tensor, place: Tensor) -> None:
        """Append a token [B,1] at its position [B,1] to each row; `logits` are those after it."""
        x = self._backbone.embed_tokens(ids)
        table = self._table(place, x)
        mask = None
        if self._hidden is not None:
            self._hidden = F.pad(self._hidden, (0, 1))
            mask = self._hidden[:, None, None]
        for layer, past in zip(self._backbone.layers, self._past, strict=True):
            x = _layer(layer, x, table, mask, 1, past)
        self.logits = self._head(_rms(x[:, -1], self._backbone.norm))

    def _table(self, place: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return _rotation(self._backbone.rotary_emb.inv_freq, place, x.dtype)


def _layer(
    layer: Any,
    x: Tensor,
    table: tuple[Tensor, Tensor],
    mask: Tensor | None,
    keep: int,
    past: list[Tensor] | None = None,
) -> Tensor:
    """One layer; keys and values of earlier tokens stand in `past`, and the new ones are added."""
    a, (rows, length, _) = layer.self_attn, x.shape
    h = _rms(x, layer.input_layernorm)
    read = h[:, length - keep :]

    def heads(y: Tensor) -> Tensor:
        return y.view(rows, y.shape[1], -1, a.head_dim).transpose(1, 2)

    late = (table[0][:, :, length - keep :], table[1][:, :, length - keep :])
    q = _rotated(heads(a.q_proj(read)), late)
    k, v = _rotated(heads(a.k_proj(h)), table), heads(a.v_proj(h))
    if past is not None:
        if past:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        past[:] = [k, v]
    seen = None if mask is None else mask[..., length - keep :, :]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    x = x[:, length - keep :] + a.o_proj(out.transpose(1, 2).reshape(rows, keep, -1))
    h = _rms(x, layer.post_attention_layernorm)
    mlp = layer.mlp
    down: Tensor = mlp.down_proj(F.silu(mlp.gate_proj(h)) * mlp.up_proj(h))
    return x + down
