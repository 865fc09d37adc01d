"""Minibatch couplings: a better order of the same noise, by the same rounds on a GPU, and only where it is right."""

import io
import itertools
import os
import subprocess
import sys

import pytest
import torch
from helpers import step_of, tiny_config
from rich.console import Console

from ict.config import ConfigError
from ict.experiment import run
from ict.nets.kernels import have_triton
from ict.objectives.coupling import couple, match, rounds
from ict.sampling import load


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
    given = couple(images, noise)
    assert torch.equal(given.flatten()[images.flatten().argsort()], noise.flatten().sort().values)


def test_a_steps_noise_is_the_same_in_another_order():
    images = torch.rand(16, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    alone, together = (step_of(16, number=3).__class__(
        seed=0, number=3, done=0, total=1, samples=torch.arange(16), coupling=each
    ).noise(images) for each in ("independent", "batch"))  # fmt: skip
    assert not torch.equal(alone, together)
    assert torch.equal(alone.sum(dim=(1, 2, 3)).sort().values, together.sum(dim=(1, 2, 3)).sort().values)
    assert (images * together).sum() > (images * alone).sum() + 5 * 16  # by about a norm of an image each


def test_rounds_reach_every_pair():
    for count in (1, 2, 3, 8, 9, 100):
        met = {frozenset((i, i ^ r)) for i in range(count) for r in range(1, rounds(count)) if i ^ r < count}
        assert len(met) == count * (count - 1) // 2


COMPARE = """
import torch
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


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_run_with_it_trains_and_differs(pieces, tmp_path):
    found = []
    for coupling in ("independent", "batch"):
        config = tiny_config(
            objective={"coupling": coupling}, data={"classes": 0}, training={"accumulate": pieces, "steps": 4}
        )
        run(config, tmp_path / coupling, device="cpu", console=Console(file=io.StringIO()))
        found.append(load(tmp_path / coupling).model.state_dict())
    assert not all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert all(tensor.isfinite().all() for tensor in found[1].values())
