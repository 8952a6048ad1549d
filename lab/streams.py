"""Random streams: one for each purpose, from a hash of (task, seed, purpose, step).

Two recipes with one seed share starting weights, prompts and the first rollout bit for bit, and
drawing more for one purpose changes no other. Never ``seed + 1``: neighbouring seeds of some
generators overlap.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Streams:
    """The random streams of one run.

    Attributes:
        task: what identifies the task (name, version, settings).
        seed: the run's seed.
    """

    task: Mapping[str, Any]
    seed: int

    def number(self, purpose: str, step: int = 0) -> int:
        """63 bits for one purpose at one step."""
        text = json.dumps([self.task, self.seed, purpose, step], sort_keys=True)
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1

    def python(self, purpose: str, step: int = 0) -> random.Random:
        """A generator for prompts and orders."""
        return random.Random(self.number(purpose, step))

    def torch(self, purpose: str, step: int = 0) -> torch.Generator:
        """A generator for tensors."""
        import torch

        return torch.Generator().manual_seed(self.number(purpose, step))
