"""Small models for tests: presets that have opinions, a GPT-2 in a folder, scores by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab.policy import Policy, Samples, build
from lab.tokens import Sampling

DIGITS = "0123456789>"
#: What a folder's vocabulary holds before its characters.
SPECIAL = ("<end>", "<unk>", "<also>")


def sharp(policy: Policy, factor: float = 8.0) -> Policy:
    """Fresh weights are so small that nothing depends on the context: these are larger."""
    with torch.no_grad():
        for p in policy.model.parameters():
            if p.dim() > 1:
                p.mul_(factor)
    return policy


def nano(characters: str = DIGITS, seed: int = 0) -> Policy:
    """The preset with rotary positions."""
    return sharp(build("nano", characters, seed))


def sampler(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokenizer(characters: str = DIGITS, **special: Any) -> Any:
    """One token a character, of the `tokenizers` library."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {c: i for i, c in enumerate([*SPECIAL, *characters])}
    made: Any = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    named = {"eos_token": "<end>", "unk_token": "<unk>", **special}
    return PreTrainedTokenizerFast(tokenizer_object=made, **named)


def gpt2_folder(folder: Path, characters: str = DIGITS, dropout: float = 0.0) -> Path:
    """A GPT-2 with learned absolute positions, saved as transformers saves models."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=len(SPECIAL) + len(characters),
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=2,
        initializer_range=0.3,
        attn_pdrop=dropout,
        embd_pdrop=dropout,
        resid_pdrop=dropout,
        bos_token_id=None,
        eos_token_id=0,
    )
    torch.manual_seed(1)
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer(characters).save_pretrained(folder)
    return folder


def edit(file: Path, **changes: Any) -> None:
    """Some keys of a JSON file, changed."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def rollout(policy: Policy, sampling: Sampling, seed: int = 0, budget: int = 6) -> Samples:
    """Prompts of 3, 6 and 10 tokens, so left-padded by 7, 4 and 0; four responses to each."""
    prompts = ["12>", "31415>", "271828182>"]
    return policy.sample(prompts, 4, budget, sampling, sampler(seed))


def prefix_logits(model: Any, samples: Samples) -> Iterator[tuple[int, int, Tensor]]:
    """Row, place and logits of each response token: its prefix alone through the raw model.

    No batch, no padding, no cache, no position ids, the logits of the last position only.
    """
    for row, t in samples.mask.nonzero().tolist():
        prompt = samples.prompt_ids[row][samples.prompt_mask[row].bool()]
        before = samples.ids[row, :t][samples.present[row, :t].bool()]
        with torch.no_grad():
            yield row, t, model(input_ids=torch.cat([prompt, before])[None]).logits[0, -1].double()


def row_logits(model: Any, samples: Samples) -> Iterator[tuple[int, int, Tensor]]:
    """The same, a whole row at once: a sixth of the time. `test_policy` holds the two together."""
    for row in range(len(samples)):
        prompt = samples.prompt_ids[row][samples.prompt_mask[row].bool()]
        with torch.no_grad():
            logits = model(input_ids=torch.cat([prompt, samples.ids[row]])[None]).logits[0]
        for t in samples.mask[row].nonzero().squeeze(1).tolist():
            yield row, t, logits[len(prompt) - 1 + t].double()


def by_hand(
    model: Any, samples: Samples, temperature: float = 1.0, logits_of: Any = row_logits
) -> Tensor:
    """The log-probability of each response token, the log-softmax written out in float64."""
    out = torch.zeros_like(samples.logp, dtype=torch.float64)
    for row, t, logits in logits_of(model, samples):
        weight = (logits / temperature).exp()
        if samples.kept is not None:
            weight = weight * samples.kept[row, t]
        out[row, t] = (weight[samples.ids[row, t]] / weight.sum()).log()
    return out


def worst(a: Tensor, b: Tensor) -> float:
    """The largest difference."""
    return float((a.double() - b.double()).abs().max().detach())


def absolute(folder: Path, dropout: float = 0.0) -> Policy:
    """The GPT-2 of a folder, loaded as a user would."""
    return build(str(gpt2_folder(folder, dropout=dropout)), DIGITS, 0)
