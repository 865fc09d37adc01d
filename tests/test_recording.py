"""When an answer is recorded and when computed; that both give the same bits is for a GPU to say (test_gpu.py)."""

import contextlib
import copy
import gc

import pytest
import torch
from helpers import tiny_config

from ict import recording
from ict.config import NoiseConfig
from ict.model import ModelSpec, build_model
from ict.precision import full_precision
from ict.recording import Calls, answer, can_record, kind_of, record, use_recordings
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

    precision, noise, kind = "float32", NoiseConfig(), "consistency"

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self.eval()

    def forward(self, *given):
        return 0


@pytest.fixture
def no_gpu(monkeypatch):
    """Calls on a CPU are taken for calls on a GPU."""
    monkeypatch.setattr(recording, "Recording", Played)
    monkeypatch.setattr(Played, "made", 0)
    monkeypatch.setattr(recording, "can_record", lambda x: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the usual one")
    handles = iter(range(1000))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))


def ask(model, *counts):
    """Answers to calls with so many images: 0 where they were computed, else the number of the recording."""
    return [answer(model, torch.zeros(n, 1), torch.ones(n)) for n in counts]


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([8, 8, 8, 8], [0, 0, 1, 1]),  # the second is computed and recorded
        ([8, 8, 3, 8, 8, 3, 3], [0, 0, 0, 1, 1, 0, 2]),  # a rest at the end of each set
        ([8, 8, 8, 1, 2, 8, 3, 4, 8, 5, 8, 1, 1], [0, 0, 1, 0, 0, 1, 0, 0, 1, 0, 1, 0, 0]),  # what is used is kept
        ([8, 8, 8, 1, 2, 3, 4, 8, 8, 8], [0, 0, 1, 0, 0, 0, 0, 0, 0, 2]),  # and what is not is forgotten
    ],
)
def test_the_second_call_of_a_kind_is_recorded(no_gpu, counts, expected):
    assert ask(Computed(), *counts) == expected


def calls_of(model) -> Calls:
    return next(iter(recording._known[model].values()))


def test_recordings_share_their_memory_as_long_as_there_are_any(no_gpu, monkeypatch):
    pools = []

    class Noted(Played):
        def __init__(self, model, given, pool):
            super().__init__(model, given, pool)
            pools.append(pool)

    monkeypatch.setattr(recording, "Recording", Noted)
    model = Computed()
    ask(model, 8, 8, 3, 3)  # two recordings
    ask(model, 1, 2, 4, 5)  # push both out
    ask(model, 5)
    assert pools == [0, 0, 1]


def test_a_kind_that_cannot_be_recorded_is_computed_and_not_tried_again(no_gpu, monkeypatch):
    tries = []

    def refuse(model, given, pool):
        if len(given[0]) == 3:
            return Played(model, given, pool)
        tries.append(1)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(recording, "Recording", refuse)
    model = Computed()
    with pytest.warns(UserWarning, match="cannot be recorded and will be slower .RuntimeError: operation not"):
        assert ask(model, *[8] * 5) == [0] * 5
    assert len(tries) == 1
    assert ask(model, 3, 3, 3, 8, 3) == [0, 0, 1, 0, 1]  # others are
    before = calls_of(model).pool
    monkeypatch.setattr(recording, "Recording", lambda *_: (_ for _ in ()).throw(RuntimeError("no")))
    with pytest.warns(UserWarning, match="cannot be recorded"):
        ask(model, 5, 5)
    assert calls_of(model).pool != before  # which torch would not record to any more


def test_a_call_beside_another_threads_is_computed(no_gpu, monkeypatch):
    model = Computed()
    assert ask(model, 8, 8, 8) == [0, 0, 1]
    with calls_of(model).lock:
        assert ask(model, 8) == [0]
    assert ask(model, 8) == [1]


def test_each_stream_has_its_own_recordings_and_the_first_goes_for_a_third(no_gpu, monkeypatch):
    """Kernels of two streams run at the same time."""
    model = Computed()
    for number, stream in enumerate(("the usual one", "another", "the usual one", "a third", "the usual one")):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda stream=stream: stream)
        assert ask(model, 8, 8, 8) == ([1, 1, 1] if number == 2 else [0, 0, (1, 2, 0, 3, 4)[number]])
        pools = [calls.pool for calls in recording._known[model].values()]
        assert len(pools) == len(set(pools)) == min(2, number + 1)


def test_an_answer_that_has_no_room_beside_the_recordings_gets_theirs(no_gpu, monkeypatch):
    model, other, tries = Computed(), Computed(), []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    ask(other, 8, 8)

    def full(*given):
        tries.append(recording._recording.locked())
        if other in recording._known:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 0

    model.forward = full
    assert ask(model, 1000) == [0] and tries == [False, False]
    model.forward = lambda *given: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError):  # there is nothing to give
        ask(model, 2000)


