"""What must also hold on a GPU; skipped where there is none."""

import contextlib
import copy
import gc
import io
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import tiny_config
from rich.console import Console

from ict import recording, rng
from ict.bench import bench
from ict.config import NoiseConfig
from ict.data import Images, batch_indices, load_images
from ict.data.feed import open_feed
from ict.data.images import PixelFile
from ict.experiment import run
from ict.files import list_checkpoints
from ict.model import ConsistencyModel, ModelSpec, build_model
from ict.nets.dropout import Dropout, dropout_mask
from ict.nets.kernels import plain_layers
from ict.nets.layers import BoxDown, BoxUp, Fir
from ict.nets.norm import Norm
from ict.objectives import build_objective
from ict.objectives.base import Step
from ict.objectives.coupling import match
from ict.objectives.score import DataScore
from ict.ranks import ALONE
from ict.recipes import find_recipe, load_recipe
from ict.recording import _known
from ict.sampling import Generator, load
from ict.start import Start, StartSpec, fit
from ict.training.budget import Budget
from ict.training.guard import Guard
from ict.training.log import RunLog
from ict.training.loop import new_state, train
from ict.training.speed import set_up
from ict.training.update import Update

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def quiet() -> Console:
    return Console(file=io.StringIO())


def keys(n: int, step: int = 0) -> torch.Tensor:
    return rng.words(torch.arange(n, device="cuda"), 1, seed=0, step=step, stream=rng.Stream.DROPOUT)[:, 0]


def model_of(**net):
    config = tiny_config(net={"dropout": 0.3, **net})
    model = build_model(ModelSpec.from_config(config, tuple("0123456789"))).cuda().train()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return config, model


PARTS = {"score of 1,797 images": {"score": "data"}, "teacher": {"kind": "ect"}, "derivative": {"kind": "sct"}}


@pytest.mark.parametrize("part", PARTS)
def test_a_bench_times_the_parts_of_a_recorded_step(part):
    config = tiny_config(data={"classes": 0}, objective=PARTS[part], training={"batch": 8, "deterministic": False})
    found = bench(config, torch.device("cuda"), batch=None, steps=20, say=lambda text: None)
    assert 0 < found.parts[part] < 2 * found.step


