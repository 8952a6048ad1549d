"""Models: load, sample, score; the only place for transformers.

Dropout stays off throughout (the model is in eval mode also when it trains): with it the ratio of
a fresh token would not be 1. Weights are float32.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lab import llama, tokens
from lab.errors import LabError, nearest
from lab.samples import Samples, Scored
from lab.text import Characters, Pretrained, Tokenizer, stop_ids
from lab.tokens import Sampling

#: Llama-architecture models with one token a character. Width, layers, heads, feed-forward width.
PRESETS: Mapping[str, tuple[int, int, int, int]] = {
    "nano": (64, 2, 2, 128),
    "tiny": (128, 2, 4, 256),
    "small": (256, 4, 4, 512),
}
#: max |log ratio| of a fresh rollout scored again: the presets', and any other float32 model's.
LIMITS = {"preset": 1e-5, "other": 1e-4}


class Policy:
    """A causal language model with its tokenizer.

    Args:
        model: of transformers, on the CPU in float32.
        tokenizer: what turns prompts into ids.
        preset: whether it is one of the lab's own small models.
    """

    def __init__(self, model: Any, tokenizer: Tokenizer, preset: bool) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.preset = preset
        self.limit = LIMITS["preset" if preset else "other"]

    @property
    def width(self) -> int:
        """The width of the last hidden state."""
        return int(self.model.get_input_embeddings().embedding_dim)

    def copy(self) -> Policy:
        """The same weights once more, without gradient: a reference, or a behaviour policy."""
        twin = copy.copy(self)
        twin.model = copy.deepcopy(self.model).requires_grad_(False).eval()
        return twin

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[str],
        group_size: int,
        budget: int,
        sampling: Sampling,
        generator: torch.Generator,
        stops: Sequence[int] = (),
    ) -> Samples:
        """`group_size` responses to each prompt, at most `budget` tokens each; rows by prompt.

        Each prompt runs through the model once; its cache is repeated for the responses.
        """
        encoded = [self.tokenizer.encode(p) for p in prompts]
        prompt_ids, prompt_mask = tokens.left_padded(encoded, self.tokenizer.pad_id)
        decoder = self._decoder(prompt_ids, prompt_mask, group_size)
        prompt_ids = prompt_ids.repeat_interleave(group_size, 0)
        prompt_mask = prompt_mask.repeat_interleave(group_size, 0)
        length = prompt_mask.sum(1, keepdim=True)
        closing = torch.tensor([*self.tokenizer.eos_ids, *stops])
        finished = torch.zeros_like(prompt_mask[:, :1], dtype=torch.bool)
        ids, logps, kept = [], [], []
        for t in range(budget):
            logits = decoder.logits
            support = tokens.support(logits, sampling) if sampling.truncates else None
            every = tokens.log_probs(logits, sampling.temperature, support)
            chosen = torch.multinomial(every.exp(), 1, generator=generator)
            ids.append(chosen)
            logps.append(every.gather(1, chosen))
            kept.append(support)
            finished |= torch.isin(chosen, closing)
            if t + 1 == budget or bool(finished.all()):
                break
            decoder.feed(chosen, length + t)
        drawn = tokens.ends(torch.cat(ids, 1), self.tokenizer.eos_ids, stops)
        return self._samples((prompt_ids, prompt_mask), (ids, logps, kept), drawn, budget)

    def _decoder(self, ids: Tensor, mask: Tensor, group_size: int) -> llama.Decoder | _Cached:
        if self.preset:
            head = self.model.get_output_embeddings()
            return llama.Decoder(self.model.base_model, head, ids, mask, group_size)
        return _Cached(self, ids, mask, group_size)

    def _samples(
        self,
        prompt: tuple[Tensor, Tensor],
        drawn: tuple[list[Tensor], list[Tensor], list[Tensor | None]],
        ended: tuple[Tensor, Tensor],
        budget: int,
    ) -> Samples:
        """Padded to the budget, so that every rollout of a run has one width."""
        ids, logps, kept = drawn
        mask, reason = ended
        missing = budget - len(ids)
        wide = nn.functional.pad
        on = wide(mask, (0, missing))
        made = wide(torch.cat(ids, 1), (0, missing), value=self.tokenizer.pad_id)
        logp = wide(torch.cat(logps, 1), (0, missing))
        supports = None
        if kept[0] is not None:
            supports = wide(torch.stack([k for k in kept if k is not None], 1), (0, 0, 0, missing))
        return Samples(
            prompt_ids=prompt[0],
            prompt_mask=prompt[1],
            ids=made.masked_fill(~on.bool(), self.tokenizer.pad_id),
            mask=on,
            logp=torch.where(on.bool(), logp, torch.zeros_like(logp)),
            stop_reason=reason,
            kept=supports,
        )

    def given(
        self, prompts: Sequence[str], responses: Sequence[str], budget: int, stops: str = ""
    ) -> Samples:
        """Rows of given responses, each closed by the end token unless it ends on a stop.

        Raises:
            LabError: for a response that does not fit the budget with its end token.
        """
        rows = []
        for text in responses:
            row = self.tokenizer.encode(text)
            if not (text and text[-1] in stops):
                row.append(self.tokenizer.eos_ids[0])
            if len(row) > budget:
                raise LabError(f"{text!r} takes {len(row)} tokens; the budget is {budget}")
            rows.append(row)
        prompt_ids, prompt_mask = tokens.left_padded(
            [self.tokenizer.encode(p) for p in prompts], self.tokenizer.pad_id
        )
        pad = self.tokenizer.pad_id
        ids = torch.tensor([row + [pad] * (budget - len(row)) for row in rows])
        lengths = torch.tensor([len(row) for row in rows])
        mask = (torch.arange(budget) < lengths[:, None]).float()
        _, reason = tokens.ends(ids, self.tokenizer.eos_ids, self.stop_ids(stops))
        return Samples(prompt_ids, prompt_mask, ids, mask, torch.zeros_like(mask), reason)

    def stop_ids(self, stops: str) -> tuple[int, ...]:
        """The ids of a task's stop characters."""
        return stop_ids(self.tokenizer, stops)

    def texts(self, samples: Samples) -> list[str]:
        """Each response as text, up to its end: what a verifier reads."""
        eos = self.tokenizer.eos_ids
        rows = [ids[on] for ids, on in zip(samples.ids, samples.present.bool(), strict=True)]
        return [self.tokenizer.decode([i for i in ids.tolist() if i not in eos]) for ids in rows]

    def score(
        self,
        samples: Samples,
        temperature: float,
        entropy: bool = False,
        head: nn.Module | None = None,
    ) -> Scored:
        """The responses' log-probabilities under the sampler's settings, with gradient.

        Args:
            samples: their support is used again.
            temperature: the sampler's.
            entropy: whether to compute it.
            head: of a critic that shares this backbone.
        """
        # position t - 1 predicts token t: from the prompt's last position on, without the last one,
        # after which only a critic has something to say
        logits, states = self._read(samples, samples.ids.shape[1], head is not None)
        values = None if head is None else head(states).squeeze(-1)
        return Scored(
            tokens.token_logp(logits, samples.ids, samples.mask, temperature, samples.kept),
            tokens.entropy(logits, samples.mask, temperature) if entropy else None,
            values,
        )

    def _read(self, samples: Samples, budget: int, states: bool) -> tuple[Tensor, Tensor | None]:
        """Logits [B,T,V] of the responses and, where asked for, hidden states [B,T+1,width]."""
        if self.preset:
            found = _hidden(self.model.base_model, samples, after=states)
            return self.model.get_output_embeddings()(found[:, :budget]), found if states else None
        attention, ids, place = _sequence(samples)
        out = self._forward(
            ids,
            attention,
            place,
            use_cache=False,
            logits_to_keep=budget + 1,
            output_hidden_states=states,
        )
        return out.logits[:, :-1], out.hidden_states[-1][:, -budget - 1 :] if states else None

    def causes(self) -> list[str]:
        """What of this model is known to spoil the re-scoring of its own rollout."""
        off = []
        if self.model.training:
            off.append("dropout on (model.training is True)")
        if self.model.dtype != torch.float32:
            off.append(f"precision ({self.model.dtype})")
        return off

    def _forward(
        self, ids: Tensor, attention: Tensor, place: Tensor | None = None, **options: Any
    ) -> Any:
        place = tokens.positions(attention) if place is None else place
        return self.model(input_ids=ids, attention_mask=attention, position_ids=place, **options)


