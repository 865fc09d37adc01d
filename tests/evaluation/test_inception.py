"""The Inception of FID equals torch-fidelity's, with weights by a formula; and what is said when it has none."""

import os
import pickle
import zlib
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from ict.config import DataConfig
from ict.data import load_images
from ict.evaluation.features import colours, open_features
from ict.evaluation.inception import Inception, find_weights, load_inception, resize
from ict.evaluation.judge import look
from ict.evaluation.metrics import frechet_distance
from ict.reading import ConfigError

GOLDEN = Path(__file__).with_name("inception-golden.npz")  # made once with torch-fidelity 0.4.0
CPU = torch.device("cpu")


def formula(name: str, shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    if name.endswith(("running_var", "bn.weight")):
        return rng.uniform(0.5, 1.5, shape).astype(np.float32)
    if len(shape) > 1:
        return (rng.normal(size=shape) * (1.6 / np.prod(shape[1:])) ** 0.5).astype(np.float32)
    return (0.1 * rng.normal(size=shape)).astype(np.float32)


def state(*, classifier: bool = True) -> dict[str, torch.Tensor]:
    """Weights by a formula, under the usual names."""
    with torch.device("meta"):
        net = Inception(classifier=classifier)
    found = {}
    for name, module in net.named_modules():
        if isinstance(module, torch.nn.Conv2d):
            found[f"{name}.conv.weight"] = tuple(module.weight.shape)
            for key in ("weight", "bias", "running_mean", "running_var"):
                found[f"{name}.bn.{key}"] = (module.out_channels,)
    if classifier:
        found |= {"fc.weight": (1008, 2048), "fc.bias": (1008,)}
    return {name: torch.from_numpy(formula(name, shape)) for name, shape in found.items()}


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("inception") / "weights.pth"
    torch.save(state(), path)
    return path


@pytest.mark.parametrize("size", [32, 64, 350])
def test_features_and_logits_are_torch_fidelitys(size, weights):
    golden = np.load(GOLDEN)
    pixels = torch.from_numpy(np.random.default_rng(size).integers(0, 256, (2, 3, size, size), dtype=np.uint8))
    features, logits = open_features("inception", weights=weights, device=CPU)(pixels)
    assert logits is not None
    for ours, name in ((features, "features"), (logits, "logits")):
        theirs = torch.from_numpy(golden[f"{name}_{size}"])
        assert (ours - theirs).norm() / theirs.norm() < 1e-5


def test_images_are_resized_as_tensorflow_1_did():
    row = torch.tensor([0.0, 10.0]).view(1, 1, 1, 2)
    assert resize(row, 4)[0, 0, 0].tolist() == [0.0, 5.0, 10.0, 10.0]  # no half-pixel shift; the end is repeated
    x = torch.rand(1, 3, 7, 7)
    assert torch.equal(resize(x, 7), x)


def test_grey_images_are_shown_three_times(weights):
    grey = torch.randint(0, 256, (2, 1, 8, 8), dtype=torch.uint8)
    assert torch.equal(colours(grey), grey.repeat(1, 3, 1, 1))
    net = open_features("inception", weights=weights, device=CPU)
    assert torch.equal(net(grey)[0], net(grey.repeat(1, 3, 1, 1))[0])


def test_a_trunk_without_a_classifier(tmp_path):
    safetensors.torch.save_file(state(classifier=False), tmp_path / "trunk.safetensors")
    net = open_features("inception", weights=tmp_path / "trunk.safetensors", device=CPU)
    features, logits = net(torch.zeros(1, 3, 8, 8, dtype=torch.uint8))
    assert features.shape == (1, 2048) and logits is None and not net.classes


def test_only_inception_gives_an_fid(weights):
    assert open_features("inception", weights=weights, device=CPU).frechet == "FID"
    digits = open_features("digits", weights=None, device=CPU)
    assert digits.frechet == "FD-digits" and digits.kernel == "KD-digits"


def test_without_weights_it_is_said_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("ICT_CACHE", str(tmp_path))
    with pytest.raises(ConfigError) as error:
        find_weights(None)
    for part in (str(tmp_path), "ict data get inception", "https://github.com/toshas", "6726825d", "--inception"):
        assert part in str(error.value)


class Evil:
    def __reduce__(self):
        return Path.mkdir, (Path("evil"),)


@pytest.mark.parametrize("content", [b"", b"nonsense", pickle.dumps({"fc.weight": Evil()}), pickle.dumps(Evil())])
def test_damaged_or_hostile_weights(content, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w.pth").write_bytes(content)
    with pytest.raises(ConfigError, match="damaged or does not hold") as raised:
        load_inception(tmp_path / "w.pth")
    assert "weights_only" not in str(raised.value)  # torch's advice to trust the file
    assert not (tmp_path / "evil").exists()


REAL = [Path(os.environ.get(name) or "no such file") for name in ("ICT_INCEPTION", "ICT_CIFAR10")]


@pytest.mark.skipif(not all(path.exists() for path in REAL), reason="set ICT_INCEPTION and ICT_CIFAR10")
def test_the_real_inception_on_real_images():
    """torch-fidelity's constant for these two sets is 10.3233; a quarter of an hour on two cores."""
    net = open_features(
        "inception", weights=REAL[0], device=torch.device("cuda" if torch.cuda.is_available() else "cpu")
    )
    moments = []
    for split in ("train", "test"):
        images = load_images(DataConfig(source="cifar10", path=str(REAL[1]), split=split, image_size=32, channels=3))
        moments.append(look(images.pixels[:5000].split(100), net).moments)
    found = frechet_distance(*moments)
    print(f"FID of the first 5,000 training and test images: {found:.4f}")
    assert found == pytest.approx(10.32, abs=0.01)


def test_weights_of_another_net(tmp_path):
    torch.save({"conv.weight": torch.zeros(3)}, tmp_path / "w.pth")
    with pytest.raises(ConfigError, match="does not hold the weights"):
        load_inception(tmp_path / "w.pth")
