"""The scripts that print tables: they fit the rest of the house, and say how they are called."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers import tiny_config

from ict.data import load_images
from ict.model import ModelSpec, build_model
from ict.ranks import ALONE
from ict.training.budget import Budget
from ict.training.loop import new_state, train

SCRIPTS = sorted((Path(__file__).parents[1] / "benchmarks").glob("*.py"))


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmarks_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", SCRIPTS, ids=[path.stem for path in SCRIPTS])
def test_a_script_loads_and_says_how_it_is_called(path):
    module = load(path)
    assert callable(module.main) and f"benchmarks/{path.name}" in (module.__doc__ or "")


def script(name: str) -> ModuleType:
    return load(next(path for path in SCRIPTS if path.stem == name))


def test_a_run_goes_on_under_a_guard_that_looks_at_nothing():
    config, device = tiny_config(), torch.device("cpu")
    images = load_images(config.data)
    state = new_state(config, build_model(ModelSpec.from_config(config, images.class_names)))
    guard = script("overhead").Blind(config, ALONE, device)
    steps = [state.loss.item() for _ in train(config, state, images, Budget(steps=3), guard=guard)]
    assert len(steps) == 3 and state.taken is True


def test_a_printed_table_of_growth_is_read_again():
    table = """NVIDIA H200, torch 2.11; cifar10-ict, 760 TFLOP/s in a large product
what             value   ms a step  images/s  TFLOP/s  share  memory GiB
batch                64        36.5      1752    297.6    39%         3.6
batch              2048       822.7      2489    422.9    56%        83.0
batch              4096   out of memory
pixels a side        32        61.8      2070    351.6    46%         6.2
"""
    expected = {"batch": [(64, 36.5), (2048, 822.7)], "pixels a side": [(32, 61.8)]}
    assert script("growth").read(table) == expected


def test_a_peer_that_needs_a_checkout_says_so(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["peers.py", "nobody"])
    with pytest.raises(SystemExit, match="locuslab/ect"):
        script("peers").main()


def test_our_side_of_the_sampling_beside_diffusers_draws(monkeypatch, capsys):
    peers = script("peers")
    monkeypatch.setattr(peers, "our_samples", lambda: torch.zeros)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    peers.sampling("ours", "2", "4")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["ours, batch 2", "ours, batch 4"]
