"""Text to ids and back: one token a character for the small models, or a pretrained tokenizer's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from lab.errors import LabError

#: What a sampled padding token looks like.
PADDING = "\N{WHITE SQUARE}"


class Tokenizer(Protocol):
    """What a policy needs of a tokenizer."""

    eos_ids: tuple[int, ...]
    pad_id: int

    def encode(self, text: str) -> list[int]:
        """The ids of a text, no special tokens added."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, as a verifier reads it."""
        ...


class Characters:
    """One token a character, an end token and a padding token beside them.

    Args:
        characters: every character that it knows, in the order of their ids.
    """

    def __init__(self, characters: str) -> None:
        self.characters = characters
        self.eos_ids: tuple[int, ...] = (0,)
        self.pad_id = 1
        self._ids = {c: i for i, c in enumerate(characters, start=2)}

    def __len__(self) -> int:
        return len(self.characters) + 2

    def encode(self, text: str) -> list[int]:
        """The ids of a text.

        Raises:
            LabError: for a character that it does not know.
        """
        missing = next((c for c in text if c not in self._ids), None)
        if missing is not None:
            raise LabError(
                f"the vocabulary has no character {missing!r} (in {text!r}); "
                f"it has {self.characters!r}"
            )
        return [self._ids[c] for c in text]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; an end token has none.

        A padding token that was sampled shows: without it a wrong answer would read as a right one.
        """
        shown = (PADDING if i == self.pad_id else self.characters[i - 2] for i in ids if i)
        return "".join(shown)


class Pretrained:
    """A tokenizer of transformers behind the same three names.

    Args:
        tokenizer: with an end token; without a padding token, the end token pads.
        eos_ids: every id that ends a response (a model may have several).
        where: the model's name, for errors.
    """

    def __init__(self, tokenizer: Any, eos_ids: Sequence[int], where: str) -> None:
        self._tokenizer = tokenizer
        self._where = where
        if tokenizer.eos_token_id is not None:
            eos_ids = [tokenizer.eos_token_id, *eos_ids]
        if not eos_ids:
            raise LabError(f"model {where}: neither its tokenizer nor its config has an end token")
        self.eos_ids = tuple(dict.fromkeys(int(i) for i in eos_ids))
        pad = tokenizer.pad_token_id
        self.pad_id = self.eos_ids[0] if pad is None else int(pad)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, no special tokens added.

        Raises:
            LabError: for a text that does not come back from its ids, as where the vocabulary
                misses one of its characters.
        """
        ids = [int(i) for i in self._tokenizer.encode(text, add_special_tokens=False)]
        unknown = self._tokenizer.unk_token_id
        back = self.decode(ids)
        if unknown in ids or back.strip() != text.strip():
            missing = [c for c in dict.fromkeys(text) if c not in back]
            what = f"has no token for {missing[0]!r}" if missing else f"reads it as {back!r}"
            raise LabError(f"model {self._where}: its vocabulary {what} (in {text!r})")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, as a verifier reads it."""
        text: str = self._tokenizer.decode(
            # a special token that was sampled shows; the end token is taken off before
            list(ids),
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
        return text


def stop_ids(tokenizer: Tokenizer, stops: str) -> tuple[int, ...]:
    """The ids after which a response ends by itself: each stop character is one token.

    Raises:
        LabError: for a stop character that the tokenizer writes in several tokens.
    """
    found = []
    for c in stops:
        ids = tokenizer.encode(c)
        if len(ids) != 1:
            raise LabError(f"the stop character {c!r} takes {len(ids)} tokens; one was due")
        found += ids
    return tuple(found)
