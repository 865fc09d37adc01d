"""The folder of a run: opened for a new run, emptied of an old one, or gone on with. What is not ours stays."""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ict.config import BOUNDS, Config, EvaluationConfig, SpeedConfig
from ict.data import Images
from ict.files import (
    check_folder,
    holds_run,
    list_checkpoints,
    list_evidence,
    list_snapshots,
    ours,
    remove,
    sha256,
    step_of,
    write_atomically,
)
from ict.ranks import rank_of_environment
from ict.reading import ConfigError, from_dict, require, to_dict
from ict.recipes import to_toml
from ict.training.budget import Budget
from ict.training.checkpoint import Found, find_checkpoint


@contextlib.contextmanager
def claim(folder: Path) -> Iterator[None]:
    """A folder that no other run may claim meanwhile; it is made, and taken away again if nothing came into it."""
    require(folder.is_dir() or not folder.exists(), f"{folder} is a file: choose another --out")
    try:
        place = Path(os.path.realpath(folder))
        made = [path for path in (place, *place.parents) if not path.exists()]
        handle = lock(place)
    except UnicodeEncodeError as error:
        raise not_text(error) from error
    try:
        with ours(folder, handle):
            yield
    finally:
        with contextlib.suppress(OSError):  # until one is not empty
            for path in made if os.path.samestat(os.fstat(handle), place.stat()) else []:
                path.rmdir()
        os.close(handle)


def lock(folder: Path) -> int:
    """An open folder that is locked until it is closed, by whatever end of the process."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:  # taken away by a run that was refused
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise ConfigError(
                f"another process is training in {folder}: wait for it, or choose another --out"
            ) from None
        except OSError:  # a file system that knows no locks
            return handle
        if folder.is_dir() and os.path.samestat(os.fstat(handle), folder.stat()):
            return handle
        os.close(handle)  # the same, between opening and locking


def not_text(error: UnicodeEncodeError) -> ConfigError:
    return ConfigError(f"a name or path here is not valid text ({error}): choose another")


def open_folder(folder: Path, config: Config, images: Images, *, resume: bool, overwrite: bool) -> Found | None:
    """Make a run's claimed folder ready: a new one, an old one emptied of its run, or an old one to go on with."""
    check_folder(folder)
    try:
        text = to_toml(config).encode()
        require(len(str(folder.resolve()).encode()) > 0, "the folder needs a name")
    except UnicodeEncodeError as error:
        raise not_text(error) from error
    found = None
    if resume:
        found = find_checkpoint(folder)
        check_same(config, found, images)
        step_back(folder, found)
    else:
        for path in leftovers(folder, overwrite=overwrite):
            remove(path)
    write_atomically(folder / "recipe.toml", MARK + text)
    return found


# Opens the recipe that a run writes into its folder: a recipe.toml without it is somebody's own.
MARK = b"# Written by ict: the whole recipe of the run in this folder.\n\n"


def leftovers(folder: Path, *, overwrite: bool) -> list[Path]:
    """What a new run has to delete first: of a run, and only when asked. What is not of a run is refused."""
    names = ("recipe.toml", "log.jsonl", "model.safetensors", "best.safetensors", "eval.json", "report.html", "map.png")
    files = [folder / name for name in names if (folder / name).exists()]
    if holds_run(folder):
        require(
            overwrite,
            f"{folder} already holds a run: go on with --resume, replace it with --overwrite, or choose another --out",
        )
    elif foreign := [path for path in files if path.name != "recipe.toml" or not path.read_bytes().startswith(MARK)]:
        raise ConfigError(f"{foreign[0]} is in the way and not of a run of ict: move it, or choose another --out")
    aside = (folder / "checkpoints").glob("damaged-step-*")
    return [*files, *list_checkpoints(folder), *aside, *list_snapshots(folder), *list_evidence(folder)]


