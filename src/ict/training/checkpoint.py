"""Checkpoints: a folder a step, written beside its place and moved there whole.

RUN/checkpoints/step-00001000/
    student.safetensors    the weights that are trained
    ema-0.999.safetensors  each average, itself a model file
    optimiser.pt           read back with weights_only=True
    checkpoint.json        step, time, recipe and the SHA-256 of the other files; written last
"""

import io
import json
import pickle
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from ict.config import Config, TrainingConfig
from ict.files import (
    DamagedFile,
    check_folder,
    list_checkpoints,
    remove,
    sha256,
    step_name,
    step_of,
    sync_folder,
    write_new,
)
from ict.model import ModelSpec, pack_model
from ict.ranks import ALONE, Ranks, rank_of_environment
from ict.reading import ConfigError, from_dict, to_dict
from ict.training.loop import TrainState
from ict.training.optimiser import own_state

MANIFEST = "checkpoint.json"
TARGET = "target.safetensors"  # the average that teaches, for recipes that have one
FORMAT = "ict-checkpoint-2"


def average_name(decay: float) -> str:
    return f"ema-{decay}.safetensors"


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A moment of a run in the host's memory, which the run does not change any more."""

    step: int
    manifest: dict[str, Any]
    models: dict[str, tuple[dict[str, Any], dict[str, Tensor]]]  # file -> origin and weights
    optimiser: Any
    spec: ModelSpec

    @property
    def size(self) -> int:
        """About how many bytes it takes on the disk."""
        tensors = [tensor for _, weights in self.models.values() for tensor in weights.values()]
        return sum(tensor.nbytes for tensor in [*tensors, *tensors_in(self.optimiser)])

    def files(self) -> Iterator[tuple[str, bytes]]:
        for name, (origin, weights) in self.models.items():
            yield name, pack_model(self.spec, weights, origin)
        buffer = io.BytesIO()
        torch.save(self.optimiser, buffer)
        yield "optimiser.pt", buffer.getvalue()


def copy_state(state: TrainState, spec: ModelSpec, config: Config, extras: dict[str, Any]) -> Copy:
    """Take a copy of all that a checkpoint keeps: the part of saving that a run has to wait for."""
    origin = {"run": config.name, "step": state.step}
    models = {"student.safetensors": ({**origin, "ema": 0.0}, dict(state.model.state_dict()))}
    if state.target is not None:
        models[TARGET] = ({**origin, "ema": 0.0}, dict(state.target.state_dict()))
    models |= {average_name(each.decay): ({**origin, "ema": each.decay}, each.weights) for each in state.averages}
    manifest = {
        "format": FORMAT,
        "step": state.step,
        "seconds": state.seconds,
        "attempt": state.attempt,
        "model": average_name(state.averages[0].decay),
        "recipe": to_dict(config),
        "made_with": surroundings(state),
        "extras": extras,
    }
    return Copy(
        step=state.step,
        manifest=json.loads(json.dumps(manifest)),
        models={name: (about, copied(weights)) for name, (about, weights) in models.items()},
        optimiser=copied(state.optimiser.state_dict()),
        spec=spec,
    )


def copied(thing: Any) -> Any:
    """The same dicts and lists, with copies of their tensors in the host's memory."""
    if isinstance(thing, Tensor):
        return thing.detach().to("cpu", copy=True)
    if isinstance(thing, dict):
        return {key: copied(value) for key, value in thing.items()}
    return [copied(value) for value in thing] if isinstance(thing, list) else thing


def tensors_in(thing: Any) -> list[Tensor]:
    if isinstance(thing, Tensor):
        return [thing]
    values = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, list) else []
    return [tensor for value in values for tensor in tensors_in(value)]


