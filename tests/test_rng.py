import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ict import rng
from ict.rng import Stream


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # the known answers published with Random123 for philox4x32-10
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0_A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(counter, key, expected):
    drawn = rng.philox(tuple(torch.tensor([word]) for word in counter), key)
    assert tuple(int(word) for word in drawn) == expected


@given(st.integers(1, 40), st.integers(1, 7))
def test_a_sample_does_not_depend_on_its_batch(batch, pieces):
    samples = torch.arange(batch)
    whole = rng.normal(samples, (1, 3, 5), seed=3, step=9)
    parts = torch.cat([rng.normal(piece, (1, 3, 5), seed=3, step=9) for piece in samples.chunk(pieces)])
    assert torch.equal(whole, parts)
    assert torch.equal(whole[-1:], rng.normal(samples[-1:], (1, 3, 5), seed=3, step=9))


def test_every_coordinate_of_a_draw_matters():
    one = torch.arange(1)
    draws = [
        rng.words(one, 4, seed=0, step=0, stream=Stream.NOISE),
        rng.words(one, 4, seed=1, step=0, stream=Stream.NOISE),
        rng.words(one, 4, seed=2**32, step=0, stream=Stream.NOISE),
        rng.words(one, 4, seed=0, step=1, stream=Stream.NOISE),
        rng.words(one, 4, seed=0, step=2**32, stream=Stream.NOISE),
        rng.words(one, 4, seed=0, step=0, stream=Stream.LEVEL),
        rng.words(one + 1, 4, seed=0, step=0, stream=Stream.NOISE),
    ]
    assert len({tuple(draw[0].tolist()) for draw in draws}) == len(draws)
    assert len(set(rng.words(one, 1000, seed=0, step=0, stream=Stream.NOISE)[0].tolist())) == 1000


def test_normal_numbers_are_normal():
    z = rng.normal(torch.arange(1000), (1000,), seed=0, step=0).double().flatten()
    assert z.dtype == torch.float64
    assert abs(z.mean()) < 4e-3
    assert abs(z.std() - 1) < 3e-3
    assert abs((z**4).mean() - 3) < 0.05
    # Kolmogorov-Smirnov distance to the normal distribution; 1.63 / √n is its 99 % point
    exact = (1 + torch.erf(z.sort().values / math.sqrt(2))) / 2
    assert (exact - (torch.arange(len(z)) + 0.5) / len(z)).abs().max() < 1.63 / math.sqrt(len(z))


def test_neighbouring_samples_and_steps_are_uncorrelated():
    a = rng.normal(torch.arange(200), (500,), seed=0, step=0).flatten()
    b = rng.normal(torch.arange(1, 201), (500,), seed=0, step=0).flatten()
    c = rng.normal(torch.arange(200), (500,), seed=0, step=1).flatten()
    for other in (b, c, a.roll(1)):
        assert abs(torch.corrcoef(torch.stack((a, other)))[0, 1]) < 0.015  # 4.7 standard errors


def test_uniform_numbers_stay_inside_the_interval():
    u = rng.uniform(torch.arange(1000), 100, seed=0, step=0, stream=Stream.LEVEL)
    assert u.min() > 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 4e-3


@given(st.integers(1, 300), st.integers(0, 2**40), st.integers(0, 1000))
def test_a_permutation_holds_every_number_once(n, seed, epoch):
    assert rng.permutation(n, seed=seed, epoch=epoch).sort().values.tolist() == list(range(n))


def test_epochs_are_shuffled_differently():
    assert not torch.equal(rng.permutation(100, seed=0, epoch=0), rng.permutation(100, seed=0, epoch=1))


def test_a_step_in_a_tensor_draws_the_same():
    samples = torch.arange(5)
    for step in (0, 7, 2**32 + 3):
        drawn = rng.words(samples, 6, seed=1, step=torch.tensor(step), stream=Stream.NOISE)
        assert torch.equal(drawn, rng.words(samples, 6, seed=1, step=step, stream=Stream.NOISE))
