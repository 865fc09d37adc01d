"""Where samples begin: the Gaussian that is fitted, what is drawn from it, its place in the file, and whole runs."""

import io
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from helpers import SpyNet, gaussian_model, same_weights, tiny_config
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner

import ict.start
from ict import rng
from ict.cli import app
from ict.config import NoiseConfig
from ict.data import Images, load_images
from ict.evaluation.features import open_features
from ict.evaluation.judge import Judge
from ict.evaluation.report import wording
from ict.evaluation.tune import Ladder, grid_of, tune
from ict.experiment import run
from ict.files import DamagedFile, list_checkpoints, step_name
from ict.model import ConsistencyModel, ModelSpec, build_model, pack_model, read_model
from ict.objectives import Loss
from ict.objectives.ict import ImprovedConsistencyTraining
from ict.pixels import to_float, to_uint8
from ict.reading import ConfigError, from_dict
from ict.rng import Stream
from ict.sampling import Generator, check_ladder, load, trajectory
from ict.start import Start, StartSpec, fit
from ict.training.log import RunLog, read_log

SHAPE = (1, 4, 4)
GAUSSIAN = {"start": "gaussian", "start_sigma": 3.0}
TEN = tuple("0123456789")
RUN = {"objective": {"teacher": "ema"}, "training": {"ema_ramp": 0.0}}  # has all that is kept, and forgets slowly


def quiet() -> Console:
    return Console(file=io.StringIO(), width=300)


def pictures(n: int = 400, *, shape=SHAPE, seed: int = 0, rank: int = 5, middle: float = 0.2) -> Tensor:
    """Images that vary in a few directions and a little in all, around a mean that is not its own mirror image."""
    draws, numbers = torch.Generator().manual_seed(seed), math.prod(shape)
    mixing = 0.4 * torch.randn(rank, numbers, generator=draws) / rank**0.5
    x = torch.randn(n, rank, generator=draws) @ mixing + 0.1 * torch.randn(n, numbers, generator=draws)
    return to_uint8((middle + torch.linspace(-0.4, 0.4, numbers) + x).reshape(n, *shape))


def moments(pixels: Tensor, *, flip: bool = False) -> tuple[Tensor, Tensor]:
    """Mean and covariance of images, computed plainly."""
    x = to_float(torch.cat((pixels, pixels.flip(-1))) if flip else pixels).double().flatten(1)
    return x.mean(0), (x - x.mean(0)).T @ (x - x.mean(0)) / len(x)


def noisy(covariance: Tensor, sigma: float) -> Tensor:
    return covariance + sigma**2 * torch.eye(len(covariance), dtype=torch.float64)


def fitted(pixels: Tensor, labels: Tensor | None = None, *, sigma=0.9, classes=0, flip=False, **sizes: int) -> Start:
    shape = tuple(pixels.shape[1:])
    spec = StartSpec.sized(sigma, shape, classes=classes)
    start = Start(replace(spec, **sizes), shape, classes=classes)
    fit(start, pixels, labels, flip=flip)
    return start


def drawn(start: Start, n: int, *, sigma: float = 0.0, seed: int = 0, label: int | None = None) -> Tensor:
    labels = None if label is None else torch.full((n,), label)
    return start.draw(torch.arange(n), sigma=sigma or start.sigma, seed=seed, labels=labels)


def check_moments(x: Tensor, mean: Tensor, covariance: Tensor) -> None:
    """Samples of a Gaussian have these moments, within five standard errors of each number."""
    y = torch.linalg.solve_triangular(torch.linalg.cholesky(covariance), (x.double().flatten(1) - mean).T, upper=False)
    apart = y @ y.T / len(x) - torch.eye(len(y), dtype=torch.float64)
    apart.diagonal().div_(2**0.5)
    assert y.mean(1).abs().max() * len(x) ** 0.5 < 5
    assert apart.abs().max() * len(x) ** 0.5 < 5


# --- what is drawn


@pytest.mark.parametrize("sigma", [0.9, 1.4])
@pytest.mark.parametrize("flip", [False, True])
def test_draws_have_mean_and_covariance_of_noisy_images(sigma, flip):
    pixels = pictures()
    mean, covariance = moments(pixels, flip=flip)
    assert covariance.trace() > 2  # so that without it, or at another level, it would be seen
    check_moments(drawn(fitted(pixels, flip=flip), 40_000, sigma=sigma), mean, noisy(covariance, sigma))


def test_mirrored_images_count_only_when_asked():
    pixels = pictures()
    plain, flipped = fitted(pixels), fitted(pixels, flip=True)
    mean = flipped.mean.reshape(SHAPE)
    assert torch.allclose(mean, mean.flip(-1), atol=1e-6) and (plain.mean - flipped.mean).abs().max() > 0.05


