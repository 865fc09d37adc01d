"""ConsistencyModel: a net F made into f(x, σ) that is the identity at σ_min (§2); and the file it is shared as."""

import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from ict.config import Config, DataConfig, NetConfig, NoiseConfig
from ict.files import DamagedFile
from ict.nets import build_net
from ict.precision import trunk
from ict.reading import ConfigError, from_dict, require, to_dict
from ict.start import Start, StartSpec


class Scalings(NamedTuple):
    """c_skip, c_out, c_in and c_noise of a batch of noise levels, each [B]."""

    c_skip: Tensor
    c_out: Tensor
    c_in: Tensor
    c_noise: Tensor


def scalings(sigma: Tensor, *, sigma_min: float, sigma_data: float) -> Scalings:
    """The preconditioning of §2: c_skip(σ_min) = 1 and c_out(σ_min) = 0, exactly."""
    variance = sigma**2 + sigma_data**2
    return Scalings(
        c_skip=1 / (((sigma - sigma_min) / sigma_data) ** 2 + 1),  # σ_d²/((σ − σ_min)² + σ_d²) would round at σ_min
        c_out=(sigma - sigma_min) * sigma_data * variance.rsqrt(),
        c_in=variance.rsqrt(),
        c_noise=0.25 * sigma.log(),
    )


def spread(values: Tensor, x: Tensor) -> Tensor:
    """[B] -> over channels and pixels, in the precision of x."""
    return values.to(x.dtype).reshape(-1, 1, 1, 1)


class ConsistencyModel(nn.Module):
    """f(x, σ) = c_skip(σ) x + c_out(σ) F(c_in(σ) x, c_noise(σ)) (§2).

    All that surrounds the net keeps the precision of x and σ, whatever the net computes in. A diffusion model is the
    same with σ_min = 0 in c_skip and c_out (EDM's preconditioning), and gives the mean of the clean images.
    """

    def __init__(
        self,
        net: nn.Module,
        noise: NoiseConfig,
        *,
        image_shape: tuple[int, int, int],
        classes: int = 0,
        kind: str = "consistency",
        start: StartSpec | None = None,
    ):
        super().__init__()
        self.net, self.noise, self.image_shape, self.classes, self.kind = net, noise, image_shape, classes, kind
        self.precision = "float32"  # of the net's trunk, see precision.py
        self.start = Start(start, image_shape, classes=classes) if start and start.sigma else None

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def size(self) -> int:
        """How many parameters it has."""
        return sum(parameter.numel() for parameter in self.parameters())

    def forward(self, x: Tensor, sigma: Tensor, label: Tensor | None = None, key: Tensor | None = None) -> Tensor:
        """x [B, C, H, W], σ [B] -> the clean image [B, C, H, W]; `key` [B] decides dropout in training mode."""
        boundary = 0.0 if self.kind == "diffusion" else self.noise.sigma_min
        scaled = scalings(sigma, sigma_min=boundary, sigma_data=self.noise.sigma_data)
        c_skip, c_out, c_in = (spread(c, x) for c in scaled[:3])
        with trunk(self.precision, x.device):
            out = self.net(c_in * x, scaled.c_noise.to(torch.float32), label, key)
        return c_skip * x + c_out * out.to(x.dtype)


class AverageVelocity(ConsistencyModel):
    """A net as the average velocity u(z, r, t) of a straight flow (MeanFlow); f(x, σ) is its whole way to r = 0.

    The flow is z = (1 − t) x₀ + t e with noise e, so x = z / (1 − t) is an image with noise of σ = t / (1 − t), and
    everything that asks a consistency model with x and σ can ask this one. The net sees z, t and t − r as they are.
    """

    def forward(
        self,
        x: Tensor,
        sigma: Tensor,
        label: Tensor | None = None,
        key: Tensor | None = None,
        *,
        to: Tensor | None = None,
    ) -> Tensor:
        """The clean image; with `to` [B], a noise level of at most σ, the average velocity from σ to there instead."""
        t = flow_time(sigma)
        z = spread(1 - t, x) * x
        if to is not None:
            return self.velocity(z, t, flow_time(to), label, key)
        return z - spread(t, x) * self.velocity(z, t, torch.zeros_like(t), label, key)

    def velocity(self, z: Tensor, t: Tensor, r: Tensor, label: Tensor | None, key: Tensor | None) -> Tensor:
        """u(z, r, t): the mean of dz/ds over s from r to t."""
        times = torch.stack((t, t - r), dim=1).to(torch.float32)
        with trunk(self.precision, z.device):
            return self.net(z, times, label, key).to(z.dtype)


