import pytest
import torch
from helpers import tiny_config

from ict.config import Config

torch.set_num_threads(1)  # the tests run in several processes


@pytest.fixture(autouse=True)
def _same_numbers_every_time():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """No test reads or fills the user's cache."""
    monkeypatch.setenv("ICT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def tiny() -> Config:
    return tiny_config()