def test_of_many_numbers_the_strongest_directions_are_told_apart_and_the_rest_is_shared():
    pixels = pictures(600, shape=(3, 8, 8), rank=3)
    mean, covariance = moments(pixels)
    values, vectors = torch.linalg.eigh(covariance)
    top, rest = vectors[:, -3:], values[:-3].mean()
    assert values[-3] > 5 * values[-4]
    expected = top @ torch.diag(values[-3:] - rest) @ top.T + rest * torch.eye(len(values))
    for own in (1, 3):
        start = fitted(pixels, directions=3, own=own)
        variances = torch.cat((values[-3:].flip(0), rest[None])) + 0.81
        assert torch.allclose(start.spread.double() ** 2, variances, rtol=1e-4)
        check_moments(drawn(start, 20_000), mean, noisy(expected, 0.9))


def test_each_class_has_its_own_centre_and_covariance():
    kinds = [pictures(n, seed=k, middle=0.3 * k - 0.3) for k, n in enumerate((20_000, 10_000, 30_000))]
    labels = torch.cat([torch.full((len(some),), k) for k, some in enumerate(kinds)])
    order = torch.randperm(len(labels))
    start = fitted(torch.cat(kinds)[order], labels[order], classes=3, sigma=0.3)
    for k, some in enumerate(kinds):
        mean, covariance = moments(some)
        check_moments(drawn(start, 10_000, label=k), mean, noisy(covariance, 0.3))


def test_all_classes_together_have_the_moments_of_all_images():
    """Also where each class has a covariance of its own only in some of the directions."""
    kinds = [pictures(2000, seed=k, middle=0.3 * k - 0.3) for k in range(2)]
    labels, (mean, covariance) = torch.arange(2).repeat_interleave(2000), moments(torch.cat(kinds))
    start = fitted(torch.cat(kinds), labels, classes=2, own=4)
    x = start.draw(torch.arange(20_000), sigma=0.9, seed=0, labels=torch.arange(2).repeat(10_000))
    check_moments(x, mean, noisy(covariance, 0.9))


def test_a_class_with_one_image_or_none_can_be_drawn():
    pixels, labels = pictures(501), torch.zeros(501).long()
    labels[77] = 1
    start = fitted(pixels, labels, classes=3)
    (all_mean, covariance), lone = moments(pixels), to_float(pixels[77]).double().flatten()
    for label, furthest in ((1, lone), (2, all_mean)):  # one image says little of its class: it is met on the way
        x = drawn(start, 10_000, label=label).double().flatten(1)
        way, gone = furthest - all_mean, x.mean(0) - all_mean
        share = (gone @ way / (way @ way)).item() if label == 1 else 0.0
        assert -0.1 < share < 1.1 and (gone - share * way).abs().max() < 0.3
        variance = x.var(0)
        assert variance.min() > 0.81 * 0.95 and variance.max() < 1.1 * noisy(covariance, 0.9).diagonal().max()
        assert variance.sum() > 0.9 * noisy(covariance, 0.9).trace()  # it borrows what it has too little of


def test_images_of_one_kind_only():
    """A single image, and images that are all the same: noise around it."""
    for n in (1, 20):
        pixels = pictures(1).repeat(n, 1, 1, 1)
        for labels, classes in ((None, 0), (torch.zeros(n).long(), 4)):
            start = fitted(pixels, labels, classes=classes)
            x = drawn(start, 20_000, label=0 if classes else None)
            check_moments(x, to_float(pixels[0]).double().flatten(), noisy(torch.zeros(16, 16), 0.9))


def test_classes_that_do_not_differ_are_not_told_apart_by_chance():
    pixels, labels = pictures(500), torch.arange(500) % 50  # ten images each
    start = fitted(pixels, labels, classes=50)
    own = to_float(pixels).flatten(1) - start.mean
    by_chance = torch.stack([own[labels == k].mean(0) for k in range(50)]).square().sum(1).mean()
    assert start.centres.square().sum(1).mean() < 0.25 * by_chance


def test_each_image_is_drawn_of_its_own_class():
    pixels = torch.cat((pictures(200, middle=-0.5), pictures(200, middle=0.5)))
    start = fitted(pixels, torch.arange(2).repeat_interleave(200), classes=2)
    both = [drawn(start, 6, label=k) for k in range(2)]
    mixed = start.draw(torch.arange(6), sigma=0.9, seed=0, labels=torch.tensor([0, 1, 1, 0, 1, 0]))
    assert torch.equal(mixed, torch.stack([both[k][i] for i, k in enumerate((0, 1, 1, 0, 1, 0))]))
    assert (both[1] - both[0]).mean() > 0.5


def test_a_start_does_not_depend_on_the_batch_it_is_drawn_in():
    kinds = torch.arange(400) % 3
    start = fitted(pictures(), kinds, classes=3)
    for sigma in (0.9, 5.0):
        whole = start.draw(torch.arange(300), sigma=sigma, seed=7, labels=kinds[:300])
        for some in (torch.tensor([0]), torch.tensor([299, 4]), torch.arange(5, 133)):
            assert torch.equal(start.draw(some, sigma=sigma, seed=7, labels=kinds[some]), whole[some])
        assert not torch.allclose(start.draw(torch.arange(300), sigma=sigma, seed=8, labels=kinds[:300]), whole, atol=1)
        assert whole.dtype == torch.float32 and whole.shape == (300, *SHAPE)