def test_what_is_known_of_a_model_goes_with_it(no_gpu):
    model = Computed()
    ask(model, 8, 8)
    before = len(recording._known)
    del model
    gc.collect()
    assert len(recording._known) == before - 1


def test_recordings_are_given_back_when_they_are_switched_off_or_the_model_moves(no_gpu):
    model = Computed()
    ask(model, 8, 8)
    use_recordings(False)
    use_recordings(True)
    assert model not in recording._known
    config = tiny_config()
    spec = ModelSpec.from_config(config, tuple("0123456789"))
    generator = Generator(build_model(spec), spec)
    recording._known[generator.model] = {}
    generator.to("cpu")
    assert generator.model not in recording._known


def small_model():
    config = tiny_config(net={"dropout": 0.3})
    return build_model(ModelSpec.from_config(config, tuple("0123456789"))).eval()


def move(model):
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def turn(model):
    """The same memory, read in another order."""
    weights = next(parameter for parameter in model.parameters() if parameter.ndim == 4 and parameter.shape[1] > 1)
    flat = weights.data.flatten()
    weights.data = flat.view(*(weights.shape[i] for i in (0, 2, 3, 1))).permute(0, 3, 1, 2)


def exchange(model):
    model.net = copy.deepcopy(model.net)


CHANGES = {
    "nothing": (lambda model: None, True),
    "the weights": (lambda model: [parameter.data.mul_(2) for parameter in model.parameters()], True),
    "where they lie": (move, False),
    "their order": (turn, False),
    "another net": (exchange, False),
    "a part without weights": (lambda model: setattr(model.net, "more", torch.nn.Identity()), False),
    "a buffer": (lambda model: model.register_buffer("more", torch.zeros(1)), False),
    "noise levels": (lambda model: setattr(model, "noise", NoiseConfig(sigma_min=0.01)), False),
    "what it learned": (lambda model: setattr(model, "kind", "diffusion"), False),
    "precision": (lambda model: setattr(model, "precision", "bf16"), False),
}
GIVEN = (torch.zeros(2, 1, 8, 8), torch.ones(2))


@pytest.mark.parametrize("change", CHANGES)
def test_a_recording_serves_other_weights_but_not_another_net(change):
    model = small_model()
    before = kind_of(model, GIVEN)
    act, same = CHANGES[change]
    act(model)
    assert before is not None and (kind_of(model, GIVEN) == before) is same


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
    assert kind_of(model, given) != kind_of(model, GIVEN)


@contextlib.contextmanager
def setting(owner, name, value):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES = {
    "inference": torch.inference_mode,  # a buffer that was made in it cannot be written outside of it
    "deterministic": deterministic,
    "products": lambda: setting(torch.backends.cuda.matmul, "fp32_precision", "tf32"),  # torch's newer switches
    "cuDNN": lambda: setting(torch.backends.cudnn, "enabled", False),
    "convolutions": lambda: setting(torch.backends.cudnn.conv, "fp32_precision", "ieee"),
}


@pytest.mark.parametrize("mode", MODES)
def test_calls_in_another_mode_are_of_another_kind(mode):
    model = small_model()
    before = kind_of(model, GIVEN)
    with MODES[mode]():
        assert kind_of(model, GIVEN) != before
    assert kind_of(model, GIVEN) == before


ACTS = {
    "as it is": lambda model: None,
    "training": lambda model: model.train(),
    "a part in training": lambda model: list(model.modules())[-1].train(),
    "hook": lambda model: model.register_forward_pre_hook(lambda *_: None),
    "inner hook": lambda model: list(model.modules())[-1].register_forward_hook(lambda *_: None),
    "compiled": lambda model: model.net.compile(),
    "compiled whole": lambda model: model.compile(),
    "compiled by torch": lambda model: setattr(model, "net", torch.compile(model.net)),
}


@pytest.mark.parametrize("act", ACTS)
def test_only_a_model_that_does_nothing_but_compute_is_recorded(act):
    model = small_model()
    ACTS[act](model)
    assert (kind_of(model, GIVEN) is not None) is (act == "as it is")


class OnGPU:
    """As much of a tensor as `can_record` asks."""

    is_cuda, device = True, torch.device("cpu")


@pytest.mark.parametrize("case", ["as it is", "switched off", "capturing", "autocast", "full precision", "hook"])
def test_only_a_call_that_nothing_around_it_changes_is_recorded(case, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: case == "capturing")
    use_recordings(case != "switched off")
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: None) if case == "hook" else None
    around = {"autocast": lambda: torch.autocast("cpu"), "full precision": full_precision}
    try:
        with around.get(case, contextlib.nullcontext)():
            assert can_record(OnGPU()) is (case == "as it is")  # type: ignore
            assert not can_record(torch.zeros(1))
    finally:
        use_recordings(True)
        if hook is not None:
            hook.remove()