class _Cached:
    """`llama.Decoder` for any model of transformers, by its own cache."""

    def __init__(self, policy: Policy, ids: Tensor, attention: Tensor, group_size: int) -> None:
        self._policy = policy
        out = policy._forward(ids, attention, use_cache=True, logits_to_keep=1)
        self.logits = out.logits[:, -1].repeat_interleave(group_size, 0)
        out.cache.batch_repeat_interleave(group_size)
        self._cache = out.cache
        self._attention = attention.repeat_interleave(group_size, 0)

    def feed(self, ids: Tensor, place: Tensor) -> None:
        """Append a token [B,1] at its position to each row; `logits` are those after it."""
        self._attention = torch.cat([self._attention, torch.ones_like(ids)], 1)
        options = {"use_cache": True, "cache": self._cache}
        self.logits = self._policy._forward(ids, self._attention, place, **options).logits[:, -1]


def _sequence(samples: Samples) -> tuple[Tensor, Tensor, Tensor]:
    """Attention mask, ids and positions of [prompt | response]."""
    attention = torch.cat([samples.prompt_mask, samples.present.long()], 1)
    return attention, torch.cat([samples.prompt_ids, samples.ids], 1), tokens.positions(attention)


def _hidden(backbone: Any, samples: Samples, after: bool) -> Tensor:
    """A preset's hidden states before each response token, and after the last one where asked."""
    attention, ids, place = _sequence(samples)
    budget = samples.ids.shape[1]
    end = ids.shape[1] - (not after)
    keep = budget + after
    return llama.hidden(backbone, ids[:, :end], attention[:, :end], place[:, :end], keep)