def test_a_start_is_made_of_the_noise_of_its_number():
    start = fitted(pictures())
    z = rng.normal(torch.arange(500), SHAPE, seed=3, step=0, stream=Stream.SAMPLING).flatten()
    alike = torch.corrcoef(torch.stack((z, (drawn(start, 500, seed=3).flatten(1) - start.mean).flatten())))[0, 1]
    assert alike > 0.9


# --- how it is fitted


@pytest.mark.parametrize("n", [1, 10, 400])
def test_directions_are_orthonormal_and_the_strongest_come_first(n):
    for flip in (False, True):
        start = fitted(pictures(n, shape=(3, 8, 8)), flip=flip, directions=40, own=20)
        assert torch.allclose(start.basis @ start.basis.T, torch.eye(40), atol=1e-5)
        assert (start.spread.diff() < 1e-6).all() and start.spread.min() > 0.899
        assert torch.equal(start.factors, start.factors.tril())


def test_a_fit_is_the_same_every_time_and_touches_nobody_elses_randomness():
    before, pixels = torch.random.get_rng_state(), pictures()
    first = fitted(pixels)
    assert torch.equal(torch.random.get_rng_state(), before)
    fit(first, pictures(50, seed=9), None, flip=False)  # of something else in between
    fit(first, pixels, None, flip=False)
    assert same_weights(first.state_dict(), fitted(pixels).state_dict())


@pytest.mark.parametrize("flip", [False, True])
def test_pieces_do_not_matter_and_passes_are_told(flip, monkeypatch):
    pixels, labels, told = pictures(100), torch.arange(100) % 2, []
    whole = fitted(pixels, labels, classes=2, flip=flip)
    monkeypatch.setattr(ict.start, "PIECE", 7)
    pieces = Start(StartSpec.sized(0.9, SHAPE, classes=2), SHAPE, classes=2)
    fit(pieces, pixels, labels, flip=flip, progress=lambda done, total: told.append((done, total)))
    for k in range(2):
        assert torch.allclose(drawn(whole, 50, label=k), drawn(pieces, 50, label=k), atol=1e-4)
    assert told == [(k + 1, len(told)) for k in range(len(told))] and told


def test_of_many_images_some_from_everywhere_are_looked_at(monkeypatch):
    """Sets are often in the order of their classes."""
    pixels = torch.cat([pictures(1000, seed=k, middle=0.4 * k - 0.4) for k in range(3)])
    labels = torch.arange(3).repeat_interleave(1000)
    monkeypatch.setattr(ict.start, "LOOKED_AT", 900 * 16)
    start = fitted(pixels, labels, classes=3)
    for k in range(3):
        mean, covariance = moments(pixels[labels == k])
        x = drawn(start, 5000, label=k).double().flatten(1)
        assert (x.mean(0) - mean).abs().max() < 0.1
        assert x.var(0).sum() == pytest.approx(noisy(covariance, 0.9).trace().item(), rel=0.05)


def test_points_of_the_plane_have_a_start_too():
    pixels = to_uint8(torch.tensor([0.5, -0.2]) + torch.randn(500, 2) @ torch.tensor([[0.2, 0.1], [0.0, 0.1]]))
    pixels = pixels.reshape(-1, 2, 1, 1)
    mean, covariance = moments(pixels)
    check_moments(drawn(fitted(pixels, sigma=0.3), 20_000), mean, noisy(covariance, 0.3))


def test_a_start_leaves_room_in_the_model_file():
    for shape, classes in (((1, 8, 8), 10), ((3, 32, 32), 0), ((3, 64, 64), 1000), ((3, 1024, 1024), 0)):
        spec = StartSpec.sized(2.0, shape, classes=classes)
        with torch.device("meta"):
            start = Start(spec, shape, classes=classes)
        assert sum(one.numel() for one in start.buffers()) < 2.1 * 2**22 + math.prod(shape)
        assert 1 <= spec.own <= spec.directions <= math.prod(shape)
    assert StartSpec.sized(2.0, (3, 32, 32), classes=10) == StartSpec(sigma=2.0, directions=256, own=64)


# --- the model file


def digits() -> Images:
    return load_images(tiny_config().data)


def generator(*, classes: int = 10, sampling=GAUSSIAN, **sections: dict) -> Generator:
    """With weights of no meaning, and a start that is fitted to digits."""
    spec = ModelSpec.from_config(tiny_config(data={"classes": classes}, sampling=sampling, **sections), TEN)
    model, images = build_model(spec), digits()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    if model.start is not None:
        fit(model.start, images.pixels, images.labels if classes else None, flip=False)
    return Generator(model, spec)


