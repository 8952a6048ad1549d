"""lab.policy.build: presets, models from a directory, and what is refused."""

from __future__ import annotations

import math
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import DIGITS, SPECIAL, absolute, edit, gpt2_folder, rollout, sampler, tokenizer
from torch import nn

from lab.errors import LabError
from lab.hookspecs import StopReason
from lab.policy import PRESETS, Policy, build
from lab.tokens import Sampling, check_rescored


@pytest.fixture(scope="module")
def saved(tmp_path_factory: Any) -> Path:
    return gpt2_folder(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """One to be spoilt."""
    return Path(shutil.copytree(saved, tmp_path / "mine"))


def weights(policy: Policy) -> dict[str, torch.Tensor]:
    return dict(policy.model.state_dict())


def same(a: Policy, b: Policy) -> bool:
    return all(torch.equal(x, weights(b)[n]) for n, x in weights(a).items())


def refusal(model: Path | str, characters: str = DIGITS) -> str:
    """What the one line of the error says."""
    with pytest.raises(LabError) as e:
        build(str(model), characters, 0)
    assert "\n" not in str(e.value)
    return str(e.value)


# presets


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_parameters_that_they_say(name: str) -> None:
    """Untied embedding and head V d each; a layer 4 d^2 + 3 d f + 2 d; the last norm d.

    nano with 11 characters: V 13, d 64, f 128, 2 layers:
    2 * 832 + 2 * (16384 + 24576 + 128) + 64 = 83904.
    """
    d, layers, _, f = PRESETS[name]
    policy = build(name, DIGITS, 0)
    count = sum(p.numel() for p in policy.model.parameters())
    assert count == 2 * 13 * d + layers * (4 * d * d + 3 * d * f + 2 * d) + d
    assert name != "nano" or count == 83904
    assert policy.width == d


def test_a_preset_is_plain() -> None:
    """float32 throughout, no dropout anywhere, off when training too, and the tight limit."""
    policy = build("nano", DIGITS, 0)
    assert {p.dtype for p in policy.model.parameters()} == {torch.float32}
    assert not policy.model.training
    assert policy.model.config.attention_dropout == 0
    assert [m.p for m in policy.model.modules() if isinstance(m, nn.Dropout) and m.p > 0] == []
    assert policy.limit == 1e-5
    assert policy.model.config.vocab_size == len(DIGITS) + 2
    assert (policy.tokenizer.eos_ids, policy.tokenizer.pad_id) == ((0,), 1)
    assert policy.causes() == []


def test_fresh_weights_are_nearly_uniform() -> None:
    """An initial policy that has made up its mind never explores: entropy near log 13."""
    policy = build("nano", DIGITS, 0)
    h = policy.score(rollout(policy, Sampling()), 1.0, entropy=True).entropy
    assert h is not None
    assert float(h[:, 0].detach().min()) > 0.98 * math.log(13)


def test_one_seed_one_set_of_weights_in_spite_of_the_global_generator() -> None:
    """E1: arms whose weights were made before the seeding differ before any training."""
    torch.manual_seed(5)
    first = build("nano", DIGITS, 3)
    torch.manual_seed(6)
    torch.rand(7)
    before = torch.get_rng_state()
    assert same(build("nano", DIGITS, 3), first)
    assert torch.equal(torch.get_rng_state(), before)
    assert not same(build("nano", DIGITS, 4), first)
    assert same(build("nano", DIGITS, 2**62 + 1), build("nano", DIGITS, 2**62 + 1))


# a directory


def test_a_saved_model_comes_back(saved: Path) -> None:
    """In float32 and eval mode, with its own tokenizer, the weights as saved, any seed."""
    from transformers import AutoModelForCausalLM

    before = torch.get_rng_state()
    policy = build(str(saved), DIGITS, 0)
    assert torch.equal(torch.get_rng_state(), before)
    there = AutoModelForCausalLM.from_pretrained(saved).state_dict()
    assert all(torch.equal(x, there[n]) for n, x in weights(policy).items())
    assert same(build(str(saved), DIGITS, 1), policy)
    assert policy.limit == 1e-4
    assert policy.tokenizer.encode("0>") == [len(SPECIAL), len(SPECIAL) + 10]
    assert policy.width == 32


def test_half_precision_weights_are_widened(saved: Path, tmp_path: Path) -> None:
    """N25: a model saved in bfloat16 would sample and score in it, and ratios stray by percents."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    narrow: Any = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.bfloat16)
    narrow.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(saved).save_pretrained(tmp_path)
    policy = build(str(tmp_path), DIGITS, 0)
    assert {p.dtype for p in policy.model.parameters()} == {torch.float32}
    policy.model.bfloat16()
    assert policy.causes() == ["precision (torch.bfloat16)"]


# dropout


def rescored(policy: Policy) -> float:
    samples = rollout(policy, Sampling(0.6, top_k=3))
    again = policy.score(samples, 0.6).logp.detach()
    return check_rescored(samples.logp, again, samples.mask, policy.limit, policy.causes())


def test_dropout_is_off_for_sampler_and_scorer(tmp_path: Path) -> None:
    """N4, R2: a configuration with dropout .1; the ratio of a fresh token is 1 all the same."""
    policy = absolute(tmp_path, dropout=0.1)
    assert policy.model.config.attn_pdrop == 0.1
    assert {m.p for m in policy.model.modules() if isinstance(m, nn.Dropout)} == {0.1}
    assert not policy.model.training
    assert rescored(policy) < 1e-5
    loud = Policy(policy.model.train(), policy.tokenizer, preset=False)
    assert not loud.model.training
    assert not policy.copy().model.training


def test_dropout_switched_on_is_refused_by_name(tmp_path: Path) -> None:
    """R2: clipping at step 0 and a KL in the thousands, and nobody knows why."""
    policy = absolute(tmp_path, dropout=0.1)
    policy.model.train()
    with pytest.raises(LabError, match=r"Likely: dropout on \(model.training is True\)$"):
        rescored(policy)


# ends


@pytest.mark.parametrize("ends", [[0, 2], [2]])
def test_every_end_of_the_generation_config_ends_a_row(folder: Path, ends: list[int]) -> None:
    """M2: honouring one of several calls 97 % of the answers truncated; the tokenizer's is 0."""
    edit(folder / "generation_config.json", eos_token_id=ends)
    policy = build(str(folder), DIGITS, 0)
    assert policy.tokenizer.eos_ids == (0, 2)
    samples = policy.sample(["12>"], 200, 8, Sampling(1.7), sampler())
    last = samples.mask.sum(1).long() - 1
    final = samples.ids.gather(1, last[:, None]).squeeze(1)
    ended = samples.stop_reason == int(StopReason.EOS)
    assert bool((torch.isin(final, torch.tensor([0, 2])) == ended).all())
    assert {0, 2} <= set(final.tolist())
    inside = samples.ids[torch.arange(8) < last[:, None]]
    assert not {0, 2} & set(inside.tolist())
    assert all("<end>" not in text for text in policy.texts(samples))
    assert policy.given([">"], ["1"], budget=3).ids[0].tolist() == [len(SPECIAL) + 1, 0, 0]


def test_a_padding_token_that_the_model_was_never_given(folder: Path) -> None:
    """An id behind the last row of the embedding: an IndexError at the first padded prompt."""
    tokenizer(pad_token="<padding>").save_pretrained(folder)
    policy = build(str(folder), DIGITS, 0)
    assert policy.tokenizer.pad_id == 0
    assert rescored(policy) < 1e-5


# refused


@pytest.mark.parametrize(
    ("name", "hint"),
    [("nanno", " Did you mean 'nano'?"), ("Tiny", " Did you mean 'tiny'?"), ("qwen", "")],
)
def test_an_unknown_name(name: str, hint: str) -> None:
    assert refusal(name) == (
        f"no model {name!r}.{hint} It is nano, tiny, small, a directory, or a hub id (OWNER/NAME)"
    )


@pytest.mark.parametrize("name", ["./nowhere", "/no/where", "~/nowhere"])
def test_a_path_that_is_not_there_is_no_hub_id(name: str) -> None:
    assert refusal(name).startswith(f"no model {name!r}")


def test_nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the hub's library was imported before, and read its switch when it was off.

    The variable alone is then too late: five attempts on the network, and 20 seconds.
    """
    asked: list[Any] = []

    def no_network(*host: Any, **_: Any) -> Any:
        asked.append(host)
        raise OSError("no network")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    # beside the file that is asked for, the library asks for a list of its own
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setattr("time.sleep", lambda _: None)
    assert refusal("nobody/nothing").startswith("model nobody/nothing: ")
    assert asked == []


@pytest.mark.slow
def test_a_preset_first_does_not_open_the_network() -> None:
    """In a process of its own, where nothing but the lab imports the hub's library."""
    code = """
import socket
from lab.errors import LabError
from lab.policy import build

def no_network(*host, **_):
    print("asked", host)
    raise OSError("no network")

socket.getaddrinfo = no_network
build("nano", "ab", 0)
try:
    build("nobody/nothing", "ab", 0)
except LabError as e:
    print("refused")
"""
    env = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    assert done.stdout == "refused\n"


def test_an_empty_directory_is_no_model(tmp_path: Path) -> None:
    assert refusal(tmp_path).startswith(f"model {tmp_path}: ")


def gone(file: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).unlink()


def torn(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def pickled(folder: Path) -> None:
    from safetensors.torch import load_file

    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def changed(**keys: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "config.json", **keys)


def without_end(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", eos_token=None)
    edit(folder / "config.json", eos_token_id=None)
    (folder / "generation_config.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (gone("config.json"), "model_type"),
        (gone("model.safetensors"), "no file named model.safetensors"),
        (pickled, "no file named model.safetensors"),  # a pickle runs code when it is read
        (torn, "incomplete metadata"),
        (changed(model_type="gtp2"), "gtp2"),
        (
            changed(model_type="x", auto_map={"AutoConfig": "x.C", "AutoModelForCausalLM": "x.M"}),
            "custom code",  # which is not run
        ),
        # what the file does not hold would be random, another each time
        (changed(n_layer=3), "its weights do not fit its config: transformer.h.2"),
        (changed(vocab_size=20), "its weights do not fit its config: transformer.wte.weight"),
        (without_end, "neither its tokenizer nor its config has an end token"),
    ],
    ids=["config", "weights", "pickle", "torn", "type", "code", "layers", "shape", "end"],
)
def test_a_spoilt_directory_is_refused_in_one_line(
    folder: Path, spoil: Callable[[Path], None], says: str
) -> None:
    spoil(folder)
    before = torch.get_rng_state()
    text = refusal(folder)
    assert text.startswith(f"model {folder}: ")
    assert says in text
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("character", ["a", "+", " ", "Z"])
def test_a_vocabulary_that_misses_a_character(saved: Path, character: str) -> None:
    """Found before any rollout, and named; an unknown token would be sampled from in silence."""
    text = refusal(saved, DIGITS + character)
    assert text.startswith(f"model {saved}: its vocabulary has no token for {character!r}")
