import math

import pytest
import torch

from ict.distance import DISTANCES, huber_c, l1, pseudo_huber, squared_l2
from ict.weighting import inverse_gap, uniform


@pytest.mark.parametrize(("shape", "c"), [((3, 32, 32), 0.0299), ((3, 64, 64), 0.0599)])
def test_c_follows_the_square_root_of_the_dimension(shape, c):
    """With d instead of √d it would be 1.66 and 6.64."""
    assert huber_c(math.prod(shape)) == pytest.approx(c, abs=6e-5)


def test_pseudo_huber_is_one_norm_over_the_whole_image():
    """Not a mean of per-pixel values: for one pixel that differs by 3 and another by 4 it is √(25 + c²) − c."""
    x = torch.zeros(2, 3, 4, 4)
    y = x.clone()
    y[0, 0, 0, 0], y[0, 2, 3, 3] = 3, -4
    c = 0.00054 * math.sqrt(48)
    assert pseudo_huber(x, y).tolist() == pytest.approx([math.sqrt(25 + c * c) - c, 0], rel=1e-6)
    assert pseudo_huber(x, y, c=2.0).tolist() == pytest.approx([math.sqrt(29) - 2, 0], rel=1e-6)


def test_pseudo_huber_keeps_its_digits_for_tiny_differences():
    """At N = 1281 the two outputs can differ by far less than c; √(s + c²) − c in float32 would give 0."""
    x, y = torch.zeros(1, 3, 32, 32), torch.full((1, 3, 32, 32), 1e-7)
    s, c = 3072 * 1e-14, 0.00054 * math.sqrt(3072)
    assert pseudo_huber(x, y).item() == pytest.approx(s / (2 * c), rel=1e-3)


@pytest.mark.parametrize("name", sorted(DISTANCES.keys() - {"lpips"}))  # that one has weights, and tests of its own
def test_gradient_at_equal_images_is_zero_not_nan(name):
    x = torch.ones(2, 1, 3, 3, requires_grad=True)
    DISTANCES[name](x, x.detach().clone()).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.zeros_like(x))


@pytest.mark.parametrize("c", [0.0, -1.0])
def test_pseudo_huber_refuses_a_c_that_is_not_positive(c):
    with pytest.raises(ValueError, match="c > 0"):
        pseudo_huber(torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2, 2), c=c)


def test_the_difference_is_taken_in_float32():
    """In bfloat16 1 + 2⁻⁸ is not 1, but sums of 3072 squares would drown in rounding."""
    x, y = torch.ones(1, 3, 32, 32, dtype=torch.bfloat16), torch.ones(1, 3, 32, 32) + 2**-12
    assert squared_l2(x, y).dtype == torch.float32
    assert squared_l2(x, y).item() == pytest.approx(3072 * 2**-24, rel=1e-3)


def test_l1_and_squared_l2():
    x, y = torch.tensor([[[[1.0, -2.0]]]]), torch.tensor([[[[0.0, 1.0]]]])
    assert l1(x, y).tolist() == [4.0]
    assert squared_l2(x, y).tolist() == [10.0]


@pytest.mark.parametrize("name", sorted(DISTANCES.keys() - {"lpips"}))  # that one has weights, and tests of its own
def test_one_number_a_sample(name):
    assert DISTANCES[name](torch.randn(5, 3, 8, 8), torch.randn(5, 3, 8, 8)).shape == (5,)


def test_images_of_different_shapes_are_refused():
    with pytest.raises(ValueError, match="different shapes"):
        squared_l2(torch.zeros(2, 1, 4, 4), torch.zeros(1, 1, 4, 4))


def test_weights():
    low, high = torch.tensor([1.0, 2.0]), torch.tensor([1.5, 6.0])
    assert inverse_gap(low, high).tolist() == [2.0, 0.25]
    assert inverse_gap(low, high, gap_power=2.0).tolist() == [4.0, 0.0625]
    assert inverse_gap(low, high, gap_power=0.0).tolist() == [1.0, 1.0]
    assert uniform(low, high).tolist() == [1.0, 1.0]