def test_a_model_file_gives_back_the_start(tmp_path):
    g, path = generator(), tmp_path / "model.safetensors"
    path.write_bytes(pack_model(g.spec, g.model.state_dict(), {"step": 7}))
    again, spec, _ = read_model(path)
    assert spec == g.spec and spec.start.sigma == 3.0 and spec.first_sigma == 3.0
    assert same_weights(again.start.state_dict(), g.model.start.state_dict()) and again.start.sigma == 3.0
    for options in ({}, {"steps": 2}, {"sigmas": [9.0, 0.5]}, {"label": 3}):
        assert torch.equal(Generator(again, spec).sample(4, **options), g.sample(4, **options))
    assert again.size == generator(sampling={}).model.size  # it is not counted among the parameters


def test_a_file_of_an_older_version_has_no_start(tmp_path):
    g, path = generator(sampling={}), tmp_path / "model.safetensors"
    path.write_bytes(pack_model(g.spec, g.model.state_dict(), {}))
    with safetensors.safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["ict"])
    assert "start" not in header["spec"]  # and an older version can read a new file that has none
    del header["digest"]
    safetensors.torch.save_file(g.model.state_dict(), path, metadata={"ict": json.dumps(header)})
    old = load(path)
    assert old.spec == g.spec and old.model.start is None and old.ladder(2) == [80.0, 0.821]
    assert torch.equal(old.sample(3), g.sample(3))


def test_a_file_whose_start_is_not_what_it_says_is_refused(tmp_path):
    g, plain, path = generator(), generator(sampling={}), tmp_path / "model.safetensors"
    other = replace(g.spec, start=replace(g.spec.start, own=3))
    for spec, model in ((g.spec, plain.model), (plain.spec, g.model), (other, g.model)):
        path.write_bytes(pack_model(spec, model.state_dict(), {}))
        with pytest.raises(DamagedFile, match="do not fit"):
            read_model(path)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        ({"sigma": -1.0}, r"start\.sigma = -1\.0"),
        ({"sigma": math.nan, "directions": 4, "own": 4}, r"start\.sigma = nan"),
        ({"sigma": math.inf, "directions": 4, "own": 4}, r"start\.sigma = inf"),
        ({"sigma": 2.0}, r"start\.sigma = 2 .*not a start"),
        ({"sigma": 2.0, "directions": 4}, "own = 0: not a start"),
        ({"sigma": 2.0, "directions": 4, "own": 5}, "own = 5: not a start"),
        ({"sigma": 2.0, "directions": 4, "own": -1}, "own = -1: not a start"),
        ({"sigma": 2.0, "directions": 10**9, "own": 4}, "not a start"),
        ({"sigma": 0.0, "directions": 4, "own": 4}, "not a start"),
        ({"sigma": "2", "directions": 4, "own": 4}, r"start\.sigma = '2' must be a number"),
        ({"sigma": 2.0, "directions": 4.5, "own": 4}, r"start\.directions = 4\.5 must be a whole number"),
        ({"sigma": 0.821, "directions": 4, "own": 4}, r"start\.sigma = 0\.821 must lie between 0\.821 and 80"),
        ({"sigma": 0.5, "directions": 4, "own": 4}, r"start\.sigma = 0\.5 must lie between 0\.821 and 80"),
        ({"sigma": 80.0, "directions": 4, "own": 4}, r"start\.sigma = 80\.0 must lie between 0\.821 and 80"),
        ({"sigma": 2.0, "directions": 65, "own": 4}, "directions = 65"),  # of images of 64 numbers
    ],
)
def test_a_start_that_makes_no_sense_is_refused(start, message):
    with pytest.raises(ConfigError, match=message):
        from_dict(ModelSpec, {"image_size": 8, "channels": 1, "start": start})


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"start": "gauss"}, r"sampling\.start = 'gauss': use noise, gaussian or mixture"),
        ({"start": "gaussian", "start_sigma": 0.0}, r"sampling\.start_sigma = 0\.0: must be above 0"),
        ({"start": "gaussian", "start_sigma": 0.821}, r"must lie between sampling\.sigma_mid = 0\.821 and"),
        ({"start": "gaussian", "start_sigma": 80.0}, r"sampling\.start_sigma = 80\.0 must lie between"),
        ({"start": "gaussian", "sigma_mid": 5.0}, r"sampling\.start_sigma = 4\.0 must lie between"),
        ({"start": "gaussian", "start_sigma": math.nan}, r"sampling\.start_sigma = nan"),
        ({"start": True}, r"sampling\.start = True must be a text"),
    ],
)  # fmt: skip
def test_a_recipe_for_a_start_that_makes_no_sense_is_refused(sampling, message):
    with pytest.raises(ConfigError, match=message):
        tiny_config(sampling=sampling)


def test_a_start_that_would_not_suit_what_is_learned_is_refused():
    for start in ("gaussian", "mixture"):
        with pytest.raises(ConfigError, match="independent noise"):
            tiny_config(data={"classes": 0}, sampling={"start": start}, objective={"coupling": "batch"})
        with pytest.raises(ConfigError, match="up to 128 pixels a side"):
            tiny_config(data={"image_size": 256}, sampling={"start": start})


def test_a_level_that_is_not_used_may_be_anything():
    assert tiny_config(sampling={"start_sigma": 500.0}).sampling.start == "noise"
    assert ModelSpec.from_config(tiny_config(sampling={"start_sigma": 500.0}), TEN).start == StartSpec()