class Critic(nn.Module):
    """Values from a backbone of its own and a head that starts at 0.

    Args:
        policy: whose starting backbone it copies; None of it is shared.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.backbone = copy.deepcopy(policy.model.base_model).requires_grad_(True).eval()
        self.head = value_head(policy)
        self.preset = policy.preset

    def forward(self, samples: Samples) -> Tensor:
        """[B,T+1]: the value before each response token, and after the last."""
        if self.preset:
            states = _hidden(self.backbone, samples, after=True)
        else:
            attention, ids, place = _sequence(samples)
            out = self.backbone(
                input_ids=ids, attention_mask=attention, position_ids=place, use_cache=False
            )
            states = out.last_hidden_state[:, -samples.ids.shape[1] - 1 :]
        values: Tensor = self.head(states)
        return values.squeeze(-1)


def value_head(policy: Policy) -> nn.Linear:
    """A head that says 0 everywhere: an untrained critic then adds nothing to an advantage."""
    with torch.random.fork_rng(devices=[]):  # making a layer draws from the global generator
        head = nn.Linear(policy.width, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def build(name: str, characters: str, seed: int) -> Policy:
    """A policy by name: a preset with fresh weights, or a model from a directory or hub id.

    Args:
        name: nano, tiny, small; a local directory; or a hub id.
        characters: every character of the task.
        seed: for the weights of a preset; the global generator is left as it was.

    Raises:
        LabError: for a name that is nothing of these, and a vocabulary that misses a character.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is fetched unless the person says so
    if name in PRESETS:
        return _preset(name, characters, seed)
    policy = _pretrained(name)
    for c in dict.fromkeys(characters):
        if c not in policy.tokenizer.decode(policy.tokenizer.encode(c)):
            raise LabError(f"model {name}: its vocabulary has no token for {c!r}")
    return policy


def _preset(name: str, characters: str, seed: int) -> Policy:
    from transformers import AutoModelForCausalLM, LlamaConfig

    tokenizer = Characters(characters)
    width, layers, heads, inner = PRESETS[name]
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=512,
        attention_dropout=0.0,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_ids[0],
        pad_token_id=tokenizer.pad_id,
    )
    made: Any = AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = made.from_config(config, dtype=torch.float32)
    return Policy(model, tokenizer, preset=True)


def _pretrained(name: str) -> Policy:
    # asked here too: something else may have imported the hub's library, which reads it then
    offline = os.environ["HF_HUB_OFFLINE"].lower() in ("1", "on", "yes", "true")
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    if not Path(name).is_dir() and ("/" not in name or name.startswith((".", "/", "~"))):
        raise LabError(
            f"no model {name!r}.{nearest(name, PRESETS)} It is {', '.join(PRESETS)}, "
            "a directory, or a hub id (OWNER/NAME)"
        )
    quiet: Any = logging
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    loader: Any = AutoModelForCausalLM
    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": offline}
    whole = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # what is off, by name
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")  # of the loader, about what is not ours to change
            model, read = loader.from_pretrained(
                name, use_safetensors=True, dtype=torch.float32, **whole, **options
            )
            tokenizer = AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ValueError, KeyError, SafetensorError) as e:
        raise LabError(f"model {name}: {' '.join(str(e).split())[:300]}") from None
    if off := sorted([*read["missing_keys"], *(key for key, *_ in read["mismatched_keys"])]):
        raise LabError(f"model {name}: its weights do not fit its config: {', '.join(off[:3])}")
    ends = model.generation_config.eos_token_id
    ids = [] if ends is None else ends if isinstance(ends, list) else [ends]
    text = Pretrained(tokenizer, ids, name)
    if text.pad_id >= model.get_input_embeddings().num_embeddings:
        text.pad_id = text.eos_ids[0]  # a padding token that the model was never given
    return Policy(model, text, preset=False)