def step_back(folder: Path, found: Found) -> None:
    """What lies beyond the checkpoint that a run goes on from is put aside (checkpoints) or drawn again (snapshots)."""
    for path in list_checkpoints(folder):
        if step_of(path) > found.manifest["step"]:
            aside = path.with_name(f"damaged-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
    for path in list_snapshots(folder):
        if step_of(path) > found.manifest["step"]:
            path.unlink()
    for path in (folder / "checkpoints").glob(".step-*.partial"):
        shutil.rmtree(path, ignore_errors=True)


# What a resumed run may change: how long it is, what it is called, where its data is, what it writes on the way, and
# how a GPU computes it.
FREE = {
    "name",
    "about",
    "data.path",
    "data.feed",
    "objective.lpips_weights",  # their checksum is known
    *(f"evaluation.{key.name}" for key in dataclasses.fields(EvaluationConfig)),
    *(f"speed.{key.name}" for key in dataclasses.fields(SpeedConfig)),
    *(f"training.{key}" for key in (*BOUNDS, "accumulate", "log_every", "save_every", "snapshots")),
    *(f"training.{key}" for key in ("keep", "keep_every", "rollbacks", "shard_optimiser")),
}


def check_same(config: Config, found: Found, images: Images) -> None:
    """A resumed run is the same run: every key that decides the result must be as it was.

    Its images may have moved, if they are the same.
    """
    check_length(config, found)
    old, new = flatten(to_dict(from_dict(Config, found.manifest["recipe"]))), flatten(to_dict(config))
    coupled = {"training.accumulate"} if config.objective.coupling == "batch" else set()  # pieces are matched apart
    moved = {"data.source", "data.split"} if same_images(found, images, config) else set()
    known = found.manifest["extras"].get("teacher")  # older checkpoints do not have it
    exchanged = bool(known) and known != teacher_identity(config)
    moved |= {"objective.teacher_model"} if known and not exchanged else set()
    changed = [
        f"{key}: {old.get(key)!r} then, {new.get(key)!r} now"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and key not in (FREE | moved) - coupled
    ]
    then, now = found.manifest["made_with"].get("ranks", 1), rank_of_environment().count
    if coupled and then != now:
        changed.append(f"ranks: {then} then, {now} now (objective.coupling = batch pairs images within a rank)")
    if exchanged:
        changed.append("objective.teacher_model: it is another model than then")
    require(
        not changed,
        f"the recipe is not the one that {found.path} was trained with; resume with the same, or start a new run with "
        "--out:\n  " + "\n  ".join(changed),
    )


def check_length(config: Config, found: Found) -> None:
    """That a resumed run is not made shorter than it is already."""
    budget, step, seconds = Budget.from_config(config.training), found.manifest["step"], found.manifest["seconds"]
    before = Budget.from_config(from_dict(Config, found.manifest["recipe"]).training)
    past = step > budget.steps if budget.steps is not None else budget != before and budget.finished(step, seconds)
    require(
        not past,
        f"{bound_of(to_dict(config.training))}, but {found.path} is past that (step {step:,}, {seconds:.0f} s): a run "
        "can be made longer, not shorter; the length is that of the whole run, not of what is still to come",
    )


def bound_of(training: dict[str, Any]) -> str:
    """How long a recipe's run is."""
    return ", ".join(f"training.{key} = {training[key]}" for key in BOUNDS if key in training)


def teacher_file(config: Config) -> Path | None:
    """The file of the diffusion model that is distilled, if one is."""
    path = config.objective.teacher_model
    return Path(path).expanduser() if config.objective.kind == "cd" and path not in ("", "mixture2d") else None


def teacher_identity(config: Config) -> str:
    """SHA-256 of that file; it may move, but must not change under a run."""
    path = teacher_file(config)
    return sha256(path.read_bytes()) if path is not None else ""


def same_images(found: Found, images: Images, config: Config) -> bool | None:
    """Whether a checkpoint was made on these images; older ones do not know."""
    known = found.manifest["extras"].get("identity")
    return None if known is None else known == identity(images, classes=config.data.classes > 0)


def identity(images: Images, *, classes: bool) -> str:
    """SHA-256 of pixels and, for a model that is told them, of labels and the classes' names."""
    labels = images.labels.cpu().contiguous().numpy().tobytes() if classes else b""
    names = json.dumps(images.class_names if classes else ()).encode()
    return hashlib.sha256(b"\0".join((images.checksum.encode(), names, labels))).hexdigest()


def flatten(values: dict, path: str = "") -> dict[str, object]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    flat = {}
    for key, value in values.items():
        flat |= flatten(value, f"{path}{key}.") if isinstance(value, dict) else {f"{path}{key}": value}
    return flat