# --- sampling


def test_ladders_begin_at_the_start():
    g, plain = generator(), generator(sampling={})
    assert g.ladder() == [3.0] and g.ladder(2) == [3.0, 0.821] and plain.ladder(2) == [80.0, 0.821]
    roots = [sigma ** (1 / 7) for sigma in g.ladder(4)]
    assert roots[0] - roots[1] == pytest.approx(roots[1] - roots[2]) == pytest.approx(roots[2] - roots[3])
    diffusion = Generator(g.model, replace(g.spec, kind="diffusion"))
    assert diffusion.ladder(5) == trajectory(5, g.spec.noise, first=3.0) and len(diffusion.ladder()) == 18
    assert diffusion.ladder(5)[0] == 3.0 and diffusion.ladder(2) == [3.0, 0.002]
    for one in (g, diffusion):
        for steps in range(2, 8):
            check_ladder(one.ladder(steps), one.spec)


def test_levels_from_the_start_to_sigma_max_are_taken_and_others_refused():
    spec, plain = generator().spec, generator(sampling={}).spec
    for first in (3.0, 3.5, 79.0, 80.0, 80, 3):
        assert check_ladder([first, 0.5], spec) == [first, 0.5]
    for first in (2.99, 0.821, 80.5, 1e9, math.nan):
        with pytest.raises(ConfigError, match=r"start at 80\.0, or from 3\.0 on, and stay above 0\.002"):
            check_ladder([first, 0.5], spec)
    for ladder in ([3.0, 3.0], [3.0, 4.0], [3.0, 0.002], []):
        with pytest.raises(ConfigError, match="falling noise levels"):
            check_ladder(ladder, spec)
    for first in (3.0, 79.0):
        with pytest.raises(ConfigError, match=r"start at 80\.0 and stay"):
            check_ladder([first, 0.5], plain)


@pytest.mark.parametrize("kind", ["consistency", "diffusion"])
def test_from_sigma_max_samples_are_what_they_are_without_a_start(kind):
    objective = {"kind": "edm"} if kind == "diffusion" else {}
    g, plain = generator(objective=objective), generator(sampling={}, objective=objective)
    plain.model.net.load_state_dict(g.model.net.state_dict())
    assert g.spec.kind == kind
    for steps in (2, 3) if kind == "diffusion" else (1, 2, 3):
        ladder = plain.ladder(steps)
        assert ladder[0] == 80 and torch.equal(g.sample(5, sigmas=ladder, seed=2), plain.sample(5, steps=steps, seed=2))
        assert not torch.allclose(g.sample(5, steps=steps, seed=2), plain.sample(5, steps=steps, seed=2), atol=1e-3)


def test_samples_do_not_depend_on_the_batch():
    g = generator()
    for options in ({"steps": 1}, {"steps": 2}, {"sigmas": [10.0]}):
        images = g.sample(9, seed=5, **options)
        for batch in (1, 4):
            assert torch.allclose(g.sample(9, seed=5, batch=batch, **options), images, atol=1e-5)
        assert torch.allclose(g.sample(3, seed=5, **options), images[:3], atol=1e-5)


def test_the_net_is_asked_with_what_the_start_draws():
    """Of the class that is asked for; then noise of the next level is added to the answer, as ever."""
    g, net, noise, labels = generator(), SpyNet(), NoiseConfig(), torch.tensor([1, 7, 7, 0])
    g.model.net = net
    g.sample(4, sigmas=[5.0, 0.5], seed=3, label=labels, clip=False)
    first, second = net.calls
    assert torch.equal(first["label"], labels)
    assert torch.exp(4 * first["c_noise"]) == pytest.approx(torch.full((4,), 5.0), rel=1e-4)
    begun = g.model.start.draw(torch.arange(4), sigma=5.0, seed=3, labels=labels)
    assert torch.allclose(first["x"] * math.sqrt(25.25), begun, atol=1e-4)
    z = rng.normal(torch.arange(4), (1, 8, 8), seed=3, step=1, stream=Stream.SAMPLING)
    again = begun * 0.25 / ((5.0 - noise.sigma_min) ** 2 + 0.25) + math.sqrt(0.25 - noise.sigma_min**2) * z
    assert torch.allclose(second["x"] * math.sqrt(0.5), again, atol=1e-4)
    g.sample(4, label=labels)
    assert torch.exp(4 * net.calls[2]["c_noise"]) == pytest.approx(torch.full((4,), 3.0), rel=1e-4)


class ExactDenoiser(ConsistencyModel):
    """The diffusion model of data ~ N(0, s²)."""

    def forward(self, x, sigma, label=None, key=None):
        return x * (0.09 / (0.09 + sigma**2)).to(x.dtype).reshape(-1, 1, 1, 1)