def flow_time(sigma: Tensor) -> Tensor:
    """t of the straight flow where the noise is σ times as strong as the image: σ / (1 + σ)."""
    return sigma / (1 + sigma)


KINDS = {"consistency": ConsistencyModel, "diffusion": ConsistencyModel, "meanflow": AverageVelocity}


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What a model file says beside its weights: enough to rebuild the net and to use it."""

    image_size: int
    channels: int
    kind: str = "consistency"  # or "diffusion", "meanflow"
    class_names: tuple[str, ...] = ()  # empty: not conditioned on a class
    sigma_mid: float = 0.821
    net: NetConfig = field(default_factory=NetConfig)
    noise: NoiseConfig = field(default_factory=NoiseConfig)
    start: StartSpec = field(default_factory=StartSpec)

    def __post_init__(self) -> None:
        require(self.kind in KINDS, f"kind = {self.kind!r}: this version does not know it")
        require(
            self.net.intervals == (self.kind == "meanflow"),
            f"kind = {self.kind!r} with net.intervals = {self.net.intervals}: the two belong together",
        )
        DataConfig(image_size=self.image_size, channels=self.channels)  # within the same limits
        require(
            self.noise.sigma_min < self.sigma_mid < self.noise.sigma_max,
            f"sigma_mid = {self.sigma_mid} must lie between {self.noise.sigma_min} and {self.noise.sigma_max}",
        )
        require(
            not self.start.sigma or self.sigma_mid < self.start.sigma < self.noise.sigma_max,
            f"start.sigma = {self.start.sigma} must lie between {self.sigma_mid} and {self.noise.sigma_max}",
        )
        require(
            self.start.directions <= math.prod(self.image_shape),
            f"start.directions = {self.start.directions}: an image has only {math.prod(self.image_shape)} numbers",
        )

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return self.channels, self.image_size, self.image_size

    @property
    def first_sigma(self) -> float:
        """The noise level that samples begin at, unless another is asked for."""
        return self.start.sigma or self.noise.sigma_max

    @classmethod
    def from_config(cls, config: Config, class_names: tuple[str, ...]) -> "ModelSpec":
        return cls(
            image_size=config.data.image_size,
            channels=config.data.channels,
            kind=config.objective.learns,
            class_names=class_names if config.data.classes else (),
            sigma_mid=config.sampling.sigma_mid,
            net=config.net,
            noise=config.noise,
            start=StartSpec.of(
                config.sampling,
                (config.data.channels, config.data.image_size, config.data.image_size),
                classes=config.data.classes,
            ),
        )


def build_model(spec: ModelSpec, *, seed: int = 0) -> ConsistencyModel:
    """A model with fresh weights: a function of the spec and the seed alone."""
    classes = len(spec.class_names)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = build_net(spec.net, image_size=spec.image_size, channels=spec.channels, classes=classes)
    about = {"image_shape": spec.image_shape, "classes": classes, "kind": spec.kind, "start": spec.start}
    return KINDS[spec.kind](net, spec.noise, **about)


# --- the model file: safetensors, with the spec as JSON in its header

FORMAT = "ict-model-1"


def pack_model(spec: ModelSpec, weights: dict[str, Tensor], origin: dict[str, Any]) -> bytes:
    """The bytes of a model file. `origin` says where the weights come from: run, step, EMA rate."""
    # One entry: safetensors writes several in random order, and the same model should be the same bytes.
    weights = {name: tensor.detach().cpu().resolve_neg().contiguous() for name, tensor in weights.items()}
    described = to_dict(spec)
    if not spec.start.sigma:  # a file without one is as it was before there were any
        del described["start"]
    about = {"format": FORMAT, "spec": described, "origin": origin}
    return safetensors.torch.save(weights, metadata={"ict": json.dumps({**about, "digest": digest(about, weights)})})


def digest(about: dict[str, Any], weights: dict[str, Tensor]) -> str:
    """SHA-256 of what a model file says and of its weights, in the order of their names."""
    found = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name in sorted(weights):
        flat = weights[name].reshape(-1)
        flat = flat.clone(memory_format=torch.contiguous_format) if len(flat) == 1 else flat  # of any stride
        found.update(f"{name} {tuple(weights[name].shape)}".encode())
        found.update(flat.view(torch.uint8).numpy())  # type: ignore  # a buffer
    return found.hexdigest()


def read_model(path: Path) -> tuple[ConsistencyModel, ModelSpec, dict[str, Any]]:
    """The model of a file, in evaluation mode on the CPU, its spec and its origin."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            spec, origin, about = read_header(path, file.metadata())
            expected = shapes_of(spec, path)
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (not a dict)
            if found != expected:
                raise DamagedFile(f"{path}: the weights do not fit the net that the file describes")
            weights = {name: file.get_tensor(name) for name in expected}
    except FileNotFoundError:
        raise ConfigError(f"there is no model at {path}") from None
    except safetensors.SafetensorError as error:
        raise not_safetensors(path, error) from error
    known = about.pop("digest", None)  # older files have none
    if known is not None and known != digest(about, weights):
        raise DamagedFile(f"{path} is damaged: it is not what was written; get or save it again")
    if not all(tensor.is_floating_point() and tensor.isfinite().all() for tensor in weights.values()):
        raise DamagedFile(f"{path}: some weights are not finite numbers; the model cannot be used")
    model = build_model(spec)
    model.load_state_dict(weights)
    return model.eval(), spec, origin


