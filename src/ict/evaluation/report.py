"""RUN/report.html: one self-contained page that shows what a run made, beside what it learned from."""

import base64
import contextlib
import html
import math
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from ict.config import OPTIMISERS, Config
from ict.data import Images
from ict.display import format_time
from ict.evaluation.chart import Chart
from ict.evaluation.maps import draw_maps
from ict.evaluation.records import read_records
from ict.evaluation.scoreboard import score_section
from ict.files import list_snapshots, step_of, write_atomically
from ict.pictures import comfortable_scale, enough, grid, is_points, png
from ict.pixels import to_uint8
from ict.recipes import load_recipe
from ict.sampling import DIFFUSION_STEPS, Generator, load
from ict.training.log import read_log

COLUMNS, ROWS = 10, 8
BLOCK = 4096  # images compared at a time
Record = dict[str, Any]  # a line of the log


def write_report(run: Path, images: Images, *, device: torch.device | str = "cpu") -> Path:
    """Draw samples from the run's model and write the page."""
    generator = load(run, device=device)
    config = load_recipe(run / "recipe.toml")
    records = read_log(run / "log.jsonl")
    words = wording(generator)
    one_step = draw(generator, steps=words.steps[0])
    scale = comfortable_scale(generator.spec.image_size)
    page = Template(resources.files("ict.evaluation").joinpath("report.html").read_text(encoding="utf-8"))
    filled = page.substitute(
        name=html.escape(config.name),
        about=html.escape(config.about or "A one-step image generator."),
        chips="".join(f"<span>{html.escape(chip)}</span>" for chip in chips(config, generator, records)),
        real=picture(real_images(generator, images), "Real images"),
        one=picture(one_step, f"Samples in {words.titles[0].lower()}"),
        two=picture(draw(generator, steps=words.steps[1]), f"Samples in {words.titles[1].lower()}"),
        how=words.how,
        one_title=words.titles[0],
        two_title=words.titles[1],
        one_note=words.notes[0],
        two_note=words.notes[1],
        columns="Each column is one class. " if generator.spec.class_names else "",
        enlarged=f"Shown {scale} times enlarged." if scale > 1 else "",
        scores=score_section(read_records(run / "eval.json")),
        beside=beside(run, config, generator, one_step, images),
        film=film_strip(run, records),
        charts=charts(records),
        figures=figures(config, generator, records),
        recipe=html.escape((run / "recipe.toml").read_text(encoding="utf-8")),
        path=html.escape(str(run)),
    )
    write_atomically(run / "report.html", filled.encode())
    return run / "report.html"


class Wording(NamedTuple):
    """How the page speaks of samples with fewer and with more steps."""

    steps: tuple[int, int]
    titles: tuple[str, str]
    notes: tuple[str, str]
    how: str


def wording(generator: Generator) -> Wording:
    start = generator.spec.start
    begins = f"a draw from {start.describe()} that stands for noisy images" if start.sigma else "pure noise"
    if generator.spec.kind == "diffusion":
        fewer, more = DIFFUSION_STEPS // 2, DIFFUSION_STEPS
        return Wording(
            (fewer, more),
            (f"{fewer} steps", f"{more} steps"),
            (f"{2 * fewer - 1} network calls an image", f"{2 * more - 1} network calls an image"),
            f"A diffusion model is solved from {begins} by Heun's method, along Karras' noise levels.",
        )
    return Wording(
        (1, 2),
        ("One step", "Two steps"),
        ("one network call an image", "two network calls an image"),
        f"One step is a single call of the network on {begins}; two steps start from the same, add noise of "
        f"σ = {generator.spec.sigma_mid:g} to the result and call the network again.",
    )


