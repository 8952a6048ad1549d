"""lab.text: text to ids and back, ends and stops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from small_models import DIGITS, SPECIAL, tokenizer

from lab.errors import LabError
from lab.text import Characters, Pretrained, stop_ids


class Pairs:
    """A tokenizer that writes every character in two tokens."""

    eos_ids = (0,)
    pad_id = 0

    def encode(self, text: str) -> list[int]:
        return [i for c in text for i in divmod(ord(c), 100)]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(100 * a + b) for a, b in zip(ids[::2], ids[1::2], strict=True))


# one token a character


def test_ids_follow_the_order_of_the_characters() -> None:
    """Ids 0 and 1 are the end and the padding; a set in place of a string has no order."""
    text = Characters("ba>")
    assert text.encode("ab>a") == [3, 2, 4, 3]
    assert (text.eos_ids, text.pad_id) == ((0,), 1)
    assert len(text) == 5  # 3 + end + padding: the vocabulary of the model


def test_there_and_back() -> None:
    text = Characters(DIGITS)
    assert all(text.decode(text.encode(t)) == t for t in ("", "7", "0123456789>", ">>00"))


def test_an_end_has_no_text_and_sampled_padding_shows() -> None:
    """characters[i - 2] of 0 and 1 are the last two characters: '9>' out of nothing.

    A padding token without a text would make 3, PAD, 8 the right answer "38".
    """
    text = Characters(DIGITS)
    assert text.decode([5, 1, 10]) == "3□8"
    assert text.decode([2, 0]) == "0"
    assert text.decode([0]) == ""


@pytest.mark.parametrize(("given", "missing"), [("1x2y", "x"), ("\n", "\\n"), ("1 ", " ")])
def test_a_character_that_it_does_not_know(given: str, missing: str) -> None:
    with pytest.raises(LabError) as e:
        Characters(DIGITS).encode(given)
    assert str(e.value) == (
        f"the vocabulary has no character '{missing}' (in {given!r}); it has '0123456789>'"
    )


# a pretrained tokenizer


def pretrained(made: Any = None, eos: Sequence[int] = ()) -> Pretrained:
    return Pretrained(tokenizer() if made is None else made, eos, "mine")


def test_a_pretrained_tokenizer_there_and_back() -> None:
    text = pretrained()
    n = len(SPECIAL)
    assert text.encode("02>") == [n, n + 2, n + 10]
    assert text.decode(text.encode("02>")) == "02>"
    assert text.encode("") == []


def test_special_tokens_are_not_added_and_sampled_ones_show() -> None:
    """A tokenizer that begins each text with a token: in the middle of a row it means nothing."""
    from tokenizers.processors import TemplateProcessing

    made = tokenizer()
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single="<end> $A <end>", special_tokens=[("<end>", 0)]
    )
    assert made.encode("1") == [0, len(SPECIAL) + 1, 0]
    text = pretrained(made)
    assert text.encode("1") == [len(SPECIAL) + 1]
    assert text.decode([len(SPECIAL) + 1, 0]) == "1<end>"  # texts() takes ends off before


def test_decoding_does_not_clean_up() -> None:
    """'1 .' made '1.': a verifier would read what the policy did not write."""
    made = tokenizer("1 .", clean_up_tokenization_spaces=True)
    assert made.decode(made.encode("1 .")) == "1."
    text = pretrained(made)
    assert text.decode(text.encode("1 .")) == "1 ."


def test_without_a_padding_token_the_end_pads() -> None:
    assert pretrained().pad_id == 0
    assert pretrained(tokenizer(pad_token="<also>")).pad_id == SPECIAL.index("<also>")
    assert pretrained(tokenizer(pad_token="<unk>")).pad_id == SPECIAL.index("<unk>")


@pytest.mark.parametrize(
    ("eos", "want"), [((), (0,)), ((0,), (0,)), ((2, 0), (0, 2)), ((2, 2), (0, 2))]
)
def test_every_end_counts_once_the_tokenizers_first(
    eos: tuple[int, ...], want: tuple[int, ...]
) -> None:
    """M2: the first one closes the answers that a warm start teaches."""
    assert pretrained(eos=eos).eos_ids == want


def test_the_models_end_serves_a_tokenizer_without_one() -> None:
    text = pretrained(tokenizer(eos_token=None), eos=(2,))
    assert (text.eos_ids, text.pad_id) == ((2,), 2)


def test_without_any_end_a_model_cannot_stop() -> None:
    with pytest.raises(LabError, match="model mine: neither its tokenizer nor its config has an"):
        pretrained(tokenizer(eos_token=None))


@pytest.mark.parametrize("unknown", ["<unk>", "<also>"])
def test_a_character_that_a_pretrained_vocabulary_misses(unknown: str) -> None:
    """An unknown token encodes without complaint, and its text is gone or another."""
    with pytest.raises(LabError) as e:
        pretrained(tokenizer(unk_token=unknown)).encode("12x3")
    assert str(e.value) == "model mine: its vocabulary has no token for 'x' (in '12x3')"


def test_a_text_that_comes_back_changed() -> None:
    """Lower-casing: the prompt would be another, and nobody would know."""
    from tokenizers import normalizers

    made = tokenizer("aA")
    made.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(LabError, match=r"its vocabulary has no token for 'A' \(in 'aA'\)"):
        pretrained(made).encode("aA")
    made.backend_tokenizer.normalizer = normalizers.Replace("aa", "a")
    with pytest.raises(LabError, match=r"its vocabulary reads it as 'a' \(in 'aa'\)"):
        pretrained(made).encode("aa")


# stops


def test_each_stop_character_is_one_id() -> None:
    assert stop_ids(Characters("abc>"), "cb") == (4, 3)
    assert stop_ids(Characters("abc>"), "") == ()
    assert stop_ids(pretrained(), "1") == (len(SPECIAL) + 1,)


def test_a_stop_in_several_tokens_is_refused() -> None:
    """Taking the last of them ends a row on half of another character."""
    with pytest.raises(LabError, match="the stop character 'b' takes 2 tokens; one was due"):
        stop_ids(Pairs(), "b")
