"""Recorded steps, tried on a CPU: a recording is stood in for by the call that it recorded, made again at each play."""

import pytest
import torch
from helpers import tiny_config

from ict.data import load_images
from ict.model import ModelSpec, build_model
from ict.objectives import OBJECTIVES
from ict.objectives.sct import SimplifiedConsistencyTraining
from ict.ranks import ALONE
from ict.training import loop
from ict.training.budget import Budget
from ict.training.guard import Guard
from ict.training.loop import new_state, train
from ict.training.passes import Passes


class FakeGraph:
    """Plays the recorded call with what its inputs hold by then, into the memory that the recording left."""

    open: "FakeGraph | None" = None
    made = 0

    def replay(self) -> None:
        loss, gradient, _ = Passes.compute(self.passes, *self.arguments)
        self.left[0].copy_(loss), self.left[1].copy_(gradient)
        for kept, parameter in zip(self.gradients, self.passes.parameters, strict=True):
            kept.copy_(parameter.grad)


class Recorder(Passes):
    """Records on a CPU; what a recording leaves is not a number before it is played."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.records = hasattr(self.objective, "phase")

    def compute(self, *arguments):
        found, graph = super().compute(*arguments), FakeGraph.open
        if graph is not None:
            FakeGraph.made += 1
            graph.passes, graph.arguments, graph.left = self, arguments, found[:2]
            graph.gradients = [parameter.grad for parameter in self.parameters]
            for tensor in (*found[:2], *graph.gradients):
                tensor.fill_(float("nan"))
        return found


def fake_record(work):
    graph = FakeGraph.open = FakeGraph()
    try:
        return graph, work()
    finally:
        FakeGraph.open = None


def losses(config, *, recorded: bool, monkeypatch) -> list[tuple[float, float, dict]]:
    found, device = [], torch.device("cpu")
    with monkeypatch.context() as patch:
        if recorded:
            patch.setattr(loop, "Passes", Recorder)
            patch.setattr("ict.training.passes.record", fake_record)
        state = new_state(config, build_model(ModelSpec.from_config(config, tuple("0123456789"))))
        guard = Guard(config, ALONE, device)
        for _ in train(config, state, load_images(config.data), Budget(steps=16), guard=guard):
            found.append((state.loss.item(), state.gradient.item(), dict(state.stats)))
            state.attempt = int(state.step > 10)  # another seed, as after a way back
            guard.state.scale = 2.0**10 if state.step > 5 else 2.0**12
    return found


@pytest.mark.parametrize(
    ("kind", "precision", "pieces"),
    [("ict", "float32", 2), ("ict", "fp16", 1), ("ect", "bf16", 1), ("edm", "float32", 1), ("sct", "float32", 1)],
)
def test_a_recorded_step_is_the_step_while_n_scale_and_seed_change(kind, precision, pieces, monkeypatch):
    config = tiny_config(
        objective={"kind": kind, "curriculum": "linear", "s0": 2, "s1": 8},
        training={"accumulate": pieces},
        speed={"precision": precision},
    )
    FakeGraph.made = 0
    ours, exact = (losses(config, recorded=each, monkeypatch=monkeypatch) for each in (True, False))
    assert ours == exact
    assert FakeGraph.made == 2  # one for each seed, whatever N is
    if kind == "ict":
        assert ours[0][2]["levels"] == 3 and ours[-1][2]["levels"] == 8


@pytest.mark.parametrize("kind", ["ict", "continuous"])
def test_a_recording_of_denoising_is_not_played_for_what_follows(kind, monkeypatch):
    """Both phases of `continuous` have the same inputs: only their kind tells them apart."""
    config = tiny_config(objective={"kind": kind, "denoise": 0.25, "distance": "squared_l2", "s0": 2, "s1": 8})
    FakeGraph.made = 0
    ours, exact = (losses(config, recorded=each, monkeypatch=monkeypatch) for each in (True, False))
    assert ours == exact and FakeGraph.made == 3  # denoising, then one for each seed


@pytest.mark.parametrize("extra", [{"score": "data"}, {"coupling": "batch", "couple_above": 0.1}])
def test_steps_that_look_at_the_whole_set_or_batch_can_be_recorded(extra, monkeypatch):
    config = tiny_config(objective={"curriculum": "linear", "s0": 2, "s1": 8, **extra}, data={"classes": 0})
    FakeGraph.made = 0
    ours, exact = (losses(config, recorded=each, monkeypatch=monkeypatch) for each in (True, False))
    assert ours == exact and FakeGraph.made == 2


class Refilled(SimplifiedConsistencyTraining):
    """Keeps its phase in one tensor that it fills anew."""

    def __init__(self, config):
        super().__init__(config)
        self.buffer = torch.zeros(())

    def phase(self, step):
        found = super().phase(step)
        self.buffer.copy_(found.tensors["share"])
        return found._replace(tensors={"share": self.buffer})


def test_a_phase_may_fill_one_buffer_again_and_again(monkeypatch):
    monkeypatch.setitem(OBJECTIVES, "refilled", Refilled)
    config = tiny_config(objective={"kind": "refilled", "warmup": 1.0})
    ours, exact = (losses(config, recorded=each, monkeypatch=monkeypatch) for each in (True, False))
    assert ours == exact and len({loss for loss, _, _ in ours}) > 10


def test_a_step_that_cannot_be_recorded_is_computed_and_said(monkeypatch):
    def refuse(work):
        raise KeyError("operation not permitted when stream is capturing")

    config, said = tiny_config(training={"steps": 4}), []
    monkeypatch.setattr(loop, "Passes", Recorder)
    monkeypatch.setattr("ict.training.passes.record", refuse)
    state = new_state(config, build_model(ModelSpec.from_config(config, tuple("0123456789"))))
    for _ in train(config, state, load_images(config.data), Budget(steps=4), warn=said.append):
        assert state.loss.isfinite()
    assert len(said) == 1 and "cannot be recorded" in said[0] and "KeyError" in said[0]