def draw(generator: Generator, *, steps: int) -> Tensor:
    """A sheet of samples; with classes, one column for each of the first ten."""
    classes = len(generator.spec.class_names)
    count = enough(generator.spec.image_size, COLUMNS * ROWS)
    labels = [i % COLUMNS % classes for i in range(count)] if classes else None
    # A few at a time: at the end of a run the GPU is still full of it.
    return to_uint8(generator.sample(count, steps=steps, seed=1, label=labels, batch=count // 4)).cpu()


def real_images(generator: Generator, images: Images) -> Tensor:
    """As many real images in the same order of classes, spread over the set."""
    classes = 0 if is_points(images.shape) else len(generator.spec.class_names)
    columns = [(images.labels == i % classes).nonzero()[:ROWS, 0] for i in range(COLUMNS if classes else 0)]
    rows = min((len(column) for column in columns), default=0)
    if not rows:  # no classes, or one without images
        count = enough(images.shape[-1], COLUMNS * ROWS)
        return images.pixels[torch.linspace(0, len(images) - 1, count).long()]
    return images.pixels[torch.stack([column[:rows] for column in columns], dim=1).flatten()]


def picture(pixels: Tensor, caption: str, *, columns: int = COLUMNS) -> str:
    sheet = grid(pixels, columns=columns, scale=comfortable_scale(pixels.shape[-1]))
    return embed(png(sheet), caption)


def embed(data: bytes, caption: str) -> str:
    return f'<img alt="{html.escape(caption)}" src="data:image/png;base64,{base64.b64encode(data).decode()}">'


def nearest(samples: Tensor, images: Images) -> tuple[Tensor, Tensor]:
    """For each sample the index of the training image at the least distance, and that distance (pixels in [-1, 1])."""
    a = samples.flatten(1).float() / 127.5
    indices, least = torch.zeros(len(a), dtype=torch.int64), torch.full((len(a),), math.inf)
    for start in range(0, len(images), BLOCK):  # the set may be far larger than memory
        b = images.pixels[start : start + BLOCK].flatten(1).float() / 127.5
        distance = torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")  # exact also where it is 0
        found = distance.min(dim=1)
        indices = torch.where(found.values < least, start + found.indices, indices)
        least = torch.minimum(found.values, least)
    return indices, least


def beside(run: Path, config: Config, generator: Generator, samples: Tensor, images: Images) -> str:
    """What samples are held against: the training images nearest to them, or the exact answer where it is known."""
    if is_points(images.shape):
        return map_section(run, generator) if config.data.source == "mixture2d" and not config.data.classes else ""
    return (
        '<h2>Are they copies?</h2>\n<p class="note">Above, the first samples; below each, the training image that is '
        "nearest to it pixel by pixel. A model that had learned the set by heart would show the same row twice.</p>\n"
        f'<div class="card">{nearest_panel(samples, images)}</div>'
    )


def nearest_panel(samples: Tensor, images: Images) -> str:
    """A row of samples above the training images that are nearest to them."""
    chosen = samples[: 2 * COLUMNS]
    indices, _ = nearest(chosen, images)
    return picture(torch.cat((chosen, images.pixels[indices])), "Samples and their neighbours", columns=2 * COLUMNS)


def map_section(run: Path, generator: Generator) -> str:
    """The learned map beside the exact one; also as RUN/map.png."""
    maps, distance = draw_maps(generator)
    drawn = png(maps)
    write_atomically(run / "map.png", drawn)
    return (
        '<h2>The learned map</h2>\n<p class="note">The exact answer is known here: where the probability flow ODE of '
        f"the mixture leads. The learned map is {distance:.3f} away from it (root mean square over "
        f'4,096 draws of noise). The same picture is in map.png.</p>\n<div class="card">{embed(drawn, "Maps")}</div>'
    )


def levels_of(snapshot: Path, records: list[Record]) -> object:
    """N at the time of a snapshot, which its header says; of older ones, what the log says about the steps before."""
    with contextlib.suppress(OSError, ValueError), Image.open(snapshot) as picture:
        if "levels" in picture.info:
            return picture.info["levels"]
    earlier = [record.get("levels") for record in records if record["step"] <= step_of(snapshot)]
    return earlier[-1] if earlier else None


def film_strip(run: Path, records: list[Record]) -> str:
    """The snapshots of the run, from first to last."""
    frames = []
    for path in list_snapshots(run):
        n = levels_of(path, records)
        label = f"step {step_of(path):,}" + (f" · N = {n}" if n else "")
        frames.append(f"<figure>{embed(path.read_bytes(), label)}<figcaption>{label}</figcaption></figure>")
    return "".join(frames) or '<p class="note">The run drew no samples on the way (training.snapshots = 0).</p>'


def charts(records: list[Record]) -> str:
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


def chips(config: Config, generator: Generator, records: list[Record]) -> list[str]:
    size = generator.spec.image_size
    return [
        config.data.source if size == 1 else f"{config.data.source}, {size}×{size}",
        f"{generator.model.size / 1e6:.2f} M parameters",
        f"{generator.origin.get('step', 0):,} steps",
        *([f"trained in {format_time(records[-1]['seconds'])}"] if records else []),
        "class-conditional" if generator.spec.class_names else "unconditional",
    ]


def figures(config: Config, generator: Generator, records: list[Record]) -> str:
    """The table of the run's figures."""
    last = records[-1] if records else {}
    speeds = sorted(record["images_per_second"] for record in records)
    objective, training = config.objective, config.training
    optimiser = OPTIMISERS[training.optimiser]
    rows = {
        "objective": f"{objective.kind}: {objective.distance}, {objective.weighting}, {objective.index}"
        + (f"; the first {objective.denoise:.0%} denoise" if objective.denoise else ""),
        "network": f"{config.net.kind}, {generator.model.size:,} parameters",
        "images seen": f"{last.get('images', 0):,} in {last.get('step', 0):,} steps of {training.batch}",
        "last loss": f"{last.get('loss', float('nan')):.4g} at N = {last.get('levels', '–')}",
        "speed": f"{speeds[len(speeds) // 2]:,.0f} images/s (median)" if speeds else "–",
        "time": format_time(last.get("seconds", 0)),
        "optimiser": f"{optimiser}, lr {training.lr:g} ({training.lr_schedule}), EMA {generator.origin.get('ema')}",
        "seed": str(config.seed),
        "torch": torch.__version__,
    }
    return "".join(f"<tr><th>{key}</th><td>{html.escape(value)}</td></tr>" for key, value in rows.items())
