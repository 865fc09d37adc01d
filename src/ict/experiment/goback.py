"""What follows an alarm of the guard: evidence, and a way back to an earlier checkpoint."""

import contextlib
import json
import math
from pathlib import Path
from typing import Any

from ict.data import batch_indices
from ict.experiment.parts import Run, fresh_model
from ict.files import check_folder, step_name, write_atomically
from ict.ranks import Ranks
from ict.reading import ConfigError
from ict.runfolder import step_back
from ict.training.checkpoint import Found, find_checkpoint, restore
from ict.training.guard import BINS, Guard, GuardState
from ict.training.log import RunLog, TrainingFailed
from ict.training.loop import TrainState, draw_seed, reset


def go_back(this: Run) -> None:
    """The guard has given alarm: put the evidence aside, and go on from an earlier checkpoint with other draws."""
    state, why = this.state, this.guard.alarm
    again = this.returned is not None and this.begun == this.returned  # nothing was saved since: go back further
    over = state.attempt >= this.config.training.rollbacks
    found, told, file = None, False, this.folder / "guard" / f"{step_name(state.step)}-{state.attempt}.json"
    if this.ranks.main:
        this.saver.wait()
        told = this.write("the evidence", lambda: write_atomically(file, evidence(this)))
        found = None if over else earlier(this, this.begun if again else None)
    found, lost = this.ranks.from_main((found, found is None and this.saver.saved > 0))
    if over or lost:
        gone = f" (it has gone back {state.attempt} times already)" if state.attempt else ""
        raise TrainingFailed(
            f"the run diverged by step {state.step:,}{gone}: {why}. Nothing of that was saved; lower training.lr "
            "or raise training.lr_warmup"
            + (f". The last steps are in {file}" if told else "")
            + (". No checkpoint can be read to go back to" if lost and not over else "")
        )
    attempt, spent = state.attempt + 1, state.seconds
    ended = this.budget.finished(state.step, spent)
    if found is None:
        fresh = fresh_model(this.config, this.spec)
        fresh.start = state.model.start  # fitted once, and no matter of training
        reset(state, fresh)
        this.log.resume({"count": 0, "loss": 0.0, "gradient": 0.0}, 0)
        this.guard.forget(GuardState())
    else:
        pick_up(found, state, this.log, this.guard, this.ranks)
        if not ended:  # an end that was bad is tried again, in time of its own; else only steps are taken back
            state.seconds = spent
    if this.ranks.main and found is not None:
        this.write("what lies beyond", lambda: step_back(this.folder, found))
    state.attempt, this.begun, this.returned = attempt, state.step, state.step
    if this.ranks.main:
        this.write("the count of ways back", lambda: write_attempt(this.folder, attempt))
    this.saver.saved = this.saver.begun = state.step
    place = f"step {state.step:,}" if found is not None else "the start, as nothing was saved yet"
    where = f"; the evidence is in {file}" if told else ""
    this.warn(f"{why}. Going back to {place}, with another order of the data{where}")


def pick_up(found: Found, state: TrainState, log: RunLog, guard: Guard, ranks: Ranks) -> None:
    """Put the parts of a run where they were when a checkpoint was made."""
    restore(state, found, ranks=ranks)
    log.resume(found.manifest["extras"]["log"], state.step)
    guard.forget(guard_of(found))


def write_attempt(folder: Path, attempt: int) -> None:
    """How often a run has gone back is kept beside its checkpoints, as the next one may never be written."""
    write_atomically(folder / "guard" / ATTEMPT, json.dumps({"attempt": attempt}).encode())


def read_attempt(folder: Path) -> int:
    try:
        return int(json.loads((folder / "guard" / ATTEMPT).read_bytes())["attempt"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


ATTEMPT = "attempt.json"


def earlier(this: Run, before: int | None) -> Found | None:
    """The newest good checkpoint, or an older one than that; None where there is none."""
    for limit in (before, None):
        with contextlib.suppress(ConfigError, FileNotFoundError):
            check_folder(this.folder)
            return find_checkpoint(this.folder, before=limit)
    return None


def evidence(this: Run) -> bytes:
    """What led to an alarm, as JSON."""
    state, config = this.state, this.config
    seed = draw_seed(config, state.attempt)
    last = batch_indices(state.step - 1, batch=config.training.batch, count=len(this.images), seed=seed)
    found = {
        "why": this.guard.alarm,
        "step": state.step,
        "attempt": state.attempt,
        "lr": state.lr,
        "skipped": this.guard.state.skipped,
        "levels_of_noise": [this.guard.describe(place) for place in range(BINS)],
        "images_of_the_last_batch": last.tolist(),
        "steps": list(this.guard.history),
    }
    return json.dumps(speakable(found), indent=1, allow_nan=False).encode()


def speakable(thing: Any) -> Any:
    """The same with "nan" and "inf" as words: JSON has no such numbers."""
    if isinstance(thing, dict):
        return {key: speakable(value) for key, value in thing.items()}
    if isinstance(thing, list):
        return [speakable(value) for value in thing]
    return str(thing) if isinstance(thing, float) and not math.isfinite(thing) else thing


def guard_of(found: Found) -> GuardState:
    """What a checkpoint says of the guard."""
    kept = found.manifest["extras"].get("guard")
    return GuardState.load(kept) if kept else GuardState()