@pytest.fixture
def computed(monkeypatch):
    """Samples drawn without recordings; cuDNN chooses the same algorithms every time."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr("ict.recording._wanted", True)

    def draw(generator: Generator, **asked) -> torch.Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ict.recording._wanted", False)
            return generator.sample(**asked)

    return draw


@pytest.fixture
def plays(monkeypatch):
    """The thread of each play of a recording."""
    seen, original = [], recording.Recording.play

    def noted(self, given):
        seen.append(threading.get_ident())
        return original(self, given)

    monkeypatch.setattr(recording.Recording, "play", noted)
    return seen


def generator_of(*, precision: str = "auto", device: str = "cuda", **net) -> Generator:
    config, model = model_of(**net)
    return Generator(model, ModelSpec.from_config(config, tuple("0123456789"))).to(device, precision=precision)


@pytest.mark.parametrize("precision", ["float32", "tf32", "fp16", "bf16"])
@pytest.mark.parametrize("kind", ["unet", "ncsnpp", "adm"])
def test_recorded_answers_are_the_same_to_the_bit(kind, precision, computed, plays):
    generator = generator_of(kind=kind, precision=precision)
    model = generator.model
    asked = {"n": 20, "batch": 8, "steps": 3}  # with a rest of 4
    expected = computed(generator, **asked)
    assert expected.std() > 0.01 and not torch.equal(expected, computed(generator, **asked, seed=1)) and not plays
    for played in (5, 9, 9):  # of nine calls: the first two of each kind are computed
        plays.clear()
        assert torch.equal(generator.sample(**asked), expected) and len(plays) == played
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    changed = computed(generator, **asked, label=3)
    assert not torch.equal(changed, expected)
    plays.clear()
    assert torch.equal(generator.sample(**asked, label=3), changed) and len(plays) == 9
    with torch.inference_mode():
        assert torch.equal(generator.sample(**asked, label=3), changed)
        assert torch.equal(generator.sample(**asked, label=3), changed)
    assert torch.equal(generator.sample(**asked, label=3), changed)  # and out of inference mode again


def test_recorded_answers_of_more_kinds_than_there_is_room_for(computed, plays):
    generator = generator_of()
    for n in (1, 2, 3, 4, 5, 6, 5, 6, 1, 1):
        expected = computed(generator, n=n, steps=3, seed=n)
        assert torch.equal(generator.sample(n=n, steps=3, seed=n), expected)
    assert len(plays) == 6 * 1 + 2 * 3 + 1 + 3


@pytest.mark.parametrize("kind", ["diffusion", "meanflow"])
def test_recorded_answers_of_other_kinds_of_models(kind, computed, plays):
    kinds = {"diffusion": {"kind": "edm"}, "meanflow": {"kind": "meanflow"}}
    net = {"intervals": True} if kind == "meanflow" else {}
    spec = ModelSpec.from_config(tiny_config(net=net, data={"classes": 0}, objective=kinds[kind]), ())
    assert spec.kind == kind
    model = build_model(spec)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    generator = Generator(model, spec).to("cuda")
    expected = computed(generator, n=8, steps=4)
    assert expected.std() > 0.01
    assert torch.equal(generator.sample(n=8, steps=4), expected) and len(plays) > 1


def test_recorded_answers_to_many_threads_are_each_its_own(computed, plays):
    """Of two models, neither of which was called before.

    What is expected comes from a new thread, too: each has its own memory of the algorithms that cuDNN's search has
    found, and this one's is full of what other tests searched for.
    """
    pair = [generator_of(), generator_of(kind="ncsnpp")]
    with ThreadPoolExecutor(1) as pool:
        expected = list(pool.map(lambda seed: computed(pair[seed % 2], n=8, steps=4, seed=seed), range(32)))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda seed: pair[seed % 2].sample(n=8, steps=4, seed=seed), range(32)))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    plays.clear()
    assert torch.equal(pair[0].sample(n=8, steps=4, seed=0), expected[0]) and len(plays) == 4
    assert all(False not in calls.kinds.values() for one in pair for calls in _known[one.model].values())


def test_a_net_that_cannot_be_recorded_is_computed_and_nothing_else_changes(computed, plays):
    class Waits(torch.nn.Module):
        """A net that asks the GPU for a number."""

        def forward(self, x, c_noise, label=None, key=None):
            return x * (2.0 if len(x) == 8 and x.sum().item() > 0 else 1.0)

    model = ConsistencyModel(Waits(), NoiseConfig(), image_shape=(1, 8, 8)).eval()
    model.register_parameter("nothing", torch.nn.Parameter(torch.zeros(1)))
    spec = ModelSpec.from_config(tiny_config(data={"classes": 0}), ())
    stream, generator = torch.cuda.current_stream(), Generator(model, spec).to("cuda")
    asked = [{"n": n, "steps": 4} for n in (8, 4, 2)]
    expected = [computed(generator, **each) for each in asked]
    assert torch.equal(generator.sample(**asked[1]), expected[1]) and len(plays) == 2  # before a refusal …
    with pytest.warns(UserWarning, match="cannot be recorded"):
        assert torch.equal(generator.sample(**asked[0]), expected[0])
    assert torch.cuda.current_stream() == stream and len(plays) == 2
    for each, right, count in zip(asked, expected, (2, 6, 8), strict=True):  # … and after it, the same net
        assert torch.equal(generator.sample(**each), right) and len(plays) == count
    plays.clear()
    torch.cuda.empty_cache()
    large = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    held = torch.cuda.memory_reserved()
    del large
    torch.cuda.empty_cache()  # which does nothing where torch believes that it still records
    assert torch.cuda.memory_reserved() <= held - (256 << 20)
    other = generator_of()  # whose weights are drawn, which fails there
    assert torch.equal(other.sample(n=8, steps=4), computed(other, n=8, steps=4)) and len(plays) == 2


def test_the_first_recording_may_be_in_inference_mode_and_the_next_outside():
    """In a process of its own: what the first of all makes, torch keeps."""
    script = """
