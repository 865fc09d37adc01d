"""The map from noise to points that a model has learned of the mixture in the plane, beside the exact one."""

import functools
from typing import NamedTuple

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn import functional as F

from ict import rng
from ict.mixture import MIXTURE, SHAPE
from ict.pictures import INK, PAPER, colours, scatter
from ict.rng import Stream
from ict.sampling import Generator, flow, trajectory

POINTS = 4096
SOLVER_STEPS = 40  # of a diffusion model: Heun's method is then within 0.005 of the exact answer of the exact denoiser
SIDE, GRID, REACH = 320, 128, 3.0  # of a panel: pixels, places computed a side, and how much noise it shows
LINES = 0.2  # distance of the grid lines in the plane of the points


class Ends(NamedTuple):
    """Where noise ends up: by the exact map and by the learned one, float64 [n, 2]."""

    exact: Tensor
    learned: Tensor

    @property
    def apart(self) -> Tensor:
        return (self.learned - self.exact).norm(dim=1)

    @property
    def rms(self) -> float:
        return self.apart.square().mean().sqrt().item()


def follow(generator: Generator, z: Tensor) -> Ends:
    """Noise z [n, 2] through both maps, from σ_max z."""
    noise = generator.spec.noise
    x = noise.sigma_max * z.float().reshape(-1, *SHAPE)
    exact = MIXTURE.consistency(x, noise.sigma_max, sigma_min=noise.sigma_min, steps=100)
    return Ends(exact.flatten(1), learned_map(generator, x.to(generator.device)).cpu().double().flatten(1))


@torch.no_grad()
def learned_map(generator: Generator, x: Tensor) -> Tensor:
    """One call of a consistency model, or of an average velocity; a diffusion model is solved."""
    if generator.spec.kind == "diffusion":
        return flow(generator.model, x, sigmas=trajectory(SOLVER_STEPS, generator.spec.noise), labels=None)
    return generator.model(x, torch.full((len(x),), generator.spec.noise.sigma_max, device=x.device))


def gaussian_noise(count: int = POINTS) -> Tensor:
    return rng.normal(torch.arange(count), (2,), seed=0, step=0, stream=Stream.SAMPLING)


def map_distance(generator: Generator) -> float:
    """√E‖f(σ_max z) − exact(σ_max z)‖², over 4,096 z ~ N(0, 1)."""
    return follow(generator, gaussian_noise()).rms


def draw_maps(generator: Generator) -> tuple[Image.Image, float]:
    """Exact, learned, and how far apart: above over the plane of the noise, below in the plane of the points.

    Beside the picture, the distance of the two maps.
    """
    steps = torch.linspace(REACH, -REACH, GRID)
    plane = torch.stack((-steps.expand(GRID, GRID), steps[:, None].expand(GRID, GRID)), dim=-1).reshape(-1, 2)
    z = gaussian_noise()
    over, ends = follow(generator, plane), follow(generator, z)
    angle = colours(torch.atan2(z[:, 1], z[:, 0]))
    dots = functools.partial(scatter, side=SIDE)
    rows = [
        [landing(over.exact), landing(over.learned), differences(over)],
        [dots(ends.exact, angle), dots(ends.learned, angle), dots(ends.exact, angle, to=ends.learned)],
    ]
    heun = f"learned, {SOLVER_STEPS} steps of Heun's method"
    apart = f"apart: RMS {ends.rms:.3f}, median {ends.apart.median():.3f}"
    titles = ("exact", heun if generator.spec.kind == "diffusion" else "learned, in one call", apart)
    notes = (
        "The plane of the noise, coloured by where a point lands, lines every 0.2 there.  Right: black 0, yellow 0.2.",
        "4,096 points of noise where they land, coloured by the angle they started at.  Right: from exact to learned.",
    )
    return sheet(rows, titles, notes), ends.rms


def landing(ends: Tensor) -> Image.Image:
    """A picture of places: the hue is the angle, grid lines are darker."""
    places = F.interpolate(ends.reshape(1, GRID, GRID, 2).permute(0, 3, 1, 2), size=(SIDE, SIDE), mode="bicubic")[0]
    x, y = places
    line = torch.stack([((one / LINES) % 1 - 0.5).abs() for one in (x, y)]).amax(0)
    shade = 1 - 0.45 * ((line - 0.44) / 0.06).clamp(0, 1)
    strength = (torch.hypot(x, y) / 0.6).clamp(0, 1)
    return picture_of((1 - strength * (1 - colours(torch.atan2(y, x)))) * shade)


def differences(ends: Ends) -> Image.Image:
    """Distances over the plane: black 0, yellow 0.2."""
    found = F.interpolate(ends.apart.reshape(1, 1, GRID, GRID), size=(SIDE, SIDE), mode="bilinear")[0]
    level = (found / 0.2).clamp(0, 1)
    return picture_of(torch.cat((level.sqrt(), 0.9 * level, 0.4 * level**3)))


def picture_of(values: Tensor) -> Image.Image:
    """[3, H, W] in [0, 1] -> a picture."""
    return Image.fromarray((values.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy())


def sheet(rows: list[list[Image.Image]], titles: tuple[str, ...], notes: tuple[str, ...]) -> Image.Image:
    """Rows of panels with a title over each column and a note under each row."""
    gap, head, foot = 16, 34, 30
    width = gap + len(titles) * (SIDE + gap)
    page = Image.new("RGB", (width, head + len(rows) * (SIDE + foot)), PAPER)
    pen, large, small = ImageDraw.Draw(page), ImageFont.load_default(16), ImageFont.load_default(13)
    for column, title in enumerate(titles):
        pen.text((gap + column * (SIDE + gap), 10), title, fill=INK, font=large)
    for number, (row, note) in enumerate(zip(rows, notes, strict=True)):
        top = head + number * (SIDE + foot)
        for column, panel in enumerate(row):
            page.paste(panel, (gap + column * (SIDE + gap), top))
        pen.text((gap, top + SIDE + 7), note, fill=INK, font=small)
    return page
