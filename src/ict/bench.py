"""How fast a recipe trains and samples on this machine, and where a step spends its time."""

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from rich.table import Table
from torch import Tensor

from ict.config import Config
from ict.cost import measure
from ict.data import Images, batch_indices, mixture2d
from ict.data.feed import open_feed
from ict.model import ConsistencyModel, ModelSpec, build_model
from ict.objectives import find_method
from ict.objectives.base import DERIVATIVE, DIFFUSION, TEACHER
from ict.objectives.score import require_room
from ict.objectives.tangent import derivative
from ict.precision import HALF, pick_precision
from ict.ranks import ALONE
from ict.recording import record
from ict.sampling import DIFFUSION_STEPS, Generator
from ict.training.budget import Budget
from ict.training.guard import Guard
from ict.training.loop import new_state, train
from ict.training.passes import Passes, load_batch
from ict.training.plan import has_grid
from ict.training.speed import set_up
from ict.training.update import Update

Stage = Callable[[str], None]
WARM = 10  # steps before the clock starts: kernels are compiled, a step is recorded, RAdam begins to adapt
ENDLESS = 10**9
# Images of named sets, and of the rest.
SIZES = {"digits": 1797, "cifar10": 50_000, "imagenet64": 1_281_167, "mixture2d": mixture2d.COUNT}
OTHERS = 50_000


@dataclass(kw_only=True)
class Bench:
    """What was found. Times are in seconds, memory in bytes."""

    recipe: str
    machine: str
    batch: int
    pieces: int  # that a batch is cut into
    deterministic: bool
    parameters: int
    precision: str
    operations: int  # of one training image
    ceiling: float  # operations a second of a large matrix product in that precision
    first: float = 0.0  # the first steps: compiling and recording
    step: float = 0.0
    memory: int = 0
    parts: dict[str, float] = field(default_factory=dict)
    sampling: dict[int, float] = field(default_factory=dict)  # network calls -> images a second


