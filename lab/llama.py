"""A lean forward pass over the weights of a small Llama model, for scoring and training.

The same function as transformers' forward (to rounding: each run checks it on its first rollout,
which transformers' forward has sampled), with fewer operations: rotation tables once, and in the
last layer only the positions that are read. Measured on two layers of width 64, forward and
backward, back to back in one process: .87 of the time for 16 rows of 13 tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


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


def _layer(layer: Any, x: Tensor, table: tuple[Tensor, Tensor], mask: Tensor, keep: int) -> Tensor:
    a, (rows, length, _) = layer.self_attn, x.shape
    h = _rms(x, layer.input_layernorm)
    read = h[:, length - keep :]

    def heads(y: Tensor) -> Tensor:
        return y.view(rows, y.shape[1], -1, a.head_dim).transpose(1, 2)

    late = (table[0][:, :, length - keep :], table[1][:, :, length - keep :])
    q = _rotated(heads(a.q_proj(read)), late)
    k, v = _rotated(heads(a.k_proj(h)), table), heads(a.v_proj(h))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[..., length - keep :, :])
    x = x[:, length - keep :] + a.o_proj(out.transpose(1, 2).reshape(rows, keep, -1))
    h = _rms(x, layer.post_attention_layernorm)
    mlp = layer.mlp
    down: Tensor = mlp.down_proj(F.silu(mlp.gate_proj(h)) * mlp.up_proj(h))
    return x + down
