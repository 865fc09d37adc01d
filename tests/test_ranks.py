"""Several processes as one: shares, and a run and a score on two ranks (more of that in tests/faults)."""

import json
import os
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from helpers import TINY

from ict.config import Config
from ict.ranks import Ranks, device_of_rank, rank_of_environment
from ict.reading import ConfigError, from_dict
from ict.recipes import to_toml


@pytest.mark.parametrize(("things", "count"), [(12, 3), (16, 4), (7, 2), (5, 1)])
def test_shares_are_all_of_it_once_and_in_order(things, count):
    shares = [Ranks(rank=rank, count=count).share(torch.arange(things)) for rank in range(count)]
    assert torch.cat(shares).tolist() == list(range(things))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_the_environment_says_who_one_is(monkeypatch):
    assert rank_of_environment() == Ranks() and Ranks().main
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="not all that belongs to it"):
        rank_of_environment()
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert rank_of_environment() == Ranks(rank=5, count=8, local=1)
    assert device_of_rank(torch.device("cpu")) == torch.device("cpu")
    with pytest.raises(ConfigError, match="each takes its own GPU"):
        device_of_rank(torch.device("cuda", 1))
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ConfigError, match="torchrun"):
        rank_of_environment()


def test_a_run_and_its_scores_on_two_ranks_are_those_of_one(tmp_path):
    """With dropout: the masks are a function of the sample, not of the rank."""
    values = {**TINY, "evaluation": {"times": 1, "samples": 200}}
    (tmp_path / "recipe.toml").write_text(to_toml(from_dict(Config, values)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    many = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    scores, models = [], []
    for name, start in (("one", []), ("two", many)):
        for order in (
            ["train", str(tmp_path / "recipe.toml"), "--out", str(tmp_path / name)],
            ["eval", str(tmp_path / name), "--samples", "301", "--batch", "100"],
        ):
            program = [sys.executable, *start, "-m", "ict", *order, "--device", "cpu"]
            done = subprocess.run(program, capture_output=True, text=True, env=environment, timeout=200)
            assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("scores:") == 1
        records = json.loads((tmp_path / name / "eval.json").read_text())["records"]
        scores.append([record["scores"]["FD-digits"] for record in records])
        models.append(safetensors.torch.load_file(tmp_path / name / "model.safetensors"))
    assert len(scores[0]) == len(scores[1]) == 2 and scores[0] == pytest.approx(scores[1], rel=1e-4)
    assert all((models[0][key] - models[1][key]).abs().max() < 1e-5 for key in models[0])


def test_a_batch_that_cannot_be_shared_is_refused(tmp_path):
    values = {**TINY, "training": {**TINY["training"], "batch": 9}}
    (tmp_path / "recipe.toml").write_text(to_toml(from_dict(Config, values)))
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ict"]
    done = subprocess.run(
        [*program, "train", str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "run"), "--device", "cpu"],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=200,
    )  # fmt: skip
    assert done.returncode and "use a multiple of 2" in done.stderr and not (tmp_path / "run").exists()