def bench(config: Config, device: torch.device, *, batch: int | None, steps: int, say: Stage) -> Bench:
    """Train random images of a recipe's size for some steps at its last N, then draw samples."""
    training = config.training
    batch = batch or training.batch
    pieces = training.accumulate if batch % training.accumulate == 0 else 1
    training = replace(training, batch=batch, accumulate=pieces, steps=ENDLESS, images=None, budget=None)
    config = replace(config, training=training)
    say("measuring the ceiling")
    found, model, images, spec = bench_steps(config, device, steps=steps, say=say)
    say("parts of a step")
    found.parts = time_parts(config, model, images, device, repeats=max(3, steps // 4))
    found.parts["the rest"] = max(0.0, found.step - sum(found.parts.values()))
    say("sampling")
    generator = Generator(model, spec).to(device, precision=config.speed.precision)
    for calls in (1, 2) if spec.kind != "diffusion" else (2, DIFFUSION_STEPS):
        at_once = min(batch, 1000)
        seconds = timed(lambda calls=calls, n=at_once: generator.sample(n, steps=calls, batch=n), device, repeats=3)
        found.sampling[calls] = at_once / seconds
    return found


def bench_steps(
    config: Config, device: torch.device, *, steps: int, say: Stage = lambda text: None, peak: float | None = None
) -> tuple[Bench, ConsistencyModel, Images, ModelSpec]:
    """Whole training steps of a recipe, and what they were taken with; `peak` is the ceiling where it is known."""
    batch = config.training.batch
    seen = set_size(config)
    require_room(seen * config.data.channels * config.data.image_size**2, device)
    images = random_images(config, count=max(batch, seen or min(4 * batch, 8192)))
    spec = ModelSpec.from_config(config, images.class_names)
    levels = config.objective.s1 + 1 if has_grid(config.objective.kind) else None
    precision = pick_precision(config.speed.precision, device, levels=levels)
    cost, model = measure(spec), build_model(spec, seed=config.seed)
    found = Bench(
        recipe=config.name, machine=machine(device), batch=batch, pieces=config.training.accumulate,
        deterministic=config.training.deterministic, parameters=model.size, precision=precision,
        operations=cost.training(config.objective),
        ceiling=ceiling(device, precision) if peak is None else peak,
    )  # fmt: skip
    set_up(config, model, device)
    say("training: the first steps")
    time_steps(config, model, images, found, steps=steps, say=say)
    return found, model, images, spec


def time_steps(
    config: Config, model: ConsistencyModel, images: Images, found: Bench, *, steps: int, say: Stage
) -> None:
    """Whole steps of the training loop, as a run takes them."""
    device = model.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    state = new_state(config, model)
    state.step = ENDLESS - 10**6
    run = train(config, state, images, Budget(steps=ENDLESS), warn=say)

    def stretch(count: int) -> float:
        begun = time.perf_counter()
        for _ in itertools.islice(run, count):
            pass
        synchronise(device)
        return time.perf_counter() - begun

    found.first = stretch(WARM)
    say(f"training: {steps} steps")
    counts = [steps // 3 + (turn < steps % 3) for turn in range(min(3, steps))]
    found.step = statistics.median(stretch(count) / count for count in counts)  # what happens once does not count
    if device.type == "cuda":
        found.memory = torch.cuda.max_memory_allocated(device)


def time_parts(
    config: Config, model: ConsistencyModel, images: Images, device: torch.device, *, repeats: int
) -> dict[str, float]:
    """The parts of a step that go through the net, one by one; pieces of a batch follow each other."""
    training, count = config.training, config.training.accumulate
    piece = torch.arange(training.batch // count, device=device)
    pixels, labels = images.pixels[: len(piece)].to(device), images.labels[: len(piece)].to(device)
    passes = Passes(config, model, None, samples=piece, guard=Guard(config, ALONE, device), ranks=ALONE, images=images)
    first = passes.step_of(seed=0, number=0, done=ENDLESS - 1, total=ENDLESS)
    step = passes.enter_phase(replace(first, samples=piece))
    x, y = load_batch(config, pixels, labels, piece, seed=0, step=0)
    sigma, key = step.lognormal(-1.1, 2.0), step.keys()
    z = step.noise(x, sigma)

    def draw() -> None:
        load_batch(config, pixels, labels, piece, seed=0, step=0)
        step.noise(x, sigma), step.keys(), step.lognormal(-1.1, 2.0)

    def teacher() -> None:
        with torch.no_grad():
            model(x + z, sigma, y, key)

    def tangent() -> None:
        derivative(lambda x, s: model(x, s, y, key), (x + z, sigma), (z, torch.ones_like(sigma)))

    def lower_side() -> None:
        with torch.no_grad():
            method.lower_side(x, y, x + z, 0.9 * sigma, sigma, z)  # type: ignore

    def student() -> None:
        model(x + z, sigma, y, key)

    def both_ways() -> None:
        for parameter in passes.parameters:
            parameter.grad = None
        model(x + z, sigma, y, key).float().square().mean().backward()

    model.train()
    method = getattr(passes.objective, "then", passes.objective)  # which follows a warm-up
    beside = find_method(config.objective).beside(config.objective)
    works = {
        "noise": draw,
        **({f"score of {len(images):,} images": lower_side} if set_size(config) else {}),
        **({"diffusion model": lower_side} if DIFFUSION in beside else {}),
        **({"teacher": teacher} if TEACHER in beside else {}),
        **({"derivative": tangent} if DERIVATIVE in beside else {}),
        "student": student,
        "backward": both_ways,
    }
    found = {}
    for name, work in works.items():
        found[name] = count * timed(recorded(work, config, device), device, repeats=repeats)
    found["backward"] = max(0.0, found["backward"] - found["student"])
    return found | time_update(config, model, device, repeats=repeats) | time_data(config, images, device)


def time_update(config: Config, model: ConsistencyModel, device: torch.device, *, repeats: int) -> dict[str, float]:
    """Optimiser and averages, which may be one kernel."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    state = new_state(config, model)
    update = Update(config, model, state.optimiser, state.averages, state.target, ranks=ALONE)
    update.prepare(scale=1.0)
    good = torch.ones((), dtype=torch.bool, device=device)

    def work() -> None:
        if not update.fuses or update.muon is not None:  # otherwise it asks nothing of the GPU
            update.prepare(scale=1.0)
        update.launch(good, number=0, target_decay=None if state.target is None else 0.9)
        update.settle(taken=True)

    seconds = timed(work, device, repeats=repeats)
    for parameter in model.parameters():
        parameter.grad = None
    return {"optimiser and averages": seconds}


def time_data(config: Config, images: Images, device: torch.device) -> dict[str, float]:
    """What a step waits for its batch."""
    batch, numbers = config.training.batch, itertools.count()

    def order(step: int) -> Tensor:
        return batch_indices(step, batch=batch, count=len(images), seed=0)

    feed = open_feed(images, order, device, kind=config.data.feed)
    seconds = timed(lambda: feed.take(next(numbers)), device, repeats=10)
    feed.close()
    return {"data": seconds}


def recorded(work: Callable[[], object], config: Config, device: torch.device) -> Callable[[], object]:
    """The same work played from a recording where steps are, so that launching it takes no time."""
    if device.type != "cuda" or not config.speed.graphs:
        return work
    for _ in range(2):
        work()
    try:
        graph, _ = record(work)
    except Exception:  # whatever it is: a step that has this part is not recorded either
        return work
    return graph.replay


def timed(work: Callable[[], object], device: torch.device, *, repeats: int, before: int = 2) -> float:
    """Seconds that it takes, after some turns that are not counted."""
    for _ in range(before):
        work()
    synchronise(device)
    begun = time.perf_counter()
    for _ in range(repeats):
        work()
    synchronise(device)
    return (time.perf_counter() - begun) / repeats


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ceiling(device: torch.device, precision: str) -> float:
    """Operations a second of a large product of random matrices."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=HALF.get(precision, torch.float32)) for _ in range(2))
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        return 2 * size**3 / timed(lambda: a @ b, device, repeats=10)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def random_images(config: Config, *, count: int) -> Images:
    """Pixels of no set, of a recipe's size: what they show does not change the speed."""
    data, generator = config.data, torch.Generator().manual_seed(0)
    shape = (count, data.channels, data.image_size, data.image_size)
    return Images(
        pixels=torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator),
        labels=torch.randint(0, max(1, data.classes), (count,), generator=generator),
        class_names=tuple(map(str, range(max(1, data.classes)))),
    )


def set_size(config: Config) -> int:
    """How many images a step looks at beside its batch: the whole set where its score is asked for, else none."""
    return SIZES.get(config.data.source, OTHERS) if config.objective.score == "data" else 0


def machine(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    return f"{name}, torch {torch.__version__}"


def table(found: Bench) -> Table:
    """The figures, for people."""
    out = Table(box=None, show_header=False)
    speed = found.batch / found.step * found.operations
    pieces = f" in {found.pieces} pieces (training.accumulate)" if found.pieces > 1 else ""
    rows = {
        "recipe": f"{found.recipe}: {found.parameters / 1e6:.1f}M parameters, {found.precision}",
        "batch": f"{found.batch:,}{pieces}, {'' if found.deterministic else 'not '}deterministic",
        "machine": found.machine,
        "training": f"{found.batch / found.step:,.1f} images/s, {1000 * found.step:,.1f} ms a step",
        "operations": f"{speed / 1e12:,.2f} TFLOP/s: {speed / found.ceiling:.0%} of a large matrix product "
        f"({found.ceiling / 1e12:,.2f} TFLOP/s)",
        "first steps": f"{found.first:.1f} s for {WARM}, compiling and recording among them",
    }
    if found.memory:
        rows["memory"] = f"{found.memory / 2**30:.1f} GiB at most"
    for name, seconds in found.parts.items():
        rows[f"  {name}"] = f"{1000 * seconds:8.2f} ms  {seconds / found.step:4.0%}"
    for calls, rate in found.sampling.items():
        rows[f"samples in {calls} step{'s'[: calls > 1]}"] = f"{rate:,.0f} images/s"
    for name, text in rows.items():
        out.add_row(name, text)
    return out