import torch
from ict.recording import record
x = torch.ones(8, device="cuda")
for first in (True, False):
    with torch.inference_mode(first):
        x * 3  # once before, as `record` asks
        graph, left = record(lambda: x * 3)
        graph.replay()
        assert left.sum().item() == 24 and torch.randn(4, device="cuda").abs().sum() > 0
"""
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", script], check=True, timeout=120)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_recorded_answers_on_two_devices(computed, plays):
    for device in ("cuda:0", "cuda:1"):
        generator = generator_of(device=device)
        for seed in range(3):
            assert torch.equal(generator.sample(n=8, steps=3, seed=seed), computed(generator, n=8, steps=3, seed=seed))
    assert len(plays) == 14


def test_the_memory_of_a_recording_goes_with_its_model(computed, plays):

    def held_after() -> int:
        generator = generator_of()
        generator.sample(n=1024, batch=256, steps=2)
        during = torch.cuda.memory_reserved()
        del generator
        gc.collect()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() < during
        return torch.cuda.memory_reserved()

    first = held_after()
    assert held_after() <= first and len(plays) == 12


def test_noise_is_the_cpus():
    samples = torch.arange(64)
    on_gpu = rng.normal(samples.cuda(), (3, 32, 32), seed=5, step=7).cpu()
    on_cpu = rng.normal(samples, (3, 32, 32), seed=5, step=7)
    assert (on_gpu == on_cpu).float().mean() > 0.9999 and (on_gpu - on_cpu).abs().max() < 1e-6


def test_masks_are_the_cpus():
    shape = torch.Size((8, 16, 8, 8))
    assert torch.equal(
        dropout_mask(shape, keys(8), p=0.3, salt=2).cpu(), dropout_mask(shape, keys(8).cpu(), p=0.3, salt=2)
    )


def test_student_and_teacher_share_their_masks():
    config, model = model_of()
    dropped = []
    for layer in model.modules():
        if isinstance(layer, Dropout):
            layer.register_forward_hook(lambda _m, _i, out: dropped.append(out == 0))
    samples = torch.arange(8, device="cuda")
    step = Step(seed=0, number=3, done=0, total=10, samples=samples)
    with plain_layers():
        build_objective(config)(model, torch.rand(8, 1, 8, 8, device="cuda"), samples, step)
    half = len(dropped) // 2
    assert half == 8
    assert all(torch.equal(a, b) for a, b in zip(dropped[:half], dropped[half:], strict=True))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_compiled_student_and_teacher_share_their_masks(layout):
    torch._dynamo.reset()
    _, model = model_of(channels=32)
    model = model.to(memory_format=layout)
    compiled = torch.compile(model, fullgraph=True)
    x, sigma = torch.randn(8, 1, 8, 8, device="cuda"), torch.full((8,), 2.0, device="cuda", dtype=torch.float64)
    label = torch.arange(8, device="cuda")
    eager = model(x, sigma, label, keys(8))
    student = compiled(x, sigma, label, keys(8))
    with torch.no_grad():
        teacher = compiled(x, sigma, label, keys(8))
    assert (student - eager).abs().max() < 2e-3 * eager.abs().max()
    assert (teacher - student).abs().max() < 2e-3 * eager.abs().max()
    other = compiled(x, sigma, label, keys(8, step=1))
    assert (other - eager).abs().max() > 1e-2 * eager.abs().max()


@pytest.mark.parametrize("kind", ["unet", "ncsnpp", "adm"])
def test_runs_are_equal_to_the_bit_also_after_a_resume(kind, tmp_path, monkeypatch):
    """With attention over 64 pixels and more, where the fast kernels add in any order they like."""
    net = {"kind": kind, "channels": 64, "attention": [8, 4], "head_channels": 64}
    config = tiny_config(net=net, training={"batch": 256})
    for name in ("a", "b"):
        run(config, tmp_path / name, device="cuda", console=quiet())
    original = RunLog.step

    def interrupt(self, state):
        if state.step == 7:
            signal.raise_signal(signal.SIGINT)
        return original(self, state)

    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(config, tmp_path / "c", device="cuda", console=quiet())
    run(config, tmp_path / "c", device="cuda", resume=True, console=quiet())
    ends = [list_checkpoints(tmp_path / name)[-1] for name in "abc"]
    for file in ("student.safetensors", "ema-0.9.safetensors", "ema-0.99.safetensors"):
        assert len({(end / file).read_bytes() for end in ends}) == 1, file


@pytest.mark.parametrize("recipe", ["cifar10-ict", "imagenet64-ict"])
def test_the_papers_nets_compile_whole_and_agree_with_eager(recipe):
    """Tolerance: 2e-3 of the largest output, as convolutions may use tf32."""
    torch._dynamo.reset()
    config = load_recipe(find_recipe(recipe), ["net.channels=64", "net.blocks=1"])
    model = build_model(ModelSpec.from_config(config, tuple(map(str, range(config.data.classes))))).cuda().train()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    model = model.to(memory_format=torch.channels_last)
    size, label = config.data.image_size, torch.arange(4, device="cuda") if config.data.classes else None
    x, sigma = torch.randn(4, 3, size, size).cuda(), torch.tensor([0.01, 0.5, 5.0, 80.0]).double().cuda()
    eager, compiled = model(x, sigma, label, keys(4)), torch.compile(model, fullgraph=True)(x, sigma, label, keys(4))
    assert (compiled - eager).abs().max() < 2e-3 * eager.abs().max()


@pytest.mark.parametrize("kind", ["resident", "stream"])
def test_batches_are_the_cpus(kind, tmp_path):
    pixels = torch.randint(0, 256, (1000, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    (tmp_path / "pixels").write_bytes(pixels.numpy().tobytes())
    file = PixelFile(tmp_path / "pixels", (1000, 3, 16, 16))
    images = Images(pixels=file.pixels(), labels=torch.arange(1000), class_names=("",), file=file)
    feed = open_feed(images, lambda s: batch_indices(s, batch=64, count=1000, seed=0), torch.device("cuda"), kind=kind)
    for step in [*range(40), 3, 3, 1000]:
        ours, labels = feed.take(step)
        busy = torch.randn(2000, 2000, device="cuda") @ torch.randn(2000, 2000, device="cuda")  # copies overlap with it
        indices = batch_indices(step, batch=64, count=1000, seed=0)
        assert torch.equal(ours.cpu(), pixels[indices]) and torch.equal(labels.cpu(), indices)
        assert busy.isfinite().all()
    feed.close()


def test_runs_are_the_same_to_the_bit_streamed_or_resident(tmp_path):
    weights = []
    for kind in ("resident", "stream"):
        path = run(tiny_config(data={"feed": kind}), tmp_path / kind, device="cuda", console=quiet())
        weights.append(path.read_bytes())
    assert weights[0] == weights[1]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("shape", "groups"), [((8, 256, 32, 32), 32), ((3, 72, 7, 7), 12), ((2, 4, 1, 1), 1)])
def test_fused_norms_are_as_near_to_the_truth_as_torchs(shape, groups, dtype, layout):
    torch.manual_seed(0)
    norm = Norm(groups, shape[1]).cuda().double()
    torch.nn.init.normal_(norm.weight)
    x = (2 * torch.randn(shape) + 5 * torch.randn(1, shape[1], 1, 1)).cuda().to(dtype).to(memory_format=layout)
    rows = {name: torch.randn(shape[:2], device="cuda").double() for name in ("added", "scale", "shift")}
    dy = torch.randn(shape, device="cuda", dtype=dtype)

    def answers(kind: torch.dtype) -> list[torch.Tensor]:
        module = copy.deepcopy(norm).to(torch.float32 if kind != torch.float64 else kind)
        inputs = [x.detach().to(kind).requires_grad_()]
        inputs += [row.to(module.weight.dtype).requires_grad_() for row in map(torch.clone, rows.values())]
        y = module(inputs[0], **dict(zip(rows, inputs[1:], strict=True)), silu=True)
        y.backward(dy.to(y.dtype))
        return [y, *(each.grad for each in inputs), module.weight.grad, module.bias.grad]

    exact, ours = answers(torch.float64), answers(dtype)
    with plain_layers(), torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        theirs = answers(dtype)
    for truth, mine, other in zip(exact, ours, theirs, strict=True):
        error, usual = (mine.double() - truth).norm(), (other.double() - truth).norm()
        assert error <= 2 * usual + max(1e-6, torch.finfo(dtype).eps) * truth.norm()


@pytest.mark.parametrize("make", [lambda: Fir(up=2), lambda: Fir(down=2), lambda: Fir(padding=2), BoxUp, BoxDown])
@pytest.mark.parametrize("size", [4, 6, 32])
def test_the_fused_filter_is_the_filter(make, size):
    layer, answers = make().cuda(), []
    torch.manual_seed(0)
    x = torch.randn(3, 96, size, size, device="cuda", requires_grad=True)
    for context in (contextlib.nullcontext, plain_layers):
        with context():
            y = layer(x)
        (dx,) = torch.autograd.grad(y.cos().sum(), x)
        answers.append((y, dx))
    for ours, theirs in zip(*answers, strict=True):
        assert ours.shape == theirs.shape and (ours - theirs).abs().max() < 1e-5


@pytest.mark.parametrize("recipe", ["cifar10-ict", "imagenet64-ict"])
def test_nets_with_fused_layers_are_the_same_nets(recipe):
    config = load_recipe(find_recipe(recipe), ["net.channels=64", "net.blocks=1"])
    model = build_model(ModelSpec.from_config(config, tuple(map(str, range(config.data.classes))))).cuda().train()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    size, label = config.data.image_size, torch.arange(4, device="cuda") if config.data.classes else None
    x, sigma = torch.randn(4, 3, size, size).cuda(), torch.tensor([0.01, 0.5, 5.0, 80.0]).double().cuda()
    found = []
    for context in (contextlib.nullcontext, plain_layers):
        with context(), torch.backends.cudnn.flags(allow_tf32=False):
            model.zero_grad()
            y = model(x, sigma, label, keys(4))
            y.square().sum().backward()
        found.append([y, *(p.grad.clone() for p in model.parameters())])
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).norm() <= 1e-3 * theirs.norm() + 1e-6


@pytest.mark.parametrize(
    ("kind", "precision", "extra"),
    [
        *((kind, precision, {}) for kind in ("unet", "ncsnpp", "adm") for precision in ("float32", "fp16")),
        ("unet", "fp16", {"score": "data"}),
        ("unet", "fp16", {"coupling": "batch", "couple_above": 0.1}),
    ],
)
def test_recorded_steps_are_the_same_to_the_bit(kind, precision, extra, tmp_path):
    """N rises on the way (3 to 8), and the last steps have another seed, as after a divergence."""
    weights = []
    for graphs in (True, False):
        config = tiny_config(
            net={"kind": kind, "channels": 64, "attention": [4], "head_channels": 64, "dropout": 0.2},
            objective={"curriculum": "linear", "s0": 2, "s1": 8, **extra},
            data={"classes": 0 if extra else 10},
            training={"batch": 64, "accumulate": 2, "steps": 24},
            speed={"graphs": graphs, "precision": precision},
        )
        images = load_images(config.data)
        model = build_model(ModelSpec.from_config(config, tuple("0123456789")))
        set_up(config, model, torch.device("cuda"))
        state, levels = new_state(config, model), []
        for _ in train(config, state, images, Budget(steps=24)):
            levels.append(state.stats["levels"])
            state.attempt = int(state.step > 16)
        assert levels[0] == 3 and levels[-1] == 8
        weights.append([*model.state_dict().values(), *state.averages[0].weights.values()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


@pytest.mark.parametrize("optimiser", ["radam", "muon"])
@pytest.mark.parametrize(
    "objective", [{}, {"teacher": "ema"}, {"score": "data"}, {"coupling": "batch"}, {"kind": "ect"}]
)
def test_no_step_waits_for_the_gpu(objective, optimiser):
    """Torch would tell: but for an event that the guard waits for, nothing asks for the end of what is under way."""
    config = tiny_config(
        data={"classes": 0}, objective=objective, training={"batch": 32, "optimiser": optimiser, "steps": 20}
    )
    model = build_model(ModelSpec.from_config(config, tuple("0123456789")))
    set_up(config, model, torch.device("cuda"))
    steps = train(config, new_state(config, model), load_images(config.data), Budget(steps=20))
    for _ in range(6):  # kernels are compiled, the step is recorded
        next(steps)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(6):
            next(steps)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("optimiser", ["radam", "muon"])
@pytest.mark.parametrize("teacher", ["student", "ema"])
def test_the_fused_update_is_the_optimisers(teacher, optimiser, channels_last):
    """With the same gradients: those of a run would follow the weights, and make a last bit of bfloat16 many."""
    found = []
    for fused in (True, False):
        config = tiny_config(
            objective={"teacher": teacher}, training={"optimiser": optimiser},
            speed={"fused_update": fused, "channels_last": channels_last},
        )  # fmt: skip
        model = build_model(ModelSpec.from_config(config, tuple("0123456789")))
        set_up(config, model, torch.device("cuda"))
        state = new_state(config, model)
        update = Update(config, model, state.optimiser, state.averages, state.target, ranks=ALONE)
        generator = torch.Generator("cuda").manual_seed(0)
        for number in range(12):
            for good in (False, True):  # a step that is not taken leaves nothing behind
                for parameter in model.parameters():
                    noise = torch.randn(parameter.shape, device="cuda", generator=generator)
                    parameter.grad = torch.empty_like(parameter).copy_(64 * noise if good else float("nan") * noise)
                update.prepare(scale=64.0)
                update.launch(
                    torch.tensor(good, device="cuda"), number=number, target_decay=0.9 if state.target else None
                )
                update.settle(taken=good)
        assert update.fuses == fused
        target = [] if state.target is None else [*state.target.state_dict().values()]
        found.append([*model.state_dict().values(), *state.averages[0].weights.values(), *target])
        entries = [state.optimiser.state[parameter] for parameter in model.parameters()]
        assert all(entry.get("step", 12) == 12 for entry in entries)
        found[-1] += [entry[name].float() for entry in entries for name in sorted(entry) if name != "step"]
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).abs().max() < 1e-5 * max(1e-3, theirs.abs().max())


@pytest.mark.parametrize("count", [1, 5, 64, 256, 1000])
def test_couplings_are_the_cpus(count):
    matrix = torch.randn(count, count, generator=torch.Generator().manual_seed(count))
    assert torch.equal(match(matrix.cuda()).cpu(), match(matrix))


@pytest.mark.parametrize("by_class", [False, True])
def test_the_score_of_a_set_is_the_cpus(by_class):
    """There in float32, here in float16: mean images agree to a thousandth or so, where there is a mean at all."""
    generator = torch.Generator().manual_seed(0)
    smooth = torch.rand(500, 3, 4, 4, generator=generator).repeat_interleave(8, 2).repeat_interleave(8, 3)
    pixels, labels = (255 * smooth).round().to(torch.uint8), torch.arange(500) % 3
    sigma = torch.tensor([0.1, 3.0, 6.0, 12.0, 25.0, 80.0], dtype=torch.float64)
    z = torch.randn(6, 3, 32, 32, generator=generator)
    noisy = pixels[:6].float() / 127.5 - 1 + sigma.float().reshape(-1, 1, 1, 1) * z
    found = []
    for device in (torch.device("cpu"), torch.device("cuda")):
        score = DataScore(pixels, labels if by_class else None, device, flip=True)
        mean = score.noise(noisy.to(device), sigma.to(device), z.to(device), labels[:6].to(device)).cpu()
        found.append(noisy - sigma.float().reshape(-1, 1, 1, 1) * mean)
    assert (found[0] - found[1]).abs().max() < 0.01


@pytest.mark.parametrize("optimiser", ["radam", "muon"])
def test_a_scale_that_overflows_is_halved_and_nothing_else_happens(optimiser):
    config = tiny_config(training={"batch": 64, "steps": 30, "optimiser": optimiser}, speed={"precision": "fp16"})
    model = build_model(ModelSpec.from_config(config, tuple("0123456789")))
    set_up(config, model, torch.device("cuda"))
    state, guard = new_state(config, model), Guard(config, ALONE, torch.device("cuda"))
    guard.state.scale = 2.0**40
    taken, watched = [], [*model.state_dict().values(), *state.averages[0].weights.values()]
    before = [one.clone() for one in watched]
    for _ in train(config, state, load_images(config.data), Budget(steps=30), guard=guard):
        taken.append(state.taken)
        assert state.taken or all(torch.equal(a, b) for a, b in zip(before, watched, strict=True))
        before = [one.clone() for one in watched]
    assert all(one.isfinite().all() for one in before)
    assert not taken[0] and taken[-1] and guard.alarm is None and guard.state.skipped == 0
    assert guard.state.overflows == taken.count(False) and guard.state.scale == 2.0 ** (40 - guard.state.overflows)


@pytest.mark.parametrize("kind", ["continuous", "sct", "meanflow"])
@pytest.mark.parametrize("net", ["unet", "ncsnpp", "adm"])
def test_derivatives_along_a_path_are_the_cpus(kind, net):
    """Forward mode goes through plain layers and attention, the gradient through the kernels, with one dropout."""
    section = {"kind": kind, "distance": "squared_l2"}
    config = tiny_config(objective=section, net={"kind": net, "channels": 32, "intervals": kind == "meanflow"})
    images, labels, losses, gradients = torch.rand(8, 1, 8, 8) - 0.5, torch.arange(8), [], []
    for device in ("cpu", "cuda"):
        model = build_model(ModelSpec.from_config(config, tuple("0123456789"))).train()
        for number, parameter in enumerate(model.parameters()):
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(number))
        model.to(device)
        step = Step(seed=0, number=0, done=1, total=1, samples=torch.arange(8, device=device))
        with torch.backends.cudnn.flags(allow_tf32=False, deterministic=True):
            loss = build_objective(config)(model, images.to(device), labels.to(device), step).per_sample
            loss.mean().backward()
        losses.append(loss.detach().cpu())
        gradients.append(torch.cat([p.grad.flatten().cpu() for p in model.parameters() if p.grad is not None]))
    assert torch.allclose(*losses, rtol=1e-3, atol=1e-5)
    assert (gradients[0] - gradients[1]).norm() < 2e-3 * gradients[0].norm()


@pytest.mark.parametrize("parts", [0, 6])
def test_a_start_is_the_same_on_a_gpu(parts):
    images = load_images(tiny_config().data)
    spec = StartSpec.sized(1.0, (1, 8, 8), classes=10, parts=parts)
    numbers, labels, drawn = torch.arange(4000), torch.arange(4000) % 10, []
    for device in ("cpu", "cuda"):
        start = Start(spec, (1, 8, 8), classes=10).to(device)
        fit(start, images.pixels, images.labels, flip=True)
        x = start.draw(numbers.to(device), sigma=1.5, seed=0, labels=labels.to(device)).cpu()
        drawn.append(x.double().flatten(1))
    a, b = drawn
    if parts == 0:  # no chance in the fit; EM has its noise from the device
        assert torch.allclose(a, b, atol=1e-2)
    assert (a.mean(0) - b.mean(0)).abs().max() < 0.15
    assert (torch.cov(a.T) - torch.cov(b.T)).abs().max() < 0.3


@pytest.mark.parametrize("start", ["gaussian", "mixture"])
def test_a_deterministic_run_has_a_start(start, tmp_path):
    sampling = {"start": start, "start_sigma": 2.0, "start_parts": 5}
    path = run(tiny_config(sampling=sampling, training={"steps": 4}), tmp_path / "run", device="cuda", console=quiet())
    generator = load(path, device="cuda")
    assert generator.sample(20, steps=2).isfinite().all() and generator.ladder(2)[0] == 2.0