@pytest.mark.parametrize(
    ("kind", "sigmas"),
    [
        ("consistency", None),
        ("consistency", [3.0, 0.5]),
        ("consistency", [20.0]),
        ("consistency", [80.0]),
        ("diffusion", trajectory(50, NoiseConfig(), first=3.0)),
        ("diffusion", trajectory(50, NoiseConfig(), first=20.0)),
    ],
)
def test_an_exact_model_gives_the_exact_distribution_from_a_start(kind, sigmas):
    noise, start = NoiseConfig(), StartSpec.sized(3.0, (1, 8, 8), classes=0)
    model = gaussian_model(0.3, noise)
    if kind == "diffusion":
        model = ExactDenoiser(model.net, noise, image_shape=(1, 8, 8), kind=kind)
    model.start = Start(start, (1, 8, 8), classes=0)
    fit(model.start, to_uint8(0.3 * torch.randn(5000, 1, 8, 8)), None, flip=False)
    g = Generator(model, ModelSpec(image_size=8, channels=1, noise=noise, kind=kind, start=start))
    x = g.sample(2000, sigmas=sigmas, clip=False)
    assert x.std().item() == pytest.approx(0.3, rel=0.015) and abs(x.mean().item()) < 0.005


@pytest.mark.parametrize("kind", ["ict", "edm"])
def test_the_page_says_where_samples_begin(kind):
    g = generator(objective={"kind": kind})
    assert "pure noise" not in wording(g).how and "Gaussian" in wording(g).how
    assert "pure noise" in wording(generator(objective={"kind": kind}, sampling={})).how


# --- tuning


def test_tuning_begins_at_the_start_and_stays_below_it(monkeypatch):
    g, said = generator(), []
    judge = Judge.of(digits(), open_features("digits", weights=None, device=torch.device("cpu")), samples=70)
    options = {"samples": 70, "first": 70, "say": lambda *line: said.append(line[0])}
    ladder = Ladder(g, judge, samples=20, seed=3, batch=7)
    first = g.sample(20, seed=3, label=judge.labels(g, 20, seed=3).tolist())
    assert ladder.sigmas == [3.0] and torch.allclose(ladder.x, first, atol=1e-5)
    sigmas, _ = tune(g, judge, steps=2, stop=400, **options)
    assert sigmas[0] == 3.0 and check_ladder(sigmas, g.spec) and max(said) < 3.0
    monkeypatch.setattr(Ladder, "score", lambda self, sigma, samples: -sigma)
    for one, highest in ((g, 3.0), (generator(sampling={}), 80.0)):  # the highest levels below are the best by this
        below = [sigma for sigma in grid_of(one).tolist() if sigma < highest]
        (first, second), _ = tune(one, judge, steps=2, stop=1, **options)
        assert first == highest and second in below[-3:]


# --- runs


def start_of(path: Path) -> dict[str, Tensor]:
    return read_model(path)[0].start.state_dict()


