"""The optimiser's step and the averages in one kernel, tried by Triton's interpreter where Triton is installed."""

import os
import subprocess
import sys

import pytest
import torch
from helpers import tiny_config

from ict.model import ModelSpec, build_model
from ict.nets.kernels import have_triton
from ict.ranks import ALONE
from ict.training.loop import new_state
from ict.training.update import Update

COMPARE = """
import copy
import torch
from torch import nn
from ict.training import fused

torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(3, 40, 3), nn.Conv2d(40, 40, 1), nn.Linear(70, 70)).to(memory_format=torch.channels_last)
theirs = copy.deepcopy(net)
first, second = copy.deepcopy(net), copy.deepcopy(net)
optimiser = torch.optim.RAdam(theirs.parameters(), lr=0.01, betas=(0.9, 0.999), eps=1e-8)
m, v = ([torch.zeros_like(p) for p in net.parameters()] for _ in range(2))
expected = [[p.detach().double() for p in net.parameters()] for _ in range(2)]
table, yes, no = fused.Table(), torch.ones((), dtype=torch.int32), torch.zeros((), dtype=torch.int32)
for step in range(1, 9):  # the first five do not use v
    for ours, other in zip(net.parameters(), theirs.parameters()):
        other.grad = torch.randn_like(other)
        ours.grad = 64 * other.grad
    optimiser.step()
    rows = [list(net.parameters()), [p.grad for p in net.parameters()], m, v]
    rows += [list(first.parameters()), list(second.parameters())]
    table.find(rows)
    there = [[tensor.detach().clone() for tensor in row] for row in rows]
    for good in (no, yes):
        assert all(torch.equal(a, b) for old, row in zip(there, rows) for a, b in zip(old, row))
        fused.update(table, good, step=step, lr=0.01, betas=(0.9, 0.999), eps=1e-8, scale=64.0, rates=[0.5, 0.125])
    for k, rate in enumerate((0.5, 0.125)):
        expected[k] = [a + rate * (p.detach().double() - a) for a, p in zip(expected[k], theirs.parameters())]
    for ours, other in zip(net.parameters(), theirs.parameters()):
        assert (ours - other).abs().max() < 1e-6
    for name, row in (("exp_avg", m), ("exp_avg_sq", v)):
        truth = [optimiser.state[p][name] for p in theirs.parameters()]
        assert all((a - b).abs().max() < 2e-6 * b.abs().max() for a, b in zip(row, truth)), name
    for average, truth in zip((first, second), expected):
        assert all((a - b).abs().max() < 1e-6 for a, b in zip(average.parameters(), truth))

steps = [torch.randn_like(p) for p in net.parameters()]
before = [p.detach().clone() for p in net.parameters()]
kept = [[p.detach().clone() for p in each.parameters()] for each in (first, second)]
table = fused.Table()
table.find([list(net.parameters()), steps, list(first.parameters()), list(second.parameters())])
fused.move(table, no, lr=0.01, rates=[0.5, 0.125])
assert all(torch.equal(p, old) for p, old in zip(net.parameters(), before))
assert all(torch.equal(p, old) for each, row in zip((first, second), kept) for p, old in zip(each.parameters(), row))
fused.move(table, yes, lr=0.01, rates=[0.5, 0.125])
for k, p in enumerate(net.parameters()):
    assert (p - (before[k] - 0.01 * steps[k])).abs().max() < 1e-6
    for average, old, rate in zip((first, second), kept, (0.5, 0.125)):
        assert (list(average.parameters())[k] - (old[k] + rate * (p - old[k]))).abs().max() < 1e-6
"""


@pytest.mark.skipif(not have_triton(), reason="needs Triton")
def test_the_kernel_is_radam_and_the_averages():
    subprocess.run([sys.executable, "-c", COMPARE], check=True, env={**os.environ, "TRITON_INTERPRET": "1"})


@pytest.mark.parametrize("optimiser", ["radam", "muon"])
def test_gradients_that_are_scaled_give_the_same_update(optimiser):
    """To the bit, as the scale is a power of two."""
    config = tiny_config(training={"batch": 8, "optimiser": optimiser})
    found = []
    for scale in (1.0, 1024.0):
        model = build_model(ModelSpec.from_config(config, tuple("0123456789")))
        state = new_state(config, model)
        update = Update(config, model, state.optimiser, state.averages, None, ranks=ALONE)
        generator = torch.Generator().manual_seed(0)
        for number in range(8):
            for parameter in model.parameters():
                parameter.grad = scale * torch.randn(parameter.shape, generator=generator)
            update.prepare(scale=scale)
            update.launch(torch.tensor(True), number=number)
            update.settle(taken=True)
        found.append([*model.parameters(), *state.averages[0].weights.values()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("optimiser", ["radam", "muon"])
def test_a_step_that_is_prepared_and_not_taken_leaves_nothing_behind(optimiser):
    config = tiny_config(training={"optimiser": optimiser})
    found = []
    for spoilt in (False, True):
        model = build_model(ModelSpec.from_config(config, tuple("0123456789")))
        state = new_state(config, model)
        update = Update(config, model, state.optimiser, state.averages, None, ranks=ALONE)
        generator = torch.Generator().manual_seed(0)
        for number in range(4):
            if spoilt:
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, float("inf"))
                update.prepare(scale=64.0)
                update.launch(torch.tensor(False), number=number)
                update.settle(taken=False)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            update.prepare(scale=64.0)
            update.launch(torch.tensor(True), number=number)
            update.settle(taken=True)
        kept = [tensor for values in state.optimiser.state.values() for tensor in values.values()]
        found.append([*model.parameters(), *state.averages[0].weights.values(), *kept])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
