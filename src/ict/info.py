"""Tables that describe a recipe or a model file."""

from collections import Counter
from pathlib import Path

from rich.table import Table
from rich.text import Text

from ict.config import OPTIMISERS, Config, ObjectiveConfig
from ict.cost import Cost, measure
from ict.data.inspect import Inspection
from ict.model import ModelSpec, read_model
from ict.objectives import find_method
from ict.objectives.keys import used_keys
from ict.reading import ConfigError, printable, to_dict
from ict.sampling import DIFFUSION_STEPS
from ict.training.budget import Budget
from ict.training.plan import Plan


def describe_model(path: Path) -> Table:
    """What a model file holds and what using it costs."""
    _, spec, origin = read_model(path)
    about = ", ".join(f"{key} {value}" for key, value in origin.items())
    return _table({"model": str(path), "from": about, **_net_rows(spec, measure(spec))})


def describe_recipe(config: Config, *, tflops: float) -> Table:
    """What a recipe will build and do, and what it costs at a sustained speed; needs neither its data nor a GPU."""
    spec = ModelSpec.from_config(config, tuple(str(i) for i in range(config.data.classes)))
    cost, training = measure(spec), config.training
    rows = {"recipe": config.name, "about": config.about, **_net_rows(spec, cost)}
    an_image = cost.training(config.objective)
    rows["training"] = f"{an_image / 1e9:,.2f} GFLOP an image: student forward and backward{_beside(config.objective)}"
    averages = f"{len(training.ema)} average{'s'[: len(training.ema) > 1]}"
    fixed = cost.training_memory(len(training.ema), optimiser=training.optimiser)
    piece = training.batch // training.accumulate
    rows["memory"] = (
        f"{_bytes(fixed)} for weights, gradients, {OPTIMISERS[training.optimiser]} and {averages}; "
        f"{_bytes(cost.activations)} of activations an image (float32): about "
        f"{_bytes(fixed + piece * cost.activations)} with {piece:,} images at a time (training.batch / accumulate)"
    )
    rows["objective"] = ", ".join(f"{key} {value}" for key, value in used_keys(config).items())
    rows["run"] = ", ".join(f"{key} {value}" for key, value in to_dict(training).items())
    try:
        budget = Budget.from_config(training)
    except ConfigError as error:
        rows["warning"] = str(error)
        return _table(rows)
    plan = Plan.of(config, budget)
    rows["levels"] = plan.describe()
    if warning := plan.warning():
        rows["warning"] = warning
    if budget.steps is not None:
        images = budget.steps * training.batch
        seconds = images * an_image / (tflops * 1e12)
        rows["time"] = f"{images:,} images: {_duration(seconds)} at {tflops:g} TFLOP/s sustained (set --tflops)"
    return _table(rows)


def _beside(objective: ObjectiveConfig) -> str:
    """What a method computes beside the student, in words."""
    calls = find_method(objective).beside(objective).items()
    return "".join(f", {what}" + (f" (counted as {count} calls)" if count > 1 else "") for what, count in calls)


def describe_images(source: str, found: Inspection) -> Table:
    """What a pile of images holds."""
    reasons = Counter(reason.split(":")[0] for _, reason in found.refused)
    rows = {
        "source": source,
        "images": f"{len(found.images):,}, made into {found.images.describe()}",
        "classes": _classes(found.classes),
        "duplicates": f"{found.duplicates:,}",
        "pixels": f"mean {found.mean:.3f}, deviation {found.deviation:.3f} (in [-1, 1])",
    }
    if found.sizes:
        smallest, largest, (common, count) = (found.sizes[key] for key in ("smallest", "largest", "common"))
        rows["sizes"] = (
            f"{_size(smallest)} to {_size(largest)}, most often {_size(common)} ({count:,}); "
            f"{found.sizes['enlarged']:,} had to be enlarged"
        )
    rows["refused"] = f"{len(found.refused):,}"
    rows |= {f"  {reason}": f"{count:,}" for reason, count in reasons.most_common()}
    for name, reason in found.refused[:10]:
        rows[f"  {name}"] = reason
    if found.warning:
        rows["warning"] = found.warning
    return _table(rows)


def _classes(counts: dict[str, int]) -> str:
    """How many, and the first of them with their numbers of images."""
    first = ", ".join(f"{name or '(no folder)'} {count:,}" for name, count in list(counts.items())[:20])
    return f"{len(counts):,}: {first}" + (", …" if len(counts) > 20 else "")


def _size(size: list[int]) -> str:
    return f"{size[0]}×{size[1]}"


def _net_rows(spec: ModelSpec, cost: Cost) -> dict[str, str]:
    colour = {1: "grey", 2: "points of the plane"}.get(spec.channels, "colour")
    diffusion = spec.kind == "diffusion"
    return {
        "kind": spec.kind,
        "images": f"{spec.image_size}×{spec.image_size}, {colour}",
        "classes": str(len(spec.class_names)) if spec.class_names else "none",
        "net": ", ".join(f"{key} {value}" for key, value in to_dict(spec.net).items()),
        "parameters": f"{cost.parameters:,} ({_bytes(4 * cost.parameters)} in float32)",
        "forward": f"{cost.forward / 1e9:,.2f} GFLOP an image{'' if diffusion else ': a sample in one step'}",
        "noise": ", ".join(f"{key} {value:g}" for key, value in to_dict(spec.noise).items()),
        "steps" if diffusion else "two steps": (
            f"{DIFFUSION_STEPS} of Heun's method, two calls each"
            if diffusion
            else f"σ = {spec.first_sigma:g}, {spec.sigma_mid:g}"
        ),
        "start": f"{spec.start.describe()} at σ = {spec.first_sigma:g}",
    }


def _table(rows: dict[str, str]) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    for name, text in rows.items():
        table.add_row(Text(printable(name)), Text(printable(text)))  # not markup: names may hold brackets
    return table


def _bytes(count: float) -> str:
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def _duration(seconds: float) -> str:
    for unit, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= unit:
            return f"{seconds / unit:,.1f} {name}"
    return f"{seconds:,.0f} seconds" if seconds >= 1 else "less than a second"
