import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ict.curriculum import CURRICULA, doubling_period, exponential, sqrt, stages, teacher_ema_2023

PAPER = {"s0": 10, "s1": 1280}


@pytest.mark.parametrize(("total", "period"), [(400_000, 50_000), (800_000, 100_000)])
def test_exponential_switches_where_the_paper_does(total, period):
    assert doubling_period(total, **PAPER) == period
    for stage, n in enumerate((11, 21, 41, 81, 161, 321, 641, 1281)):
        assert exponential(stage * period, total, **PAPER) == n
        assert exponential((stage + 1) * period - 1, total, **PAPER) == n
    assert exponential(total, total, **PAPER) == 1281
    assert list(stages(exponential, total, **PAPER)) == [(stage * period, 10 * 2**stage + 1) for stage in range(8)]


def test_exponential_where_s1_is_no_power_of_two_times_s0():
    # ⌊150/2⌋ = 75, log2 75 = 6.23: K' = ⌊1000 / 7.23⌋ = 138
    assert doubling_period(1000, s0=2, s1=150) == 138
    assert [exponential(138 * k, 1000, s0=2, s1=150) for k in range(8)] == [3, 5, 9, 17, 33, 65, 129, 151]


def test_exponential_of_a_run_too_short_for_its_stages():
    assert [exponential(k, 3, **PAPER) for k in range(3)] == [11, 21, 41]


def test_exponential_with_equal_ends_is_constant():
    assert {exponential(k, 100, s0=10, s1=10) for k in range(101)} == {11}


@pytest.mark.parametrize("k", [0, 1, 17, 250, 399_999, 400_000])
def test_sqrt_is_the_formula_of_table_1(k):
    total, s0, s1 = 400_000, 2, 150
    radicand = Fraction(k, total) * ((s1 + 1) ** 2 - s0**2) + s0**2
    exact = math.ceil(math.sqrt(radicand) - 1 - 1e-12) + 1
    assert sqrt(k, total, s0=s0, s1=s1) == exact


def test_sqrt_runs_from_s0_to_s1_plus_1():
    assert sqrt(0, 1000, s0=2, s1=150) == 2
    assert sqrt(1000, 1000, s0=2, s1=150) == 151


def test_sqrt_does_not_round_a_whole_root_up():
    # (5² - 2²) k/K + 2² = 3² at k/K = 5/21: the root is exactly 3
    assert sqrt(5, 21, s0=2, s1=4) == 3
    assert sqrt(6, 21, s0=2, s1=4) == 4


@pytest.mark.parametrize(
    ("name", "values"),
    [  # at 0, ¼, ½, ¾ and 1 of the run
        ("constant", [1281, 1281, 1281, 1281, 1281]),
        ("linear", [11, 328, 646, 963, 1281]),
        ("square", [11, 90, 328, 725, 1281]),
        ("cosine", [11, 196, 646, 1095, 1281]),
    ],
)
def test_other_shapes(name, values):
    assert [CURRICULA[name](k, 400, **PAPER) for k in (0, 100, 200, 300, 400)] == values


@given(st.sampled_from(sorted(CURRICULA)), st.integers(1, 2000), st.integers(1, 40), st.integers(0, 300), st.data())
def test_every_curriculum_rises_and_ends_at_most_at_s1_plus_1(name, total, s0, extra, data):
    curriculum, s1 = CURRICULA[name], s0 + extra
    k = data.draw(st.integers(0, total - 1))
    n, following = curriculum(k, total, s0=s0, s1=s1), curriculum(k + 1, total, s0=s0, s1=s1)
    assert (max(2, s0) if name == "sqrt" else s0 + 1) <= n <= following <= s1 + 1


@given(st.sampled_from(sorted(CURRICULA)), st.integers(1, 300))
def test_stages_are_what_walking_every_step_finds(name, total):
    curriculum = CURRICULA[name]
    walked = []
    for k in range(total):
        n = curriculum(k, total, s0=3, s1=50)
        if not walked or walked[-1][1] != n:
            walked.append((k, n))
    assert list(stages(curriculum, total, s0=3, s1=50)) == walked


def test_teacher_ema_of_2023():
    assert teacher_ema_2023(2, s0=2, mu0=0.9) == pytest.approx(0.9)
    assert teacher_ema_2023(151, s0=2, mu0=0.9) == pytest.approx(math.exp(2 * math.log(0.9) / 151))
    assert teacher_ema_2023(11, s0=10, mu0=0.0) == 0.0
