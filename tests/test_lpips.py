"""LPIPS against the lpips package (0.1.4), which was run once on the same weights and images."""

import os
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from ict.cli import app
from ict.distance import lpips
from ict.download import checksum
from ict.lpips import WEIGHTS, Lpips, load_lpips
from ict.reading import ConfigError

# By the package, images resized to 224 pixels first; weights by a formula, and the published ones.
FORMULA = {
    ("vgg16", 32): [0.016370121389627457, 0.016226518899202347, 0.015246852301061153, 0.016721239313483238],
    ("alexnet", 32): [0.014024458825588226, 0.013920731842517853, 0.013128798454999924, 0.013753829523921013],
    ("alexnet", 64): [0.012565436773002148, 0.012557826936244965, 0.012825737707316875, 0.012554112821817398],
}
PUBLISHED = {
    ("vgg16", 32): [0.10595278441905975, 0.10870956629514694, 0.11475637555122375, 0.11467812955379486],
    ("vgg16", 64): [0.09660443663597107, 0.09965771436691284, 0.10526171326637268, 0.10982118546962738],
    ("alexnet", 32): [0.06285156309604645, 0.0590628981590271, 0.06797295808792114, 0.06689870357513428],
    ("alexnet", 64): [0.04590011015534401, 0.03746996447443962, 0.04599686712026596, 0.04610521346330643],
}


def formula(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    weight = rng.normal(size=shape) * ((2 / np.prod(shape[1:])) ** 0.5 if len(shape) > 1 else 0.1)
    return torch.from_numpy((abs(weight) if name.startswith("lin") else weight).astype(np.float32))


def images(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.from_numpy(np.random.default_rng(5).uniform(-1, 1, (2, 4, 3, size, size)).astype(np.float32))
    return x, 0.8 * x + 0.2 * y


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("lpips")
    for kind in ("vgg16", "alexnet"):
        state = {name: formula(name, tuple(one.shape)) for name, one in Lpips(kind).state_dict().items()}
        torch.save(state, folder / f"{kind}.pt")
    return folder


@pytest.mark.parametrize(("kind", "size"), FORMULA)
def test_it_is_the_packages(kind, size, weights):
    found = lpips(*images(size), lpips_net=kind, lpips_weights=str(weights / f"{kind}.pt"))
    assert found.tolist() == pytest.approx(FORMULA[kind, size], rel=1e-5)


@pytest.mark.skipif("ICT_LPIPS" not in os.environ, reason="set ICT_LPIPS to a folder with lpips-vgg16.pt")
@pytest.mark.parametrize(("kind", "size"), PUBLISHED)
def test_the_real_weights_give_the_packages_distances(kind, size):
    path = Path(os.environ["ICT_LPIPS"]) / f"lpips-{kind}.pt"
    found = lpips(*images(size), lpips_net=kind, lpips_weights=str(path))
    assert found.tolist() == pytest.approx(PUBLISHED[kind, size], rel=1e-5)


def test_it_is_zero_for_equal_images_with_a_gradient_that_is_a_number(weights):
    x = images(32)[0][:1].requires_grad_()
    black = torch.full_like(x, -1.0).detach()
    for other in (x.detach(), black):
        distance = lpips(x, other, lpips_net="alexnet", lpips_weights=str(weights / "alexnet.pt"))
        (gradient,) = torch.autograd.grad(distance.sum(), x)
        assert gradient.isfinite().all() and bool((distance > 0).all()) == (other is black)


def test_missing_and_wrong_weights_are_named(weights, tmp_path, monkeypatch):
    monkeypatch.setenv("ICT_CACHE", str(tmp_path))
    load_lpips.cache_clear()
    with pytest.raises(ConfigError, match=r"ict data get lpips-vgg16.*397923af.*a78928a0.*objective\.lpips_weights"):
        lpips(*images(32))
    with pytest.raises(ConfigError, match=r"there is no file .*nowhere\.pt"):
        lpips(*images(32), lpips_weights=str(tmp_path / "nowhere.pt"))
    with pytest.raises(ConfigError, match="does not hold the weights of LPIPS with vgg16"):
        lpips(*images(32), lpips_weights=str(weights / "alexnet.pt"))
    with pytest.raises(ConfigError, match="use vgg16 or alexnet"):
        lpips(*images(32), lpips_net="vgg19")
    (tmp_path / "evil.pt").write_bytes(b"cos\nsystem\n(S'touch /tmp/evil'\ntR.")
    with pytest.raises(ConfigError, match="does not hold"):
        lpips(*images(32), lpips_weights=str(tmp_path / "evil.pt"))


def test_published_files_are_named_after_their_checksums():
    """torchvision puts the first digits of a file's SHA-256 into its name."""
    for trunk, linear in WEIGHTS.values():
        assert Path(trunk.url).stem.rpartition("-")[2] == trunk.sha256[:8]
        assert len(trunk.sha256) == len(linear.sha256) == 64 and linear.size < 10_000 < trunk.size


def test_the_command_brings_both_files_and_they_are_used(weights, tmp_path, monkeypatch):
    """From a folder instead of the network: torchvision's net with its head, and the linear layers by their names."""
    state = torch.load(weights / "alexnet.pt", weights_only=True)
    trunk = {name: one for name, one in state.items() if name.startswith("features.")}
    trunk["classifier.1.bias"] = torch.zeros(3)
    linear = {name.replace(".", ".model.1."): one for name, one in state.items() if name.startswith("lin")}
    public = tmp_path / "public"
    public.mkdir()
    given = []
    for published, tensors in zip(WEIGHTS["alexnet"], (trunk, linear), strict=True):
        path = public / Path(published.url).name
        old = {name: torch.nn.Parameter(one) for name, one in tensors.items()}  # the form of the published files
        torch.save(old, path, _use_new_zipfile_serialization=False)
        given.append(replace(published, sha256=checksum(path), size=path.stat().st_size))
    monkeypatch.setitem(WEIGHTS, "alexnet", tuple(given))
    load_lpips.cache_clear()
    done = CliRunner().invoke(app, ["data", "get", "lpips-alexnet", "--from", public.as_uri()])
    assert done.exit_code == 0 and "checked" in done.output
    found = lpips(*images(32), lpips_net="alexnet")
    assert found.tolist() == pytest.approx(FORMULA["alexnet", 32], rel=1e-5)
    monkeypatch.setitem(WEIGHTS, "alexnet", (given[0], replace(given[1], sha256="0" * 64)))
    refused = CliRunner().invoke(app, ["data", "get", "lpips-alexnet", "--from", public.as_uri()])
    assert isinstance(refused.exception, ConfigError) and "is not the file it should be" in str(refused.exception)
    unknown = CliRunner().invoke(app, ["data", "get", "lpips-vgg19"])
    assert "choose from cifar10, inception, lpips-vgg16, lpips-alexnet" in str(unknown.exception)