def shapes_of(spec: ModelSpec, path: Path) -> dict[str, tuple[int, ...]]:
    """The weights that the model of a file has by its description, which may be nonsense."""
    try:
        with torch.device("meta"):
            return {name: tuple(tensor.shape) for name, tensor in build_model(spec).state_dict().items()}
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def read_origin(path: Path) -> dict[str, Any]:
    """Where a model file says that its weights come from."""
    return read_about(path)[1]


def read_spec(path: Path) -> ModelSpec:
    """What a model file says that it holds."""
    return read_about(path)[0]


def read_about(path: Path) -> tuple[ModelSpec, dict[str, Any]]:
    """Spec and origin, without the weights."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return read_header(path, file.metadata())[:2]
    except FileNotFoundError:
        raise ConfigError(f"there is no model at {path}") from None
    except safetensors.SafetensorError as error:
        raise not_safetensors(path, error) from error


def not_safetensors(path: Path, error: Exception) -> DamagedFile:
    return DamagedFile(
        f"{path} is damaged or not a safetensors file ({error}): give a model that `ict train` wrote, or a run's folder"
    )


def read_header(path: Path, metadata: dict[str, str] | None) -> tuple[ModelSpec, dict[str, Any], dict[str, Any]]:
    """Spec, origin, and both as they stand there, from a file's header, which may say anything."""
    if "ict" not in (metadata or {}):
        raise ConfigError(f"{path} is not a model of this program: use a file that `ict train` wrote")
    try:
        header = json.loads((metadata or {})["ict"])
        if header["format"] != FORMAT:
            raise ConfigError(f"it was written by another version (format {header['format']!r}, not {FORMAT!r})")
        return from_dict(ModelSpec, header["spec"]), {**header["origin"]}, header
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFile(f"{path}: its header cannot be read ({error!r})") from error
