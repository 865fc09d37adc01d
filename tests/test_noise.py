import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ict.noise import draw_pairs, karras_sigmas, lognormal_pmf, uniform_pmf


@given(st.integers(2, 1500), st.floats(1e-4, 0.1), st.floats(1.0, 200.0), st.floats(1.0, 10.0))
def test_grid_ascends_between_its_exact_ends(n, sigma_min, sigma_max, rho):
    sigmas = karras_sigmas(n, sigma_min=sigma_min, sigma_max=sigma_max, rho=rho)
    assert sigmas.dtype == torch.float64 and len(sigmas) == n
    assert sigmas[0] == sigma_min and sigmas[-1] == sigma_max
    assert (sigmas.diff() > 0).all()


def test_grid_is_the_formula_of_section_2():
    sigmas = karras_sigmas(11)
    for i in range(1, 12):
        low, high = 0.002 ** (1 / 7), 80 ** (1 / 7)
        assert sigmas[i - 1].item() == pytest.approx((low + (i - 1) / 10 * (high - low)) ** 7, rel=1e-12)


@pytest.mark.parametrize(("sigma", "index"), [(0.821, 492), (0.661, 466), (1.526, 571), (0.973, 513)])
def test_the_papers_intermediate_levels_lie_on_the_finest_grid(sigma, index):
    assert round(karras_sigmas(1281)[index].item(), 3) == sigma


def test_a_grid_of_one_level_is_refused():
    with pytest.raises(ValueError, match="at least 2"):
        karras_sigmas(1)


@pytest.mark.parametrize("n", [2, 11, 161, 1281])
def test_lognormal_is_the_erf_formula(n):
    sigmas = karras_sigmas(n)

    def phi(sigma):
        return math.erf((math.log(sigma) + 1.1) / (math.sqrt(2) * 2.0))

    mass = [phi(b) - phi(a) for a, b in zip(sigmas.tolist(), sigmas.tolist()[1:], strict=False)]
    pmf = lognormal_pmf(sigmas)
    assert pmf.dtype == torch.float64 and len(pmf) == n - 1
    assert pmf.sum().item() == pytest.approx(1, abs=1e-14)
    assert torch.allclose(pmf, torch.tensor(mass, dtype=torch.float64) / sum(mass), rtol=1e-9, atol=1e-15)


def test_lognormal_leaves_out_what_lies_outside_the_grid():
    outside = (
        1
        - (math.erf((math.log(80) + 1.1) / 2 / math.sqrt(2)) - math.erf((math.log(0.002) + 1.1) / 2 / math.sqrt(2))) / 2
    )
    assert outside == pytest.approx(0.0083, abs=2e-4)  # so the probabilities must be renormalised


def test_lognormal_favours_low_noise():
    """With the sign of P_mean wrong (+1.1) the median level would be near 3."""
    sigmas = karras_sigmas(1281)
    median = sigmas[torch.searchsorted(lognormal_pmf(sigmas).cumsum(0), 0.5)].item()
    assert median == pytest.approx(math.exp(-1.1), rel=0.03)


def test_lognormal_keeps_its_digits_far_out_in_the_tails():
    pmf = lognormal_pmf(torch.tensor([1e4, 1e5, 1e6], dtype=torch.float64), p_mean=-1.1, p_std=1.0)
    assert (pmf > 0).all()
    assert pmf[1] / pmf[0] < 1e-10


def test_uniform_is_uniform():
    assert torch.allclose(uniform_pmf(karras_sigmas(5)), torch.full((4,), 0.25, dtype=torch.float64))


def test_drawn_pairs_follow_the_distribution():
    pmf = lognormal_pmf(karras_sigmas(11))
    u = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    share = torch.bincount(draw_pairs(pmf.cumsum(0), u), minlength=10) / 100_000
    assert (share - pmf).abs().max() < 2e-5


def test_drawn_pairs_stay_in_range():
    pmf = lognormal_pmf(karras_sigmas(1281))
    drawn = draw_pairs(pmf.cumsum(0), torch.tensor([2**-33, 1 - 2**-33], dtype=torch.float64))
    assert drawn.min() >= 0 and drawn.max() <= 1279
    assert draw_pairs(torch.tensor([1.0, 1.0], dtype=torch.float64), torch.tensor([0.999999])).item() == 0


def test_a_distribution_without_weight_on_the_grid_is_refused():
    with pytest.raises(ValueError, match="put no weight between"):
        lognormal_pmf(karras_sigmas(11), p_mean=1000.0, p_std=0.1)