def losses(folder: Path) -> list[dict]:
    return [{k: v for k, v in line.items() if k not in RunLog.TIMES} for line in read_log(folder / "log.jsonl")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("start") / "run"
    run(tiny_config(sampling=GAUSSIAN, **RUN), folder, device="cpu", console=quiet())
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """The same without a start."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    run(tiny_config(**RUN), folder, device="cpu", console=quiet())
    return folder


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    """What is fitted to the digits, which the tiny recipe mirrors."""
    images, start = digits(), Start(StartSpec.sized(3.0, (1, 8, 8), classes=10), (1, 8, 8), classes=10)
    fit(start, images.pixels, images.labels, flip=True)
    return start.state_dict()


def test_a_run_saves_the_fitted_start_with_every_model(whole, expected):
    files = [path for one in list_checkpoints(whole) for path in one.glob("*.safetensors")]
    assert len(files) == 3 * 4  # the student, its teacher and two averages
    for path in (whole / "model.safetensors", *files):
        assert same_weights(start_of(path), expected)
    g = load(whole)
    assert g.ladder(2) == [3.0, 0.821] and g.sample(3).isfinite().all()


def test_a_start_changes_nothing_in_training(whole, plain):
    assert losses(whole) == losses(plain)
    for ours, theirs in zip(list_checkpoints(whole), list_checkpoints(plain), strict=True):
        assert (ours / "optimiser.pt").read_bytes() == (theirs / "optimiser.pt").read_bytes()
        for name in ("student", "target", "ema-0.9", "ema-0.99"):
            with_start, without = (read_model(one / f"{name}.safetensors")[0] for one in (ours, theirs))
            assert same_weights(with_start.net.state_dict(), without.net.state_dict()) and without.start is None


def test_snapshots_and_page_begin_at_the_start(whole, plain):
    ours, theirs = (sorted((folder / "samples").iterdir())[-1].read_bytes() for folder in (whole, plain))
    assert ours != theirs
    assert "a Gaussian that stands for noisy images" in (whole / "report.html").read_text()
    assert "call of the network on pure noise" in (plain / "report.html").read_text()


def test_a_resumed_run_keeps_its_start_and_fits_no_other(whole, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    for step in (8, 12):
        (folder / "checkpoints" / step_name(step) / "checkpoint.json").write_text("lost")
    monkeypatch.setattr("ict.experiment.main.fit", lambda *_, **__: pytest.fail("it is fitted already"))
    run(tiny_config(sampling=GAUSSIAN, **RUN), folder, device="cpu", console=quiet(), resume=True)
    assert (folder / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    newest = list_checkpoints(folder)[-1]
    for path in newest.glob("*.safetensors"):
        assert path.read_bytes() == (whole / "checkpoints" / newest.name / path.name).read_bytes()


@pytest.mark.parametrize("sampling", [{}, GAUSSIAN | {"start_sigma": 5.0}])
def test_a_resumed_run_begins_where_it_did(sampling, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"sampling\.start"):
        run(tiny_config(sampling=sampling, **RUN), tmp_path / "run", device="cpu", console=quiet(), resume=True)


def test_a_run_that_begins_anew_keeps_its_start(expected, tmp_path, monkeypatch):
    original, console = ImprovedConsistencyTraining.__call__, quiet()

    def spoiled(self, model, images, labels, place):
        loss = original(self, model, images, labels, place)
        bad = place.seed == 0 and place.number >= 3
        return Loss(loss.per_sample * (math.nan if bad else 1), loss.stats, loss.sigma, loss.output)

    monkeypatch.setattr(ImprovedConsistencyTraining, "__call__", spoiled)
    training = RUN["training"] | {"steps": 16, "save_every": 1000, "snapshots": 0}
    config = tiny_config(sampling=GAUSSIAN, training=training, objective=RUN["objective"])
    run(config, tmp_path / "run", device="cpu", console=console)
    assert "Going back to the start, as nothing was saved yet" in console.file.getvalue()
    (last,) = list_checkpoints(tmp_path / "run")
    files = [tmp_path / "run" / "model.safetensors", *last.glob("*.safetensors")]
    assert len(files) == 5
    for path in files:
        assert same_weights(start_of(path), expected)


def test_weights_of_another_model_come_without_its_start(whole, plain, expected, tmp_path):
    training = {"steps": 1, "lr": 1e-12, "snapshots": 0}
    for name, source, sampling in (("with", plain, GAUSSIAN), ("without", whole, {}), ("other", whole, GAUSSIAN)):
        config = tiny_config(training=training | {"start": str(source / "model.safetensors")}, sampling=sampling)
        config = replace(config, data=replace(config.data, flip=name != "other"))
        model, _, _ = read_model(run(config, tmp_path / name, device="cpu", console=quiet()))
        weights = model.net.state_dict()
        for key, theirs in load(source).model.net.state_dict().items():
            assert torch.allclose(weights[key], theirs, atol=1e-6)
        assert (model.start is None) == (name == "without")
        if model.start is not None:  # its own, of its own images
            assert same_weights(model.start.state_dict(), expected) == (name == "with")


def test_a_run_without_classes_has_one_gaussian(tmp_path):
    config = tiny_config(sampling=GAUSSIAN, data={"classes": 0, "flip": False}, training={"steps": 1, "snapshots": 0})
    g = load(run(config, tmp_path / "run", device="cpu", console=quiet()))
    mean, covariance = moments(digits().pixels)
    check_moments(drawn(g.model.start, 20_000), mean, noisy(covariance, 3.0))
    assert g.model.start.centres.abs().max() < 1e-4 and g.sample(3).shape == (3, 1, 8, 8)


def test_the_command_line_knows_the_start(whole, tmp_path):
    def invoke(*arguments: object) -> str:
        done = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})
        assert done.exit_code == 0, done.exception
        return done.output

    said = invoke("info", whole)
    assert "a Gaussian at σ = 3" in said and "σ = 3, 0.821" in said
    tuned = tmp_path / "tuned.safetensors"
    said = invoke("tune", whole, "--samples", 70, "--first", 70, "--write", tuned)
    levels = said.split("--sigmas ")[1].split()[0]
    assert levels.startswith("3,") and load(tuned).ladder(2)[0] == 3.0
    assert same_weights(start_of(tuned), start_of(whole / "model.safetensors"))
    invoke("sample", tuned, "-n", 2, "--sigmas", levels, "--out", tmp_path / "two.png")


# --- mixtures


def clumps(n: int = 3000) -> tuple[Tensor, Tensor]:
    """Images of two kinds that one Gaussian cannot tell apart, three of the first for each of the second."""
    draws = torch.Generator().manual_seed(0)
    kinds = (torch.arange(n) % 4 == 3).long()
    x = 0.6 * (1 - 2.0 * kinds)[:, None] + 0.1 * torch.randn(n, 16, generator=draws)
    return to_uint8(x.reshape(n, *SHAPE)), kinds


def test_a_mixture_finds_the_kinds_of_images_and_how_many_there_are_of_each():
    pixels, _ = clumps()
    start = fitted(pixels, sigma=0.5, parts=2)
    bright = drawn(start, 20_000).flatten(1).mean(1)
    assert (bright > 0).double().mean().item() == pytest.approx(0.75, abs=0.015)
    for kind, level in ((bright > 0, 0.6), (bright < 0, -0.6)):
        assert bright[kind].mean().item() == pytest.approx(level, abs=0.01)
        deviation = ((0.1**2 + 0.5**2) / 16) ** 0.5  # of the images, and of the noise
        assert bright[kind].std().item() == pytest.approx(deviation, rel=0.05)
    _, covariance = moments(pixels)
    found = torch.cov(drawn(start, 40_000).double().flatten(1).T)
    assert (found - noisy(covariance, 0.5)).abs().max() < 0.03
    spread = drawn(fitted(pixels, sigma=0.5), 20_000).flatten(1).mean(1)  # one Gaussian draws what is between them
    assert (spread.abs() < 0.2).double().mean() > 3 * (bright.abs() < 0.2).double().mean()


def test_at_a_higher_level_a_mixture_has_more_noise():
    pixels, _ = clumps()
    start = fitted(pixels, sigma=0.5, parts=2)
    mean, covariance = moments(pixels)
    x = drawn(start, 40_000, sigma=2.0).double().flatten(1)
    assert (x.mean(0) - mean).abs().max() < 0.06
    assert (torch.cov(x.T) - noisy(covariance, 2.0)).abs().max() < 0.15


def test_classes_share_the_parts_of_a_mixture_each_in_its_own_way():
    pixels, kinds = clumps()
    start = fitted(pixels, kinds, classes=3, sigma=0.5, parts=2)
    for label, share in ((0, 1.0), (1, 0.0), (2, 0.75)):  # nothing is known of the last one but what all are
        bright = drawn(start, 5000, label=label).flatten(1).mean(1)
        assert (bright > 0).double().mean().item() == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize("parts", [1, 8])
def test_a_mixture_does_not_take_the_noise_of_few_images_for_what_they_are(parts):
    """It is as likely as one Gaussian is to have made noisy images that neither has seen."""
    images = digits().pixels
    known, others = images[:1400], to_float(images[1400:]).flatten(1)
    others = others + torch.randn(others.shape, generator=torch.Generator().manual_seed(1))

    def likely(start: Start) -> float:
        x = ((others - start.mean) @ start.basis.T)[:, :, None].double()
        shares = torch.ones(1, 1) if start.shares is None else start.shares
        found = []
        for share, centre, factor in zip(shares[0], start.centres.double(), start.factors.double(), strict=True):
            y = torch.linalg.solve_triangular(factor.expand(len(x), -1, -1), x - centre[:, None], upper=False)
            found.append(share.log() - y.square().sum((1, 2)) / 2 - factor.diagonal().log().sum())
        return torch.stack(found).logsumexp(0).mean().item()

    assert likely(fitted(known, sigma=1.0, parts=parts)) > likely(fitted(known, sigma=1.0)) - 0.1


def test_a_mixture_of_one_is_a_gaussian():
    pixels = pictures(5000)
    mean, covariance = moments(pixels)
    x = drawn(fitted(pixels, parts=1), 40_000).double().flatten(1)
    assert (x.mean(0) - mean).abs().max() < 0.05
    assert (torch.cov(x.T) - noisy(covariance, 0.9)).abs().max() < 0.06


@pytest.mark.parametrize("n", [1, 3, 40])
def test_a_mixture_may_have_more_parts_than_images(n):
    start = fitted(pictures(n), sigma=0.5, parts=16, flip=True)
    x = drawn(start, 2000)
    assert x.isfinite().all() and x.std() > 0.5
    assert start.shares.sum(1).tolist() == pytest.approx([1.0], abs=1e-5)


def test_of_many_images_em_looks_at_some(monkeypatch):
    monkeypatch.setattr(ict.start, "WORK", {"cpu": 1})  # as few as it may: 50 for each part
    bright = drawn(fitted(clumps(8000)[0], sigma=0.5, parts=2), 5000).flatten(1).mean(1)
    assert (bright > 0).double().mean().item() == pytest.approx(0.75, abs=0.15)


def test_a_run_with_a_mixture(tmp_path):
    sampling = {"start": "mixture", "start_sigma": 2.0, "start_parts": 5}
    path = run(tiny_config(sampling=sampling, training={"steps": 2, "snapshots": 0}), tmp_path / "run", console=quiet())
    g = load(path)
    assert g.spec.start.parts == 5 and g.ladder(2) == [2.0, 0.821]
    assert g.model.start.shares.shape == (10, 5) and (g.model.start.spread > 0).all()
    images = g.sample(9, seed=5)
    assert torch.allclose(g.sample(9, seed=5, batch=4), images, atol=1e-5)
    said = CliRunner().invoke(app, ["info", str(path)], env={"COLUMNS": "200"}).output
    assert "a mixture of 5 Gaussians at σ = 2" in said
    assert "a mixture of 5 Gaussians that stands for noisy images" in (tmp_path / "run" / "report.html").read_text()
    for parts in (0, 5000):
        with pytest.raises(ConfigError, match=r"sampling\.start_parts"):
            tiny_config(sampling=sampling | {"start_parts": parts})
    with pytest.raises(ConfigError, match=r"start\.parts = -1"):
        StartSpec(sigma=2.0, directions=4, own=4, parts=-1)