class FakeStream(str):
    device = "cpu"


class FakeCUDA:
    """As much of torch.cuda as `record` uses; a recording fails where it is told to, and leaves what torch leaves.

    That is, as seen on a GPU: `drawn` (the generator believes that its draws are recorded) until the next recording
    ends, and `pools` (into which memory is recorded) for ever. A newer torch ends the pool by itself.
    """

    def __init__(self, monkeypatch, fails=None):
        self.fails, self.current, self.streams, self.device, self.cleared = fails, "mine", [], 0, 0
        self.drawn, self.pools, self.released = False, [], []
        handles = iter(range(100))
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end_pool, raising=False)
        release = lambda device, pool: self.released.append((device, pool))  # noqa: E731
        monkeypatch.setattr(torch._C, "_cuda_releasePool", release, raising=False)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(recording, "_refused", [])
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.device)
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(self, "current", stream))
        self.made = iter(range(100))
        stream = lambda priority: FakeStream(f"of {self.device}, {next(self.made)}")  # noqa: E731
        monkeypatch.setattr(torch.cuda, "Stream", stream)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)
        monkeypatch.setattr(torch.cuda, "graph", self.graph)
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", self.clear, raising=False)
        monkeypatch.setattr(recording, "_streams", {})

    def clear(self):
        self.cleared += 1

    def end_pool(self, device, pool):
        if (device, pool) not in self.pools:
            raise RuntimeError("not currently recording to mempool_id")
        self.pools.remove((device, pool))

    @contextlib.contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def capture_begin(self, *, capture_error_mode):
        assert recording._recording.locked() and self.current == "of 0, 0"
        if self.fails == "mend":
            raise RuntimeError("cannot begin again")
        self.drawn = True

    def capture_end(self):
        self.drawn = False

    @contextlib.contextmanager
    def graph(self, graph, *, pool, stream, capture_error_mode):
        self.current, self.drawn = stream, True
        self.streams.append(stream)
        if self.fails == "begin":
            raise RuntimeError("cannot begin")
        self.pools.append((self.device, pool))
        if self.fails == "begin late":
            raise RuntimeError("cannot begin late")
        try:
            yield
        finally:
            if self.fails == "end newer":
                self.pools.remove((self.device, pool))
            if self.fails in ("end", "end newer", "mend"):
                raise RuntimeError(f"cannot {self.fails}")
            self.pools.remove((self.device, pool))
            self.drawn, self.current = False, "mine"


@pytest.mark.parametrize("pool", [None, "given"])
@pytest.mark.parametrize("fails", [None, "begin", "begin late", "work", "end", "end newer"])
def test_whatever_happens_to_a_recording_its_thread_goes_on_where_it_was_and_torch_is_whole(fails, pool, monkeypatch):
    cuda = FakeCUDA(monkeypatch, fails)

    def work():
        if fails == "work":
            raise RuntimeError("cannot work")
        return cuda.current

    with pytest.raises(RuntimeError, match=f"cannot {fails}") if fails else contextlib.nullcontext():
        assert record(work, pool=pool)[1] == "of 0, 0"
    assert cuda.current == "mine" and cuda.cleared == 1 and not recording._recording.locked()
    assert not cuda.drawn and not cuda.pools
    left = fails in ("begin late", "end")  # by torch, in the middle
    assert cuda.released == ([(0, pool or 0)] if left else []) and recording._refused == ([cuda] if left else [])


def test_a_recording_that_cannot_even_be_mended_tells_its_own_reason(monkeypatch):
    cuda = FakeCUDA(monkeypatch, "mend")
    with pytest.raises(RuntimeError, match="cannot mend"):
        record(lambda: None)
    assert cuda.current == "mine" and not recording._recording.locked()


def test_each_device_is_recorded_on_a_stream_of_its_own(monkeypatch):
    """On another device's stream nothing would be recorded, and the first answer be given for ever."""
    cuda = FakeCUDA(monkeypatch)
    for cuda.device in (0, 1, 1, 0):
        record(lambda: None)
    assert cuda.streams == ["of 0, 0", "of 1, 1", "of 1, 1", "of 0, 0"]


def test_samples_on_a_cpu_are_computed():
    config = tiny_config()
    spec = ModelSpec.from_config(config, tuple("0123456789"))
    generator = Generator(build_model(spec), spec)
    first = generator.sample(4, steps=2)
    assert torch.equal(first, generator.sample(4, steps=2)) and generator.model not in recording._known
