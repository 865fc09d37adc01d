"""Scores against exact answers, and against torch-fidelity on the same features."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ict.evaluation.metrics as metrics
from ict.evaluation.metrics import (
    Moments,
    MomentSum,
    compare_neighbours,
    frechet_distance,
    inception_score,
    kernel_distance,
)


def moments(x: torch.Tensor, batch: int = 700) -> Moments:
    total = MomentSum()
    for part in x.split(batch):
        total.add(part)
    return total.moments()


def features() -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(0)
    mix = rng.normal(size=(64, 64)) / 8
    real = np.abs(rng.normal(size=(3000, 64)) @ mix).astype(np.float32)
    fake = np.abs(rng.normal(size=(2500, 64)) @ mix * 1.1 + 0.1).astype(np.float32)
    return torch.from_numpy(real), torch.from_numpy(fake)


def test_scores_are_torch_fidelitys():
    """Constants computed once by torch-fidelity 0.4.0 on these features."""
    real, fake = features()
    assert frechet_distance(moments(fake), moments(real)) == pytest.approx(0.9984414870364802, rel=1e-9)
    assert kernel_distance(real, fake) == pytest.approx((0.11251792907714844, 0.010740784263364516), rel=1e-5)
    near = compare_neighbours(real, fake)
    assert (near.precision, near.recall) == pytest.approx((0.408, 0.8196666836738586), rel=1e-4)
    w = torch.from_numpy(np.random.default_rng(1).normal(size=(64, 10)).astype(np.float32))
    assert inception_score(fake @ w) == pytest.approx((2.802121039206302, 0.1323486969248357), rel=1e-6)


# --- Fréchet


def test_moments_are_numpys_whatever_the_batches():
    x = features()[0] + 1000  # far from zero: no digits are lost
    for batch in (1, 37, 3000):
        found = moments(x, batch)
        assert np.allclose(found.mean.numpy(), x.double().mean(dim=0).numpy(), rtol=1e-12)
        assert np.allclose(found.covariance.numpy(), np.cov(x.double().numpy(), rowvar=False), rtol=1e-9, atol=1e-12)


@given(st.integers(1, 8), st.integers(0, 10**6))
@settings(max_examples=30)
def test_gaussians_whose_covariances_commute(d, seed):
    """There the distance is |μ − ν|² + Σ (√a − √b)², exactly."""
    rng = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(rng.normal(size=(d, d)))
    a, b = rng.uniform(0, 4, (2, d))
    mean = rng.normal(size=(2, d))
    one, other = (
        Moments(torch.from_numpy(m), torch.from_numpy((basis * v) @ basis.T), 10)
        for m, v in zip(mean, (a, b), strict=True)
    )
    expected = ((mean[0] - mean[1]) ** 2).sum() + ((a**0.5 - b**0.5) ** 2).sum()
    assert frechet_distance(one, other) == pytest.approx(expected, rel=1e-8, abs=1e-8)


def test_gaussians_whose_covariances_do_not_commute():
    """Against the square root of the product's eigenvalues."""
    rng = np.random.default_rng(3)
    a, b = (m @ m.T for m in rng.normal(size=(2, 6, 6)))
    expected = np.trace(a) + np.trace(b) - 2 * np.sqrt(np.linalg.eigvals(a @ b)).real.sum()
    zero = torch.zeros(6, dtype=torch.float64)
    got = frechet_distance(Moments(zero, torch.from_numpy(a), 9), Moments(zero, torch.from_numpy(b), 9))
    assert got == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("count", [40, 3000])
def test_a_set_is_at_no_distance_from_itself(count):
    """Also where the covariance is singular: 40 rows of 64 features."""
    x = moments(features()[0][:count])
    assert frechet_distance(x, x) < 1e-6


# --- precision and recall


def clusters(*centres: float, count: int = 200, seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    points = [rng.normal(size=(count, 2)) + np.array([centre, 0]) for centre in centres]
    return torch.from_numpy(np.concatenate(points).astype(np.float32))


@pytest.mark.parametrize(
    ("real", "fake", "precision", "recall"),
    [
        ((0, 100), (0, 100), 1, 1),
        ((0, 100), (0,), 1, 0.5),  # one mode is missing
        ((0,), (0, 100), 0.5, 1),  # half of the samples are of nothing real
        ((0,), (100,), 0, 0),
        ((0, 100, 200), (0, 300), 0.5, 1 / 3),
    ],
)
def test_modes_missing_and_made_up(real, fake, precision, recall):
    found = compare_neighbours(clusters(*real), clusters(*fake, seed=1))
    assert found.precision == pytest.approx(precision, abs=0.05)
    assert found.recall == pytest.approx(recall, abs=0.05)


def test_blocks_do_not_matter(monkeypatch):
    real, fake = features()
    whole = compare_neighbours(real[:500], fake[:400])
    monkeypatch.setattr(metrics, "BLOCK", 37)
    assert compare_neighbours(real[:500], fake[:400]) == whole


def test_a_ball_is_as_large_as_the_way_to_the_third_neighbour_without_itself():
    line = torch.tensor([[0.0], [1], [3], [7], [15]])
    third, first = metrics.balls(line, 3)
    assert third.sqrt().tolist() == [7, 6, 4, 7, 14] and first.sqrt().tolist() == [1, 1, 2, 4, 8]


def test_copies_are_seen():
    real = clusters(0, 10)
    fresh, copied = compare_neighbours(real, clusters(0, 10, seed=5)), compare_neighbours(real, real[::2] + 1e-5)
    assert fresh.copies < 0.1 and 0.5 < fresh.nearest < 2
    assert copied.copies == 1 and copied.nearest < 0.01


def test_copies_are_seen_in_a_set_that_holds_images_twice():
    real = torch.rand(500, 64, generator=torch.Generator().manual_seed(0))
    for twice in (20, 500):
        found = compare_neighbours(torch.cat((real, real[:twice])), real)
        assert found.copies == 1 and found.nearest == 0
    assert compare_neighbours(torch.ones(50, 4), torch.ones(50, 4)).copies == 1


# --- KID and IS


def test_kernel_distance_is_unbiased_and_uses_what_there_is():
    x = features()[0]
    mean, deviation = kernel_distance(x[:1500], x[1500:])
    assert abs(mean) < 0.01 and deviation > 0
    assert kernel_distance(x[:50], x[50:90])[1] > 0  # fewer than a subset


def test_inception_score_of_sure_and_unsure_logits():
    sure = torch.eye(10).repeat(100, 1) * 100
    assert inception_score(sure)[0] == pytest.approx(10, rel=0.06)  # ten classes, each as often; ten parts differ a bit
    assert inception_score(torch.zeros(1000, 10))[0] == pytest.approx(1)