def write_checkpoint(run: Path, copy: Copy) -> Path:
    """Write a checkpoint; on any error the earlier ones are untouched. The run's folder must be there."""
    final = run / "checkpoints" / step_name(copy.step)
    partial = final.with_name(f".{final.name}.partial")
    check_folder(run)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        final.parent.mkdir(exist_ok=True)
        partial.mkdir()
        manifest = {**copy.manifest, "files": {}}
        for name, data in copy.files():
            write_new(partial / name, data)
            manifest["files"][name] = sha256(data)
        write_new(partial / MANIFEST, seal(manifest))
        sync_folder(partial)
        if final.exists():  # of a way that the run has gone back from
            shutil.rmtree(final)
        partial.rename(final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync_folder(final.parent)
    return final


def prune(run: Path, newest: Path, training: TrainingConfig) -> None:
    """Delete older checkpoints: the newest `training.keep` stay, and every `training.keep_every`-th step."""
    others = [path for path in list_checkpoints(run) if path != newest]
    for old in others[: max(0, len(others) + 1 - training.keep)]:
        if not training.keep_every or step_of(old) % training.keep_every:
            remove(old)


def seal(manifest: dict[str, Any]) -> bytes:
    """The bytes of a manifest, with a checksum of itself: a flipped digit in it must not pass for a number."""
    return json.dumps({**manifest, "sha256": checksum(manifest)}, indent=1).encode()


def checksum(manifest: dict[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return sha256(json.dumps(rest, sort_keys=True).encode())


def surroundings(state: TrainState) -> dict[str, Any]:
    """What the last bit of a run depends on beside its recipe."""
    device = state.model.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    ranks = rank_of_environment().count
    return {"torch": torch.__version__, "device": name, "threads": torch.get_num_threads(), "ranks": ranks}


@dataclass(frozen=True)
class Found:
    """The newest good checkpoint, and why each newer one was passed over."""

    path: Path
    manifest: dict[str, Any]
    passed_over: list[str]


def find_checkpoint(run: Path, *, before: int | None = None) -> Found:
    """The newest good one; with `before`, of those of earlier steps."""
    passed_over: list[str] = []
    for path in reversed(list_checkpoints(run)):
        if before is not None and step_of(path) >= before:
            continue
        try:
            return Found(path, check_checkpoint(path), passed_over)
        except DamagedFile as error:
            passed_over.append(str(error))
    if passed_over:
        raise ConfigError(
            f"no checkpoint in {run} can be used; start the run anew with --overwrite:\n  " + "\n  ".join(passed_over)
        )
    raise ConfigError(f"there is no checkpoint in {run} to resume from: start without --resume, or with --overwrite")


def check_checkpoint(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose every file is there and unchanged."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        form = manifest["format"]
    except FileNotFoundError:
        raise DamagedFile(f"{path}: {MANIFEST} is missing") from None
    except OSError as error:
        raise DamagedFile(f"{path}: {MANIFEST} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedFile(f"{path}: {MANIFEST} cannot be read ({error})") from error
    if form != FORMAT:
        raise DamagedFile(f"{path}: {MANIFEST} is damaged, or of another version (format {form!r}, not {FORMAT!r})")
    if manifest.get("sha256") != checksum(manifest):
        raise DamagedFile(f"{path}: {MANIFEST} is damaged (its SHA-256 is not the one that it names)")
    for name, digest in _checked_files(path, manifest).items():
        try:
            data = (path / name).read_bytes()
        except OSError as error:
            raise DamagedFile(f"{path}: {name} is missing or cannot be read ({error.strerror})") from None
        if sha256(data) != digest:
            raise DamagedFile(f"{path}: {name} is damaged (its SHA-256 is not the one in {MANIFEST})")
    return manifest


def _checked_files(path: Path, manifest: dict[str, Any]) -> dict[str, str]:
    """Names and digests of exactly the files that a checkpoint of this recipe has: a manifest names no others."""
    try:
        recipe = from_dict(Config, manifest["recipe"])
        rates, teaches = recipe.training.ema, recipe.objective.teacher == "ema"
        window = manifest["extras"]["log"]
        whole = (
            manifest["step"] == step_of(path)
            and isinstance(manifest["seconds"], float)
            and isinstance(manifest.get("attempt", 0), int)
            and isinstance(manifest["extras"].get("guard", {}), dict)
            and isinstance(manifest["made_with"], dict)
            and all(isinstance(window[key], float | int) for key in ("count", "loss", "gradient"))
            and manifest["model"] == average_name(rates[0])
            and manifest["files"].keys()
            == {"student.safetensors", "optimiser.pt", *map(average_name, rates), *([TARGET] if teaches else [])}
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFile(f"{path}: {MANIFEST} is not whole ({error})") from error
    if not whole:
        raise DamagedFile(f"{path}: {MANIFEST} does not describe this checkpoint")
    return manifest["files"]


def read(path: Path) -> Any:
    """The tensors in a file of a checkpoint. Nothing but numbers is read: a program in it is refused."""
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        return torch.load(path, weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, safetensors.SafetensorError) as error:
        raise DamagedFile(
            f"{path} does not hold what a checkpoint holds, though its SHA-256 is right; it is not used "
            f"({str(error).splitlines()[0]})"
        ) from error


def restore(state: TrainState, found: Found, *, ranks: Ranks = ALONE) -> None:
    """Put a checkpoint's weights, averages, optimiser and counters into a state. Only the main rank reads the disk."""

    names = ["student.safetensors", *(average_name(average.decay) for average in state.averages), "optimiser.pt"]
    names += [] if state.target is None else [TARGET]
    weights, *rest = (ranks.from_main(read(found.path / name) if ranks.main else None) for name in names)
    try:
        state.model.load_state_dict(weights)
        if state.target is not None:
            state.target.load_state_dict(rest.pop())
        *averages, optimiser = rest
        for average, kept in zip(state.averages, averages, strict=True):
            average.load(kept)
        state.optimiser.load_state_dict(optimiser)
    except (RuntimeError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise DamagedFile(f"{found.path}: its files do not fit the recipe ({error})") from error
    for parameter, kept in own_state(
        state.optimiser
    ).items():  # laid out as the parameter is, which a file does not keep
        for name, tensor in kept.items():
            if tensor.shape == parameter.shape:
                kept[name] = torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)
    state.step, state.seconds = found.manifest["step"], found.manifest["seconds"]
    state.attempt = found.manifest.get("attempt", 0)
