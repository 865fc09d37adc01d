"""When an answer is recorded and when computed; that both give the same bits is for a GPU to say (test_gpu.py)."""

import copy
import gc
from contextlib import nullcontext

import pytest
import torch
from helpers import tiny_config

from ict import recording
from ict.config import NoiseConfig
from ict.model import ModelSpec, build_model
from ict.recording import Calls, answer, can_record, kind_of, take, use_recordings
from ict.sampling import Generator


class Played:
    """A recording that gives its own number for an answer."""

    made = 0

    def __init__(self, model, given, pool):
        Played.made += 1
        self.number = Played.made

    def play(self, given):
        return self.number


class Computed(torch.nn.Module):
    """A model whose answer is 0."""

    precision, noise = "float32", NoiseConfig()

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)

    def forward(self, *given):
        return 0


@pytest.fixture
def answers(monkeypatch):
    """Answers to calls with so many images: 0 where they were computed, else the number of the recording."""
    monkeypatch.setattr(recording, "Recording", Played)
    monkeypatch.setattr(Played, "made", 0)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    calls, model = Calls(None), Computed()
    return lambda *counts: [take(calls, model, (torch.zeros(n, 1), torch.ones(n))) for n in counts]


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([8, 8, 8, 8], [0, 1, 1, 1]),
        ([8, 8, 3, 8, 8, 3, 3], [0, 1, 0, 1, 1, 2, 2]),  # a rest at the end of each set
        ([8, 8, 1, 2, 8, 3, 4, 8, 5, 8, 1], [0, 1, 0, 0, 1, 0, 0, 1, 0, 1, 0]),  # what is used is kept
        ([8, 8, 1, 2, 3, 4, 8, 8], [0, 1, 0, 0, 0, 0, 0, 2]),  # and what is not is forgotten
    ],
)
def test_the_second_call_of_a_kind_is_recorded(answers, counts, expected):
    assert answers(*counts) == expected


@pytest.fixture
def no_gpu(monkeypatch):
    """Calls on a CPU are taken for calls on a GPU."""
    monkeypatch.setattr(recording, "can_record", lambda model, x: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the usual one")
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)


def test_what_cannot_be_recorded_is_computed_and_not_tried_again(no_gpu, monkeypatch):
    tries = []

    def refuse(*given):
        tries.append(1)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(recording, "Recording", refuse)
    model = Computed()
    assert [answer(model, torch.zeros(8, 1), torch.ones(8)) for _ in range(5)] == [0] * 5
    assert len(tries) == 1


def test_a_call_beside_another_threads_is_computed(answers, no_gpu, monkeypatch):
    model, x, sigma = Computed(), torch.zeros(8, 1), torch.ones(8)
    assert [answer(model, x, sigma) for _ in range(3)] == [0, 1, 1]
    with recording._known[model].lock:
        assert answer(model, x, sigma) == 0
    assert answer(model, x, sigma) == 1
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "another")  # whose kernels would run at the same time
    assert [answer(model, x, sigma) for _ in range(3)] == [0, 0, 0]


def test_what_is_known_of_a_model_goes_with_it():
    model = Computed()
    recording._known.setdefault(model, Calls(None))
    before = len(recording._known)
    del model
    gc.collect()
    assert len(recording._known) == before - 1


def small_model():
    config = tiny_config(net={"dropout": 0.3})
    return build_model(ModelSpec.from_config(config, tuple("0123456789"))).eval()


def move(model):
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


CHANGES = {
    "nothing": (lambda model: None, True),
    "the weights": (lambda model: [parameter.data.mul_(2) for parameter in model.parameters()], True),
    "where they lie": (move, False),
    "noise levels": (lambda model: setattr(model, "noise", NoiseConfig(sigma_min=0.01)), False),
    "precision": (lambda model: setattr(model, "precision", "bf16"), False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_recording_serves_other_weights_but_not_another_net(change):
    model, given = small_model(), (torch.zeros(2, 1, 8, 8), torch.ones(2))
    before = kind_of(model, given)
    act, same = CHANGES[change]
    act(model)
    assert (kind_of(model, given) == before) is same


@pytest.mark.parametrize(
    "given",
    [
        (torch.zeros(3, 1, 8, 8), torch.ones(3)),
        (torch.zeros(2, 1, 8, 8), torch.ones(2, dtype=torch.float64)),
        (torch.zeros(2, 1, 8, 8), torch.ones(2), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(2, 8, 8, 1).movedim(3, 1), torch.ones(2)),
    ],
)
def test_calls_of_other_shapes_are_of_another_kind(given):
    model = small_model()
    assert kind_of(model, given) != kind_of(model, (torch.zeros(2, 1, 8, 8), torch.ones(2)))


def test_calls_in_another_mode_are_of_another_kind():
    """A buffer that was made in inference mode cannot be written outside of it."""
    model, given = small_model(), (torch.zeros(2, 1, 8, 8), torch.ones(2))
    kinds = [kind_of(model, given)]
    with torch.inference_mode():
        kinds.append(kind_of(model, given))
    with torch.autocast("cpu"):
        kinds.append(kind_of(model, given))
    assert len(set(kinds)) == 3


class OnGPU:
    """As much of a tensor as `can_record` asks."""

    is_cuda = True


@pytest.mark.parametrize(
    "case", ["as it is", "training", "hook", "inner hook", "compiled", "switched off", "capturing"]
)
def test_only_a_call_that_does_nothing_but_compute_is_recorded(case, monkeypatch):
    model = small_model()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: case == "capturing")
    if case == "training":
        model.train()
    if case == "hook":
        model.register_forward_pre_hook(lambda *_: None)
    if case == "inner hook":
        list(model.modules())[-1].register_forward_hook(lambda *_: None)
    if case == "compiled":
        model.net.compile()
    try:
        use_recordings(case != "switched off")
        assert can_record(model, OnGPU()) is (case == "as it is")  # type: ignore
        assert not can_record(model, torch.zeros(1))
    finally:
        use_recordings(True)


def test_samples_on_a_cpu_are_computed_and_a_model_that_drew_can_be_copied():
    config = tiny_config()
    spec = ModelSpec.from_config(config, tuple("0123456789"))
    generator = Generator(build_model(spec), spec)
    first = generator.sample(4, steps=2)
    assert torch.equal(first, generator.sample(4, steps=2)) and generator.model not in recording._known
    copy.deepcopy(generator.model)
