"""Minibatch couplings: a better order of the same noise, by the same rounds on a GPU, and only where it is right."""

import contextlib
import io
import itertools
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from helpers import same_weights, step_of, tiny_config, trained_weights
from rich.console import Console

from ict.experiment import run
from ict.experiment.main import check_shares
from ict.model import ModelSpec, build_model
from ict.nets.kernels import have_triton
from ict.objectives import base, build_objective
from ict.objectives.coupling import couple, match, rounds
from ict.ranks import ALONE
from ict.reading import ConfigError


def likeness(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, count, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("count", [1, 2, 3, 8, 21, 64])
def test_everyone_gets_one_and_no_exchange_would_be_better(count):
    matrix = likeness(count)
    found = match(matrix)
    assert sorted(found.tolist()) == list(range(count))
    own, rows = matrix[range(count), found], torch.arange(count)
    assert own.sum() >= matrix.trace()
    then = matrix[rows[:, None], found[None, :]]  # row i with the column of row j
    better = then + then.T > own[:, None] + own[None, :] + 1e-5
    assert better.float().mean() < 0.01


def test_it_is_nearly_the_best():
    leads = []
    for seed in range(20):
        matrix = likeness(7, seed)
        best = max(sum(matrix[i, j].item() for i, j in enumerate(order)) for order in itertools.permutations(range(7)))
        mean = matrix.mean().item() * 7
        leads.append((matrix[range(7), match(matrix)].sum().item() - mean) / (best - mean))
    assert sum(leads) / len(leads) > 0.9


def test_images_on_a_line_are_sorted():
    """In one dimension the best order is known: the k-th image with the k-th noise."""
    images, noise = torch.randn(32, 1, 1, 1), torch.randn(32, 1, 1, 1)
    given = couple(images, noise, takes_part=torch.ones(32, dtype=torch.bool))
    assert torch.equal(given.flatten()[images.flatten().argsort()], noise.flatten().sort().values)


def noise_of(images: torch.Tensor, above: float | None, sigma: torch.Tensor) -> torch.Tensor:
    return replace(step_of(len(images), number=3), couple_above=above).noise(images, sigma)


def test_a_steps_noise_is_the_same_in_another_order():
    images = torch.rand(16, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    alone, together = (noise_of(images, above, torch.full((16,), 0.1)) for above in (None, 0.0))
    assert not torch.equal(alone, together)
    assert torch.equal(alone.sum(dim=(1, 2, 3)).sort().values, together.sum(dim=(1, 2, 3)).sort().values)
    assert (images * together).sum() > (images * alone).sum() + 5 * 16  # by about a norm of an image each


def test_below_a_level_each_keeps_its_own():
    images = torch.rand(16, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    sigma = torch.linspace(0.1, 3.1, 16, dtype=torch.float64)
    alone, together = noise_of(images, None, sigma), noise_of(images, 1.0, sigma)
    same = (alone == together).flatten(1).all(1)
    assert (sigma <= 1).sum() == 5 and same[sigma <= 1].all() and same.sum() < 10
    assert (images * together).sum() > (images * alone).sum() + 5 * 11


@pytest.mark.parametrize("kind", ["ict", "ect", "edm", "sct", "continuous", "meanflow"])
def test_every_method_tells_its_levels(kind, monkeypatch):
    """The level of each sample is the one that the loss reports."""
    config = tiny_config(
        objective={"kind": kind, "distance": "squared_l2", "s0": 20, "s1": 20},
        net={"intervals": kind == "meanflow"}, data={"classes": 0},
    )  # fmt: skip
    told = []
    monkeypatch.setattr(base, "couple", lambda images, z, *, takes_part: told.append(takes_part) or z)
    model = build_model(ModelSpec.from_config(config, ())).train()
    step = replace(step_of(32, done=99), couple_above=0.3)
    loss = build_objective(config)(model, torch.rand(32, 1, 8, 8) * 2 - 1, None, step)
    assert torch.equal(told[0], loss.sigma > 0.3) and 0 < told[0].sum() < 32


def test_rounds_reach_every_pair():
    for count in (1, 2, 3, 8, 9, 100):
        met = {frozenset((i, i ^ r)) for i in range(count) for r in range(1, rounds(count)) if i ^ r < count}
        assert len(met) == count * (count - 1) // 2


COMPARE = """
import torch
from ict.model import ModelSpec, build_model
from ict.objectives import base, build_objective
from ict.objectives.coupling import SWEEPS, match
from ict.objectives.fused_coupling import match_fused
for count in (1, 2, 5, 8, 19, 64):
    matrix = torch.randn(count, count, generator=torch.Generator().manual_seed(count))
    assert torch.equal(match_fused(matrix, sweeps=SWEEPS), match(matrix)), count
"""


@pytest.mark.skipif(not have_triton(), reason="needs Triton")
def test_the_kernel_takes_the_same_rounds():
    subprocess.run([sys.executable, "-c", COMPARE], check=True, env={**os.environ, "TRITON_INTERPRET": "1"})


def test_a_model_of_classes_is_refused():
    with pytest.raises(ConfigError, match="gives each class a noise of its own"):
        tiny_config(objective={"coupling": "batch"})
    with pytest.raises(ConfigError, match=r'objective\.coupling = \'best\': use "independent"'):
        tiny_config(objective={"coupling": "best"}, data={"classes": 0})
    with pytest.raises(ConfigError, match="pieces of at least 2 images"):
        tiny_config(objective={"coupling": "batch"}, data={"classes": 0}, training={"accumulate": 8})
    with pytest.raises(ConfigError, match="use 0 "):
        tiny_config(objective={"couple_above": -1.0})


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_run_with_it_trains_and_differs(pieces, tmp_path):
    found = []
    for coupling in ("independent", "batch"):
        config = tiny_config(
            objective={"coupling": coupling, "couple_above": 0.1},
            data={"classes": 0},
            training={"accumulate": pieces, "steps": 4},
        )
        found.append(trained_weights(config, tmp_path / coupling))
    assert not same_weights(*found)
    assert all(tensor.isfinite().all() for tensor in found[1].values())


def test_the_pieces_of_a_coupled_run_stay_as_they_are(tmp_path):
    for coupling, free in (("independent", True), ("batch", False)):
        config = tiny_config(objective={"coupling": coupling}, data={"classes": 0})
        run(config, tmp_path / coupling, device="cpu", console=Console(file=io.StringIO()))
        other = replace(config, training=replace(config.training, accumulate=2, steps=13))
        with (
            contextlib.nullcontext()
            if free
            else pytest.raises(ConfigError, match=r"training\.accumulate: 1 then, 2 now")
        ):
            run(other, tmp_path / coupling, device="cpu", resume=True, console=Console(file=io.StringIO()))


def test_ranks_cut_a_coupled_batch_into_pieces_too():
    config = tiny_config(data={"classes": 0}, objective={"coupling": "batch"}, training={"accumulate": 4})
    check_shares(config, ALONE)
    with pytest.raises(ConfigError, match="at least 2 images: 8 images on 2 ranks in 4 pieces each"):
        check_shares(config, replace(ALONE, count=2))


def test_another_number_of_ranks_is_another_coupled_run(tmp_path, monkeypatch):
    config = tiny_config(data={"classes": 0}, objective={"coupling": "batch"}, training={"steps": 2})
    run(config, tmp_path / "run", device="cpu", console=Console(file=io.StringIO()))
    monkeypatch.setattr("ict.runfolder.rank_of_environment", lambda: replace(ALONE, count=2))
    with pytest.raises(ConfigError, match="ranks: 1 then, 2 now"):
        run(config, tmp_path / "run", device="cpu", resume=True, console=Console(file=io.StringIO()))


@pytest.mark.parametrize(("above", "warns"), [(0.0, True), (1.0, False)])
def test_a_model_for_one_step_only_is_said_to_be_one(above, warns, tmp_path):
    config = tiny_config(objective={"coupling": "batch", "couple_above": above}, data={"classes": 0})
    console = Console(file=io.StringIO(), width=300)
    run(config, tmp_path / "run", device="cpu", console=console)
    assert ("use it in one step" in console.file.getvalue()) == warns
