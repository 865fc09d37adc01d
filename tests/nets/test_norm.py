"""GroupNorm and what stands around it; the kernels are tried by Triton's interpreter where Triton is installed."""

import os
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

from ict.nets.kernels import have_triton
from ict.nets.norm import Norm

COMPARE = """
import torch
from torch.nn import functional as F
from ict.nets import fused, fused_norm
from ict.nets.dropout import dropout_mask, layer_keys
from ict.nets.layers import BoxDown, BoxUp, Fir

torch.manual_seed(0)
for samples, channels, size, groups, silu in [(2, 12, 5, 2, True), (3, 72, 18, 9, True), (1, 128, 4, 32, False)]:
    x = 2 * torch.randn(samples, channels, size, size) + 30 * torch.randn(1, channels, 1, 1)  # far from zero
    inputs = [x.double(), *(torch.randn(samples, channels).double() for _ in range(3))]
    dy = torch.randn(x.shape)
    for each in inputs:
        each.requires_grad_()
    x, w, b, a = (each[:, :, None, None] if each.ndim == 2 else each for each in inputs)
    exact = F.group_norm(x + a, groups, eps=1e-5) * w + b
    exact = F.silu(exact) if silu else exact
    exact.backward(dy.double())
    ours = [each.detach().float().requires_grad_() for each in inputs]
    y, _, _ = fused_norm.norm(*ours, groups=groups, eps=1e-5, silu=silu)
    y.backward(dy)
    assert (y - exact).abs().max() < 3e-6
    for mine, each in zip(ours, inputs):
        assert (mine.grad - each.grad).abs().max() < 1e-5 * each.grad.abs().max()

x, w, b = (torch.randn(shape, requires_grad=True) for shape in ((2, 8, 4, 4), (8,), (8,)))  # rows for all samples alike
answers = [fused_norm.norm(x, w, b, None, groups=4, eps=1e-5, silu=True)[0], F.silu(F.group_norm(x, 4, w, b, 1e-5))]
for mine, theirs in zip(*(torch.autograd.grad(y.cos().sum(), (x, w, b)) for y in answers)):
    assert (mine - theirs).abs().max() < 1e-5

key = torch.arange(2) * 77 - 5
keys, mask = layer_keys(key, salt=3), dropout_mask(x.shape, key, p=0.3, salt=3)
plain = torch.where(mask, F.silu(F.group_norm(x, 4, w, b, 1e-5)) / 0.7, 0)
answers = [fused_norm.norm(x, w, b, None, groups=4, eps=1e-5, silu=True, keys=keys, p=0.3)[0], plain]
assert torch.equal(answers[0] == 0, answers[1] == 0)
for mine, theirs in zip(*(torch.autograd.grad(y.cos().sum(), (x, w, b)) for y in answers)):
    assert (mine - theirs).abs().max() < 1e-5

for first, second, groups in [(8, 4, 3), (40, 56, 8), (24, 30, 3)]:  # two maps as one, and what flows past
    shapes = ((2, first, 9, 7), (2, second, 9, 7), (first + second,), (first + second,))
    x, o, w, b = (torch.randn(shape, requires_grad=True) for shape in shapes)
    c = torch.randn(3, 2, first + second, 9, 7)
    both = torch.cat((x, o), dim=1)
    plain = (F.silu(F.group_norm(both, groups, w, b, 1e-5)) * c[0]).sum() + (both.sin() * c[1]).sum()
    y, x2, o2 = fused_norm.norm(x, w, b, None, groups=groups, eps=1e-5, silu=True, other=o)
    ours = (y * c[0]).sum() + (torch.cat((x2, o2), dim=1).sin() * c[1]).sum()
    assert abs(ours - plain) < 1e-3
    for mine, theirs in zip(*(torch.autograd.grad(l, (x, o, w, b)) for l in (ours, plain))):
        assert (mine - theirs).abs().max() < 3e-5
    y, x2, o2 = fused_norm.norm(x, w, b, None, groups=groups, eps=1e-5, silu=True, other=o)
    plain = (F.silu(F.group_norm(torch.cat((x, o), dim=1), groups, w, b, 1e-5)) * c[0]).sum() + o.sin().sum()
    ours = (y * c[0]).sum() + o2.sin().sum()
    for mine, theirs in zip(*(torch.autograd.grad(l, (x, o)) for l in (ours, plain))):  # only one of them goes past
        assert (mine - theirs).abs().max() < 3e-5

for options in ({"up": 2}, {"down": 2}, {"padding": 2}):
    for size in (4, 6):
        layer, x = Fir(**options), torch.randn(2, 5, size, size, requires_grad=True)
        answers = [layer(x), fused.fir(x, up=layer.up, down=layer.down, padding=layer.padding)]
        assert answers[0].shape == answers[1].shape and (answers[0] - answers[1]).abs().max() < 1e-6
        ours, theirs = (torch.autograd.grad(y.cos().sum(), x)[0] for y in answers)
        assert (ours - theirs).abs().max() < 1e-5

for layer, kernel in ((BoxUp(), fused.box_up), (BoxDown(), fused.box_down)):
    x = torch.randn(2, 5, 6, 8, requires_grad=True)
    answers = [layer(x), kernel(x)]
    assert answers[0].shape == answers[1].shape and (answers[0] - answers[1]).abs().max() < 1e-6
    ours, theirs = (torch.autograd.grad(y.cos().sum(), x)[0] for y in answers)
    assert (ours - theirs).abs().max() < 1e-5

for scale, size in ((0.5, 3), (1.0, 13)):
    x, h, bias = (torch.randn(shape, requires_grad=True) for shape in ((2, 6, size, size), (2, 6, size, size), (6,)))
    answers = [(x + h + bias[:, None, None]) * scale, fused.join(x, h, bias, scale=scale)]
    assert (answers[0] - answers[1]).abs().max() < 1e-6
    for mine, theirs in zip(*(torch.autograd.grad(y.cos().sum(), (x, h, bias), retain_graph=True) for y in answers)):
        assert (mine - theirs).abs().max() < 1e-5 * max(1, theirs.abs().max())  # the bias's is a sum of many
    # a norm of it uses the sums that it remembers
    x2 = torch.randn(2, 6, size, size)
    assert fused.recall(answers[1]) is not None
    with torch.inference_mode():
        made = fused.join(x.detach(), h.detach(), bias.detach(), scale=scale)
        fused_norm.norm(made, torch.ones(6), torch.zeros(6), None, groups=2, eps=1e-5, silu=True)
    with torch.no_grad():
        made = fused.join(x, h, bias, scale=scale)
        made += 1
    assert fused.recall(made) is None  # they would be those of another map
    (past,) = torch.autograd.grad(fused_norm.norm(x, bias, bias, None, groups=2, eps=1e-5, silu=True)[1].sum(), x)
    assert torch.equal(past, torch.ones_like(x))  # only what flows past it was used
    plain = F.group_norm(torch.cat((answers[0] + 5, x2), dim=1), 4, eps=1e-5)
    moved = fused.join(x, h, bias + 5 / scale, scale=scale)
    ours = fused_norm.norm(moved, torch.ones(12), torch.zeros(12), None, groups=4, eps=1e-5, silu=False, other=x2)[0]
    assert (ours - plain).abs().max() < 1e-4
    ours = fused_norm.norm(x2, torch.ones(12), torch.zeros(12), None, groups=4, eps=1e-5, silu=False, other=moved)[0]
    plain = F.group_norm(torch.cat((x2, answers[0] + 5), dim=1), 4, eps=1e-5)
    assert (ours - plain).abs().max() < 1e-4
"""


@pytest.mark.skipif(not have_triton(), reason="needs Triton")
def test_the_kernels_compute_what_the_layers_do():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", COMPARE], check=True, env=environment)


def test_a_norm_adds_scales_shifts_and_activates():
    torch.manual_seed(0)
    norm, x = Norm(3, 6), torch.randn(2, 6, 4, 4)
    torch.nn.init.normal_(norm.weight), torch.nn.init.normal_(norm.bias)
    added, scale, shift = (torch.randn(2, 6) for _ in range(3))
    y = F.group_norm(x + added[:, :, None, None], 3, norm.weight, norm.bias)
    y = y * (1 + scale[:, :, None, None]) + shift[:, :, None, None]
    assert torch.allclose(norm(x, added=added, scale=scale, shift=shift, silu=True), F.silu(y), atol=1e-6)
    assert torch.allclose(norm(x, added=added[0]), norm(x + added[0, :, None, None]))
    assert torch.equal(norm(x), F.group_norm(x, 3, norm.weight, norm.bias))
