"""RUN/report.html: one self-contained page that shows what a run made, beside what it learned from."""

import base64
import html
from importlib import resources
from pathlib import Path
from string import Template

import torch
from torch import Tensor

from ict.config import Config
from ict.data import Images, to_uint8
from ict.display import format_time
from ict.evaluation.chart import Chart
from ict.files import list_snapshots, step_of, write_atomically
from ict.pictures import comfortable_scale, grid, png
from ict.recipes import load_recipe
from ict.sampling import Generator, load
from ict.training.log import read_log

COLUMNS, ROWS = 10, 8


def write_report(run: Path, images: Images) -> Path:
    """Draw samples from the run's model and write the page."""
    generator = load(run)
    config = load_recipe(run / "recipe.toml")
    one_step = draw(generator, steps=1)
    page = Template(resources.files("ict.evaluation").joinpath("report.html").read_text(encoding="utf-8"))
    filled = page.substitute(
        name=html.escape(config.name),
        about=html.escape(config.about or "A one-step image generator."),
        chips="".join(f"<span>{html.escape(chip)}</span>" for chip in chips(config, generator, run)),
        real=picture(real_images(generator, images), "Real images"),
        one=picture(one_step, "Samples in one step"),
        two=picture(draw(generator, steps=2), "Samples in two steps"),
        columns="Each column is one class. " if generator.spec.class_names else "",
        enlarged=f"Shown {scale} times enlarged."
        if (scale := comfortable_scale(generator.spec.image_size)) > 1
        else "",
        sigma_mid=f"{generator.spec.sigma_mid:g}",
        nearest=nearest_panel(one_step, images),
        film=film_strip(run),
        charts=charts(run),
        figures=figures(config, generator, run),
        recipe=html.escape((run / "recipe.toml").read_text(encoding="utf-8")),
        path=html.escape(str(run)),
    )
    write_atomically(run / "report.html", filled.encode())
    return run / "report.html"


def draw(generator: Generator, *, steps: int) -> Tensor:
    """A sheet of samples; with classes, one column for each of the first ten."""
    classes = len(generator.spec.class_names)
    labels = [i % COLUMNS % classes for i in range(COLUMNS * ROWS)] if classes else None
    return to_uint8(generator.sample(COLUMNS * ROWS, steps=steps, seed=1, label=labels))


def real_images(generator: Generator, images: Images) -> Tensor:
    """As many real images in the same order of classes, spread over the set."""
    n, classes = COLUMNS * ROWS, len(generator.spec.class_names)
    if not classes:
        return images.pixels[torch.linspace(0, len(images) - 1, n).long()]
    columns = [images.pixels[images.labels == i % classes][:ROWS] for i in range(COLUMNS)]
    rows = min(len(column) for column in columns)
    return torch.stack([column[row] for row in range(rows) for column in columns])


def picture(pixels: Tensor, caption: str, *, columns: int = COLUMNS) -> str:
    sheet = grid(pixels, columns=columns, scale=comfortable_scale(pixels.shape[-1]))
    return embed(png(sheet), caption)


def embed(data: bytes, caption: str) -> str:
    return f'<img alt="{html.escape(caption)}" src="data:image/png;base64,{base64.b64encode(data).decode()}">'


def nearest(samples: Tensor, images: Images) -> tuple[Tensor, Tensor]:
    """For each sample the index of the training image at the least distance, and that distance (pixels in [-1, 1])."""
    a, b = (pixels.flatten(1).float() / 127.5 for pixels in (samples, images.pixels))
    distance = torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")  # exact also where it is 0
    found = distance.min(dim=1)
    return found.indices, found.values


def nearest_panel(samples: Tensor, images: Images) -> str:
    """A row of samples above the training images that are nearest to them."""
    chosen = samples[: 2 * COLUMNS]
    indices, _ = nearest(chosen, images)
    return picture(torch.cat((chosen, images.pixels[indices])), "Samples and their neighbours", columns=2 * COLUMNS)


def film_strip(run: Path) -> str:
    """The snapshots of the run, from first to last."""
    levels = {record["step"]: record.get("levels") for record in read_log(run / "log.jsonl")}
    frames = []
    for path in list_snapshots(run):
        step = step_of(path)
        n = next((levels[at] for at in sorted(levels, reverse=True) if at <= step), None)
        label = f"step {step:,}" + (f" · N = {n}" if n else "")
        frames.append(f"<figure>{embed(path.read_bytes(), label)}<figcaption>{label}</figcaption></figure>")
    return "".join(frames) or '<p class="note">The run drew no samples on the way (training.snapshots = 0).</p>'


def charts(run: Path) -> str:
    records = read_log(run / "log.jsonl")
    steps = [record["step"] for record in records]
    loss = Chart(xs=steps, ys=[record["loss"] for record in records], x_name="step", y_name="loss", log=True)
    levels = [record["levels"] for record in records if "levels" in record]
    cards = [("Loss", "λ · d, mean over the batch. It jumps when N doubles: that is a new, harder task.", loss)]
    if levels:
        distinct = sorted(set(levels))
        curriculum = Chart(
            xs=steps[: len(levels)], ys=levels, x_name="step", y_name="N", log=True, steps=True,
            y_ticks=distinct if len(distinct) <= 10 else (),
        )  # fmt: skip
        cards.append(("Noise levels N", "How finely the way from noise to image is cut.", curriculum))
    return "".join(
        f'<div class="card"><h3>{title}</h3><p class="note">{note}</p>{chart.svg()}</div>'
        for title, note, chart in cards
    )


def chips(config: Config, generator: Generator, run: Path) -> list[str]:
    records = read_log(run / "log.jsonl")
    size = generator.spec.image_size
    return [
        f"{config.data.source}, {size}×{size}",
        f"{sum(p.numel() for p in generator.model.parameters()) / 1e6:.2f} M parameters",
        f"{generator.origin.get('step', 0):,} steps",
        *([f"trained in {format_time(records[-1]['seconds'])}"] if records else []),
        "class-conditional" if generator.spec.class_names else "unconditional",
    ]


def figures(config: Config, generator: Generator, run: Path) -> str:
    """The table of the run's figures."""
    records = read_log(run / "log.jsonl")
    last = records[-1] if records else {}
    speeds = sorted(record["images_per_second"] for record in records)
    objective, training = config.objective, config.training
    rows = {
        "objective": f"{objective.kind}: {objective.distance}, {objective.weighting}, {objective.index}",
        "network": f"{config.net.kind}, {sum(p.numel() for p in generator.model.parameters()):,} parameters",
        "images seen": f"{last.get('images', 0):,} in {last.get('step', 0):,} steps of {training.batch}",
        "last loss": f"{last.get('loss', float('nan')):.4g} at N = {last.get('levels', '–')}",
        "speed": f"{speeds[len(speeds) // 2]:,.0f} images/s (median)" if speeds else "–",
        "time": format_time(last.get("seconds", 0)),
        "optimiser": f"RAdam, lr {training.lr:g} ({training.lr_schedule}), EMA {generator.origin.get('ema')}",
        "seed": str(config.seed),
        "torch": torch.__version__,
    }
    return "".join(f"<tr><th>{key}</th><td>{html.escape(value)}</td></tr>" for key, value in rows.items())
