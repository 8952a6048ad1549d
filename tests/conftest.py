"""What all tests share: the installed shelf, and double precision said aloud."""

from __future__ import annotations

import pytest
import torch

from lab.shelf import Shelf, installed

# tensors are tiny here: a second thread only waits, and the suite may run in two processes
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shelf() -> Shelf:
    """The built-in plugins, as installed."""
    return installed()


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)
