"""Whole runs: what is written, what a resume gives, what a fault leaves behind."""

import errno
import fcntl
import io
import json
import os
import re
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import tiny_config
from rich.console import Console

import ict.experiment as experiment
import ict.training.checkpoint as checkpoint
from ict.data import load_images
from ict.experiment import run
from ict.files import DamagedFile, list_checkpoints, sha256, step_of, write_atomically
from ict.model import ModelSpec, build_model, pack_model, read_spec
from ict.objectives.distillation import ConsistencyDistillation
from ict.pictures import grid, png
from ict.reading import ConfigError
from ict.runfolder import check_same, claim
from ict.sampling import load
from ict.training.checkpoint import Found, check_checkpoint, find_checkpoint, seal
from ict.training.ema import WeightAverage
from ict.training.interrupt import Stopped as Signalled
from ict.training.log import RunLog, TrainingFailed, read_log


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def said(console: Console) -> str:
    return console.file.getvalue()


class Stopped(Exception):
    pass


def run_until(step: int, config, folder: Path, monkeypatch) -> None:
    """A run that is killed after a step, with nothing saved at that moment."""
    original = RunLog.step

    def stop(self, state):
        record = original(self, state)
        if state.step == step:
            raise Stopped
        return record

    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "step", stop)
        with pytest.raises(Stopped):
            run(config, folder, device="cpu", console=quiet())


def result(folder: Path) -> dict[str, bytes]:
    """Everything that must not depend on a break: weights, optimiser, samples, log (but for times)."""
    last = list_checkpoints(folder)[-1]
    found = {path.name: path.read_bytes() for path in sorted(last.iterdir()) if path.suffix != ".json"}
    found |= {path.name: path.read_bytes() for path in sorted((folder / "samples").iterdir())}
    found["model.safetensors"] = (folder / "model.safetensors").read_bytes()
    lines = [{k: v for k, v in record.items() if k not in RunLog.TIMES} for record in read_log(folder / "log.jsonl")]
    found["log"] = json.dumps(lines).encode()
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """One unbroken run: 12 steps, N changes at 4 and 8, a checkpoint every 4."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(tiny_config(), folder, device="cpu", console=quiet())
    return folder


def test_a_run_leaves_what_it_promises(whole):
    assert {path.name for path in whole.iterdir()} == {
        "recipe.toml", "log.jsonl", "model.safetensors", "report.html", "checkpoints", "samples",
    }  # fmt: skip
    assert [path.name for path in list_checkpoints(whole)] == ["step-00000004", "step-00000008", "step-00000012"]
    assert [record["step"] for record in read_log(whole / "log.jsonl")] == [1, 3, 6, 9, 12]
    assert len(list((whole / "samples").iterdir())) == 2
    assert load(whole).sample(3).shape == (3, 1, 8, 8)


def test_the_model_is_the_first_average(whole):
    model = load(whole).model.state_dict()
    average = load(whole, ema=0.9).model.state_dict()
    assert all(torch.equal(model[name], average[name]) for name in model)
    assert load(whole).origin == {"run": "tiny", "step": 12, "ema": 0.9}


@pytest.mark.parametrize("step", [5, 7, 10])
def test_a_resumed_run_equals_the_unbroken_one_to_the_bit(step, whole, tmp_path, monkeypatch):
    """Killed between checkpoints, before and after a change of N; lines logged past the checkpoint are redone."""
    run_until(step, tiny_config(), tmp_path / "run", monkeypatch)
    console = quiet()
    run(tiny_config(), tmp_path / "run", device="cpu", resume=True, console=console)
    assert "going on from" in said(console)
    assert result(tmp_path / "run") == result(whole)


PLACES = {
    "the optimiser's step": (torch.optim.RAdam, "step"),
    "an average": (WeightAverage, "update"),
    "the log": (RunLog, "step"),
    "a snapshot": (experiment.Run, "snapshot"),
    "a save": (experiment.Run, "save"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("moment", ["before", "after"])
def test_ctrl_c_anywhere_in_a_step_saves_a_whole_one(place, moment, whole, tmp_path, monkeypatch):
    """The signal comes inside the sixth step; the run ends at the step's end and goes on from there, to the bit."""
    owner, name = PLACES[place]
    original, calls = getattr(owner, name), []

    def interrupted(self, *arguments, **options):
        calls.append(None)
        due = len(calls) == {"update": 11, "snapshot": 1, "save": 1}.get(name, 6)
        if due and moment == "before":
            signal.raise_signal(signal.SIGINT)
        result = original(self, *arguments, **options)
        if due and moment == "after":
            signal.raise_signal(signal.SIGINT)
        return result

    console = quiet()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(tiny_config(), tmp_path / "run", device="cpu", console=console)
    step = 4 if name == "save" else 6
    assert f"stopped at step {step} and saved" in said(console)
    assert list_checkpoints(tmp_path / "run")[-1].name == f"step-0000000{step}"
    run(tiny_config(), tmp_path / "run", device="cpu", resume=True, console=quiet())
    assert result(tmp_path / "run") == result(whole)


def test_a_second_ctrl_c_stops_at_once(tmp_path, monkeypatch):
    def twice(self, state):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(RunLog, "step", twice)
    with pytest.raises(KeyboardInterrupt):
        run(tiny_config(), tmp_path / "run", device="cpu", console=quiet())
    assert list_checkpoints(tmp_path / "run") == []
    monkeypatch.undo()
    run(tiny_config(training={"steps": 1}), tmp_path / "run", device="cpu", console=quiet())  # nothing is in the way


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_second_signal_of_a_scheduler_stops_at_once_too(number, tmp_path, monkeypatch):
    def twice(self, state):
        signal.raise_signal(number)
        signal.raise_signal(number)

    monkeypatch.setattr(RunLog, "step", twice)
    before = signal.getsignal(number)
    with pytest.raises(Signalled) as stopped:
        run(tiny_config(), tmp_path / "run", device="cpu", console=quiet())
    assert stopped.value.code == 128 + number and signal.getsignal(number) == before


def test_the_same_command_again_and_again(whole, tmp_path, monkeypatch):
    """`resume="auto"`: begins, goes on, ends, and does no harm after that."""

    def once(path):
        console = quiet()
        run(tiny_config(), path, device="cpu", resume="auto", console=console)
        return said(console)

    original = RunLog.step

    def stop(self, state):
        record = original(self, state)
        signal.raise_signal(signal.SIGTERM)
        return record

    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "step", stop)
        with pytest.raises(Signalled):
            once(tmp_path / "run")
    assert "going on from" in once(tmp_path / "run")
    assert result(tmp_path / "run") == result(whole)
    once(tmp_path / "run")
    assert result(tmp_path / "run") == result(whole)
    (tmp_path / "young").mkdir()
    (tmp_path / "young" / "log.jsonl").write_text("")  # a run that was killed before it saved anything
    assert "going on from" not in once(tmp_path / "young")
    assert result(tmp_path / "young") == result(whole)
    for path in list_checkpoints(tmp_path / "young"):
        (path / "checkpoint.json").write_text("damaged")
    with pytest.raises(
        ConfigError, match="start the run anew with --overwrite"
    ):  # what may be worth mending is not overwritten
        once(tmp_path / "young")


def test_resuming_a_finished_run_changes_nothing(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    run(tiny_config(), tmp_path / "run", device="cpu", resume=True, console=quiet())
    assert result(tmp_path / "run") == result(whole)


def test_the_model_of_a_run_that_was_made_longer_is_its_newest(whole, tmp_path, monkeypatch):
    """It had ended at step 12, goes on, and breaks off past a checkpoint: what it has learned since is not hidden."""
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    monkeypatch.setattr(experiment.main, "finish", lambda this: None)
    run(tiny_config(training={"steps": 16}), folder, device="cpu", resume=True, console=quiet())
    assert load(folder).origin["step"] == load(folder, ema=0.9).origin["step"] == 16
    assert load(folder / "model.safetensors").origin["step"] == 12
    next(list_checkpoints(folder)[-1].glob("student*")).write_bytes(b"damaged")
    assert load(folder).origin["step"] == 12


def test_two_runs_never_write_into_one_folder(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    with claim(folder):
        for options in ({"resume": "auto"}, {"overwrite": True}, {}):
            with pytest.raises(ConfigError, match="another process is training in"):
                run(tiny_config(), folder, device="cpu", console=quiet(), **options)
    assert result(folder) == result(whole)
    run(tiny_config(), folder, device="cpu", resume="auto", console=quiet())  # it is free again


def test_a_run_whose_folder_is_anothers_by_now_keeps_out_of_it(tmp_path, monkeypatch):
    """Deleted, and another run begun there: the first one's log, checkpoints, pictures and model go nowhere near."""
    folder, original = tmp_path / "run", RunLog.step

    def replaced(self, state):
        if state.step == 5:
            for saver in threading.enumerate():  # a deletion that meets the checkpoint of step 4 would fail half-way
                if saver.name == "ict-saver":
                    saver.join()
            shutil.rmtree(folder)
            folder.mkdir()
            (folder / "of another").touch()
        return original(self, state)

    monkeypatch.setattr(RunLog, "step", replaced)
    console = quiet()
    with pytest.raises(TrainingFailed, match=r"has vanished\. Its model was put into (.*)model\.safetensors"):
        run(tiny_config(), folder, device="cpu", console=console)
    assert [path.name for path in folder.iterdir()] == ["of another"]


def test_a_folder_that_was_replaced_while_a_run_got_ready_is_left_alone(whole, tmp_path, monkeypatch):
    """Minutes may lie between: images are decoded. Not even --overwrite may touch what another run has there."""
    folder, original = tmp_path / "run", experiment.main.rehearse

    def replaced(*arguments):
        original(*arguments)
        folder.rmdir()
        shutil.copytree(whole, folder)

    monkeypatch.setattr(experiment.main, "rehearse", replaced)
    with pytest.raises(FileNotFoundError, match="has vanished"):
        run(tiny_config(), folder, device="cpu", overwrite=True, console=quiet())
    assert result(folder) == result(whole)


@pytest.mark.parametrize(("compiles", "seconds"), [(True, 61), (True, 1), (False, 61)])
def test_a_first_step_that_took_long_for_compiling_is_mentioned(compiles, seconds, tmp_path, monkeypatch):
    monkeypatch.setattr(experiment.main, "rehearse", lambda *arguments: seconds)
    monkeypatch.setattr("ict.training.passes.compile_net", lambda model: None)
    console = quiet()
    config = tiny_config(speed={"compile": compiles}, training={"steps": 2})
    run(config, tmp_path / "run", device="cpu", console=console)
    text = console.file.getvalue()
    assert ("the first step took 1m01s: what was compiled" in text) is (
        compiles and seconds > 5
    ) and "noise levels" in text


def test_a_claim_leaves_the_folder_of_another(tmp_path):
    folder = tmp_path / "run"
    with claim(folder):
        (folder).rename(tmp_path / "old")
        folder.mkdir()  # another's, and still empty
    assert folder.is_dir()


def test_a_claim_is_of_the_folder_that_is_there(tmp_path, monkeypatch):
    """One that a refused run takes away between opening and locking is made again."""
    folder, original, taken = tmp_path / "a" / "run", fcntl.flock, []

    def late(handle, flags):
        if not taken:
            taken.append(folder.rmdir())
        original(handle, flags)

    monkeypatch.setattr(fcntl, "flock", late)
    with claim(folder):
        assert folder.is_dir()
        with pytest.raises(ConfigError, match="another process"), claim(folder):
            pass
        with pytest.raises(ConfigError, match="another process"), claim(folder / ".." / "run"):
            pass
        assert folder.is_dir()
    assert not list(tmp_path.iterdir())


def test_a_run_that_is_refused_leaves_no_folder(tmp_path):
    with pytest.raises(ConfigError):
        run(tiny_config(data={"image_size": 16}), tmp_path / "a" / "b", device="cpu", console=quiet())
    assert not list(tmp_path.iterdir())


def test_snapshots_say_at_which_n_they_were_taken(tmp_path):
    """N changes at 4 and 8, and the log has no line of then."""
    run(tiny_config(training={"log_every": 100}), tmp_path / "run", device="cpu", console=quiet())
    page = (tmp_path / "run" / "report.html").read_text()
    assert re.findall(r"<figcaption>(.*?)</figcaption>", page) == ["step 6 · N = 5", "step 12 · N = 9"]


def test_the_first_speed_after_a_resume_is_of_this_process(whole, tmp_path, monkeypatch):
    """The line that was begun before the break counts its steps for the loss, not for the speed."""
    run_until(7, tiny_config(), tmp_path / "run", monkeypatch)
    lines, original = [], RunLog.write

    def write(self, state):
        lines.append((self.count, self.timed))
        return original(self, state)

    monkeypatch.setattr(RunLog, "write", write)
    run(tiny_config(), tmp_path / "run", device="cpu", resume=True, console=quiet())  # from step 4
    assert lines == [(3, 2), (3, 3), (3, 3)]


def write_pictures(folder: Path) -> None:
    folder.mkdir(parents=True)
    for number in range(3):
        (folder / f"{number}.png").write_bytes(png(grid(torch.full((1, 1, 8, 8), number / 3))))


def test_images_may_move_while_a_run_rests(tmp_path):
    """Others are told of; a source by another name, with the same pixels, is no other recipe."""
    write_pictures(tmp_path / "there" / "cat")
    write_pictures(tmp_path / "there" / "dog")

    def go_on(place: str, steps: int) -> str:
        console, data = quiet(), {"source": str(tmp_path / place), "classes": 2}
        config = tiny_config(data=data, training={"steps": steps, "batch": 2})
        run(config, tmp_path / "run", device="cpu", resume="auto", console=console)
        return said(console)

    go_on("there", 2)
    (tmp_path / "there").rename(tmp_path / "here")
    assert "not those" not in go_on("here", 4)
    (tmp_path / "here" / "cat" / "3.png").write_bytes((tmp_path / "here" / "cat" / "2.png").read_bytes())
    assert "the images are not those that the run has learned from" in go_on("here", 6)
    (tmp_path / "here").rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "dog").rename(tmp_path / "elsewhere" / "horse")  # the same pixels
    with pytest.raises(ConfigError, match=r"data\.source: .*here' then"):
        go_on("elsewhere", 8)


def test_files_that_are_not_used_are_told_of(tmp_path):
    pictures = tmp_path / "pictures"
    write_pictures(pictures)
    (pictures / "broken.png").write_bytes(b"nothing")
    console = quiet()
    data = {"source": str(pictures), "classes": 0}
    run(tiny_config(data=data, training={"steps": 1}), tmp_path / "run", device="cpu", console=console)
    text = said(console)
    assert "1 of 4 files" in text and "broken.png" in text and "ict data inspect" in text
    assert "a step takes 8 images, more than there are" in text


def test_a_longer_budget_may_be_resumed_other_changes_not(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"training.lr: 0.001 then, 0.5 now"):
        run(tiny_config(training={"lr": 0.5}), tmp_path / "run", device="cpu", resume=True, console=quiet())
    console = quiet()
    run(tiny_config(training={"steps": 14}), tmp_path / "run", device="cpu", resume=True, console=console)
    assert "the run had training.steps = 12 and has training.steps = 14 now" in said(console)
    assert list_checkpoints(tmp_path / "run")[-1].name == "step-00000014"


def test_a_run_is_never_replaced_unasked(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"--resume.*--overwrite.*--out"):
        run(tiny_config(), tmp_path / "run", device="cpu", console=quiet())
    assert result(tmp_path / "run") == result(whole)
    run(tiny_config(training={"steps": 1}), tmp_path / "run", device="cpu", overwrite=True, console=quiet())
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step-00000001"]
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_only_the_newest_checkpoints_stay(tmp_path):
    run(tiny_config(training={"keep": 2}), tmp_path / "run", device="cpu", console=quiet())
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step-00000008", "step-00000012"]


def test_some_checkpoints_stay_for_good(tmp_path):
    config = tiny_config(training={"keep": 2, "keep_every": 4, "save_every": 2})
    run(config, tmp_path / "run", device="cpu", console=quiet())
    assert [path.name[-2:] for path in list_checkpoints(tmp_path / "run")] == ["04", "08", "10", "12"]


@pytest.mark.parametrize("log_every", [1, 1000])
def test_a_diverged_run_stops_and_saves_nothing_of_it(log_every, tmp_path):
    """Whether the log or a checkpoint comes first."""
    config = tiny_config(training={"lr": 1e30, "log_every": log_every, "save_every": 2})
    with pytest.raises(TrainingFailed, match=r"diverged.*lower training\.lr"):
        run(config, tmp_path / "run", device="cpu", console=quiet())
    assert list_checkpoints(tmp_path / "run") == [] and not (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"objective": {"distance": "lpips"}},
        {"objective": {"kind": "ct"}},
        {"training": {"lr_schedule": "steps"}},
        {"objective": {"p_mean": 1000.0, "p_std": 0.1}},
    ],
)
def test_what_cannot_run_fails_before_a_run_is_replaced(change, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    for options in ({"overwrite": True}, {}):
        with pytest.raises(ConfigError):
            run(tiny_config(**change), tmp_path / "run", device="cpu", console=quiet(), **options)
        assert result(tmp_path / "run") == result(whole)
    with pytest.raises(ConfigError):
        run(tiny_config(**change), tmp_path / "new", device="cpu", console=quiet())
    assert not (tmp_path / "new").exists()


def test_overwriting_leaves_what_is_not_ours(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    foreign = [
        "samples/holiday.jpg",
        "checkpoints/other.pt",
        "checkpoints/step-00000004-best/a",
        "samples/step-final.png",
    ]
    for name in foreign:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("mine")
    run(tiny_config(training={"keep": 2}), folder, device="cpu", overwrite=True, console=quiet())
    assert all((folder / name).read_text() == "mine" for name in foreign)
    assert [path.name for path in list_checkpoints(folder)] == ["step-00000008", "step-00000012"]


def test_a_recipe_of_somebodys_own_is_never_replaced(tmp_path):
    (tmp_path / "recipe.toml").write_text("# my notes\n")
    for options in ({}, {"overwrite": True}):
        with pytest.raises(ConfigError, match=r"recipe\.toml is in the way"):
            run(tiny_config(training={"steps": 1}), tmp_path, device="cpu", console=quiet(), **options)
    assert (tmp_path / "recipe.toml").read_text() == "# my notes\n"


def test_a_model_that_no_run_here_made_is_never_deleted(tmp_path):
    (tmp_path / "model.safetensors").write_text("mine")
    with pytest.raises(ConfigError, match=r"model\.safetensors is in the way"):
        run(tiny_config(training={"steps": 1}), tmp_path, device="cpu", overwrite=True, console=quiet())
    assert (tmp_path / "model.safetensors").read_text() == "mine"


def test_a_checkpoint_that_was_moved_and_linked_is_pruned_as_a_link(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    shutil.move(folder / "checkpoints" / "step-00000004", tmp_path / "elsewhere")
    (folder / "checkpoints" / "step-00000004").symlink_to(tmp_path / "elsewhere")
    run(tiny_config(training={"keep": 2, "steps": 14}), folder, device="cpu", resume=True, console=quiet())
    assert [path.name for path in list_checkpoints(folder)] == ["step-00000012", "step-00000014"]
    assert (tmp_path / "elsewhere" / "checkpoint.json").exists()


def test_a_folder_of_other_things_is_not_a_run(tmp_path):
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "holiday.jpg").write_text("mine")
    run(tiny_config(training={"steps": 1}), tmp_path, device="cpu", console=quiet())
    assert (tmp_path / "samples" / "holiday.jpg").read_text() == "mine"


def test_damaged_checkpoints_are_put_aside_and_never_crowd_out_good_ones(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    (folder / "checkpoints" / "step-00000012" / "optimiser.pt").unlink()
    run(tiny_config(training={"keep": 2, "steps": 10}), folder, device="cpu", resume=True, console=quiet())
    assert [path.name for path in list_checkpoints(folder)] == ["step-00000008", "step-00000010"]
    assert (folder / "checkpoints" / "damaged-step-00000012").is_dir()
    assert find_checkpoint(folder).manifest["step"] == 10
    assert [path.name for path in sorted((folder / "samples").iterdir())] == ["step-00000006.png", "step-00000010.png"]


def test_checkpoints_are_ordered_by_number(tmp_path):
    for step in (99_999_999, 100_000_000, 5):
        (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [5, 99_999_999, 100_000_000]


def test_a_run_can_be_made_longer_not_shorter(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    for bound, words in (
        ({"steps": 3}, r"training\.steps = 3"),
        ({"steps": None, "images": 24}, r"training\.images = 24"),
        ({"steps": None, "budget": "0.001s"}, r"training\.budget = 0\.001s"),
    ):
        with pytest.raises(ConfigError, match=words + r", but .*step-00000012 is past that"):
            run(tiny_config(training=bound), tmp_path / "run", device="cpu", resume=True, console=quiet())
    assert result(tmp_path / "run") == result(whole)


def test_a_run_whose_time_is_over_may_be_resumed_as_it_was(tmp_path):
    """As when it was stopped between its last step and its page."""
    config = tiny_config(training={"steps": None, "budget": "0.2s"})
    run(config, tmp_path / "run", device="cpu", console=quiet())
    (tmp_path / "run" / "model.safetensors").unlink()
    for budget in ("0.2s", "0m0.2s"):
        same = replace(config, training=replace(config.training, budget=budget))
        run(same, tmp_path / "run", device="cpu", resume=True, console=quiet())
    assert (tmp_path / "run" / "model.safetensors").is_file()


def written(folder: Path, name: str, *, names: tuple[str, ...] = tuple("0123456789"), **sections) -> Path:
    """An untrained model of a recipe."""
    spec = ModelSpec.from_config(tiny_config(**sections), names)
    path = folder / f"{name}.safetensors"
    path.write_bytes(pack_model(spec, build_model(spec).state_dict(), {}))
    return path


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"net": {"fourier_scale": 16.0}}, "net.fourier_scale is 16.0 there, 0.02 here"),
        ({"net": {"head_channels": 8}}, "net.head_channels is 8 there, 64 here"),
        ({"noise": {"sigma_data": 1.0}}, "noise.sigma_data is 1.0 there, 0.5 here"),
        ({"net": {"embedding": "positional"}}, "net.embedding is positional there, fourier here"),
        ({"net": {"channels": 16}}, "net.channels is 16 there, 8 here"),
    ],
)
def test_weights_of_a_net_that_computes_something_else_are_refused(sections, words, tmp_path):
    start = written(tmp_path, "start", **sections)
    with pytest.raises(ConfigError, match=words):
        run(tiny_config(training={"start": str(start)}), tmp_path / "run", device="cpu", console=quiet())
    assert not (tmp_path / "run").exists()


def test_dropout_of_the_weights_one_starts_from_does_not_matter_nor_scales_that_are_not_used(tmp_path):
    start = written(tmp_path, "start", net={"dropout": 0.0, "dropout_max_size": 4, "positional_scale": 3.0})
    config = tiny_config(training={"start": str(start), "steps": 2})
    run(config, tmp_path / "run", device="cpu", console=quiet())
    start.unlink()  # a checkpoint has weights of its own
    run(replace(config, training=replace(config.training, steps=3)), tmp_path / "run", device="cpu", resume=True,
        console=quiet())  # fmt: skip
    assert list_checkpoints(tmp_path / "run")[-1].name == "step-00000003"


def test_a_teacher_must_mean_the_same_classes(tmp_path):
    for names in (("a", "b"), tuple("9876543210"), tuple("0123456789ab")):
        teacher = written(tmp_path, "teacher", objective={"kind": "edm"}, data={"classes": len(names)}, names=names)
        config = tiny_config(objective={"kind": "cd", "teacher_model": str(teacher)})
        with pytest.raises(ConfigError, match="they must be the same"):
            run(config, tmp_path / "run", device="cpu", console=quiet())
        if len(names) != 10:
            with pytest.raises(ConfigError, match=f"knows {len(names)} classes"):
                ConsistencyDistillation(config).load(torch.device("cpu"))
    assert not (tmp_path / "run").exists()


def test_a_teacher_may_move_but_not_change(tmp_path):
    def config_of(teacher: Path, steps: int):
        section = {"kind": "cd", "teacher_model": str(teacher)}
        return tiny_config(objective=section, training={"steps": steps})

    teacher = written(tmp_path, "teacher", objective={"kind": "edm"})
    run(config_of(teacher, 2), tmp_path / "run", device="cpu", console=quiet())
    moved = teacher.rename(tmp_path / "moved.safetensors")
    run(config_of(moved, 3), tmp_path / "run", device="cpu", resume=True, console=quiet())
    spec = read_spec(moved)
    moved.write_bytes(pack_model(spec, build_model(spec, seed=5).state_dict(), {}))
    with pytest.raises(ConfigError, match="it is another model than then"):
        run(config_of(moved, 4), tmp_path / "run", device="cpu", resume=True, console=quiet())


def test_a_teacher_may_vanish_once_a_run_has_it(tmp_path, monkeypatch):
    teacher = written(tmp_path, "teacher", objective={"kind": "edm"})
    digest, original = sha256(teacher.read_bytes()), RunLog.step

    def step(self, state):
        teacher.unlink(missing_ok=True)
        return original(self, state)

    monkeypatch.setattr(RunLog, "step", step)
    config = tiny_config(objective={"kind": "cd", "teacher_model": str(teacher)})
    run(config, tmp_path / "run", device="cpu", console=quiet())
    manifest = check_checkpoint(list_checkpoints(tmp_path / "run")[-1])
    assert manifest["extras"]["teacher"] == digest


def test_an_unknown_teacher_is_not_exchanged(tmp_path):
    """A checkpoint of an older version does not say which it was: there the path counts."""
    teacher = written(tmp_path, "teacher", objective={"kind": "edm"})
    config = tiny_config(objective={"kind": "cd", "teacher_model": str(teacher)}, training={"steps": 4})
    run(config, tmp_path / "run", device="cpu", console=quiet())
    place = list_checkpoints(tmp_path / "run")[-1] / "checkpoint.json"
    manifest = json.loads(place.read_text())
    del manifest["extras"]["teacher"], manifest["sha256"]
    place.write_bytes(seal(manifest))
    for teacher_model in ("mixture2d", str(teacher.rename(tmp_path / "moved.safetensors"))):
        other = replace(config, objective=replace(config.objective, teacher_model=teacher_model))
        with pytest.raises(ConfigError, match=r"objective\.teacher_model: .* then, .* now"):
            check_same(other, find_checkpoint(tmp_path / "run"), load_images(config.data))


def test_keys_that_a_method_has_no_use_for_are_told_and_their_names_checked(tmp_path):
    console = quiet()
    section = {"kind": "ect", "weighting": "uniform", "gap_power": 2.0}
    run(tiny_config(objective=section, training={"steps": 1}), tmp_path / "run", device="cpu", console=console)
    assert "objective.kind = ect makes no use of objective.s0, objective.s1, objective.weighting" in said(console)
    for key in ("curriculum", "index", "weighting", "solver"):
        with pytest.raises(ConfigError, match=f"objective.{key} = 'nonsense' is not known"):
            run(
                tiny_config(objective={"kind": "ect", key: "nonsense"}), tmp_path / "new", device="cpu", console=quiet()
            )
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("save_every", [1, 2])
def test_the_end_of_a_run_is_logged_once(save_every, tmp_path):
    config = tiny_config(training={"steps": 5, "save_every": save_every})
    run(config, tmp_path / "run", device="cpu", console=quiet())
    assert [record["step"] for record in read_log(tmp_path / "run" / "log.jsonl")] == [1, 3, 5]
    run(config, tmp_path / "run", device="cpu", resume=True, console=quiet())
    assert [record["step"] for record in read_log(tmp_path / "run" / "log.jsonl")] == [1, 3, 5]


def test_names_with_brackets_are_printed_as_they_are(tmp_path):
    console = quiet()
    run(tiny_config(training={"steps": 1}), tmp_path / "m[red][/x]", device="cpu", console=console)
    assert "m[red][/x]/model.safetensors" in said(console)


def test_a_resume_elsewhere_says_that_bits_may_differ(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    manifest = tmp_path / "run" / "checkpoints" / "step-00000012" / "checkpoint.json"
    manifest.write_bytes(seal(json.loads(manifest.read_text().replace('"threads": 1', '"threads": 64'))))
    console = quiet()
    run(tiny_config(), tmp_path / "run", device="cpu", resume=True, console=console)
    assert "threads 64 then and 1 now" in said(console)


# --- faults


FILES = ("student.safetensors", "ema-0.9.safetensors", "ema-0.99.safetensors", "optimiser.pt", "checkpoint.json")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing"])
def test_a_damaged_checkpoint_is_found_and_the_one_before_used(name, damage, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    newest = list_checkpoints(tmp_path / "run")[-1]
    data = bytearray((newest / name).read_bytes())
    if damage == "missing":
        (newest / name).unlink()
    elif damage == "truncated":
        (newest / name).write_bytes(data[: len(data) // 2])
    else:
        data[0 if name == "checkpoint.json" else len(data) // 2] ^= 0xFF
        (newest / name).write_bytes(data)
    with pytest.raises(DamagedFile, match=re.escape(name)):
        check_checkpoint(newest)
    found = find_checkpoint(tmp_path / "run")
    assert found.path.name == "step-00000008"
    assert len(found.passed_over) == 1 and name in found.passed_over[0]
    console = quiet()
    run(tiny_config(), tmp_path / "run", device="cpu", resume=True, console=console)
    assert "passed over" in said(console) and name in said(console)
    assert result(tmp_path / "run") == result(whole)


@pytest.mark.parametrize(
    "change",
    [
        {"files": {}},
        {"files": None},
        {"files": {"../../../etc/passwd": "0"}},
        {"step": "x"},
        {"step": -5},
        {"seconds": None},
        {"extras": {}},
        {"extras": {"log": {}}},
        {"recipe": {"trainig": 1}},
        {"model": "../../model.safetensors"},
        {"made_with": 3},
    ],
)
def test_a_manifest_that_was_tampered_with_is_passed_over(change, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    path = list_checkpoints(tmp_path / "run")[-1] / "checkpoint.json"
    path.write_bytes(seal(json.loads(path.read_text()) | change))
    assert find_checkpoint(tmp_path / "run").path.name == "step-00000008"
    (tmp_path / "run" / "model.safetensors").unlink()
    with pytest.raises(DamagedFile, match=r"checkpoint\.json"):
        load(tmp_path / "run")


def test_no_good_checkpoint_is_an_error_that_names_each(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    for path in list_checkpoints(tmp_path / "run"):
        (path / "optimiser.pt").unlink()
    with pytest.raises(ConfigError, match=r"step-00000012: optimiser.pt is missing(.|\n)*step-00000004"):
        find_checkpoint(tmp_path / "run")
    with pytest.raises(ConfigError, match="start without --resume"):
        find_checkpoint(tmp_path / "nothing")


def test_a_full_disk_keeps_the_last_good_checkpoint(whole, tmp_path, monkeypatch):
    original, written = checkpoint.write_new, []

    def full(path, data):
        written.append(path)
        if len(written) > 7:  # the first checkpoint has 5 files; the second fails at its third
            path.write_bytes(data[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        original(path, data)

    monkeypatch.setattr(checkpoint, "write_new", full)
    console = quiet()
    run(tiny_config(), tmp_path / "run", device="cpu", console=console)
    monkeypatch.undo()
    for step in (8, 12):
        assert re.search(rf"step {step} could not be saved .*No space left.* needs [\d.]+ MiB", said(console))
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000004"]  # nothing half-written
    run(tiny_config(), tmp_path / "run", device="cpu", resume=True, console=quiet())
    assert result(tmp_path / "run") == result(whole)


def test_a_run_whose_folder_vanishes_goes_on_and_puts_its_model_somewhere_else(whole, tmp_path, monkeypatch):
    """Nothing is made anew where the folder was: it may have been another disk."""
    original = RunLog.step

    def vanish(self, state):
        if state.step == 5:
            (tmp_path / "run").rename(tmp_path / "elsewhere")
        return original(self, state)

    monkeypatch.setattr(RunLog, "step", vanish)
    console = quiet()
    with pytest.raises(TrainingFailed, match=r"the run is done, but .*vanished.*put into ") as caught:
        run(tiny_config(), tmp_path / "run", device="cpu", console=console)
    assert not (tmp_path / "run").exists()
    assert "step 8 could not be saved" in said(console) and "the log cannot be written" in said(console)
    rescued = Path(str(caught.value).rsplit("put into ", 1)[1])
    assert rescued.read_bytes() == (whole / "model.safetensors").read_bytes()
    shutil.rmtree(rescued.parent)


def test_a_folder_that_comes_back_gets_what_was_kept_for_it(whole, tmp_path, monkeypatch):
    original = RunLog.step

    def vanish(self, state):
        if state.step in (5, 10):
            places = (tmp_path / "run", tmp_path / "elsewhere")
            Path.rename(*places if state.step == 5 else reversed(places))
        return original(self, state)

    monkeypatch.setattr(RunLog, "step", vanish)
    run(tiny_config(), tmp_path / "run", device="cpu", console=quiet())
    assert [line["step"] for line in read_log(tmp_path / "run" / "log.jsonl")] == [1, 3, 6, 9, 12]
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_an_atomic_write_keeps_the_old_file_on_an_error(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def broken(handle):
        raise OSError(errno.EIO, "broken disk")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="broken disk"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_log_line_that_was_cut_off_is_passed_over(tmp_path):
    line, other = '{"step": 1, "loss": 2.5}\n', '{"step": 2, "loss": 2.5}\n'
    (tmp_path / "log").write_text(line + other + '{"st')
    assert read_log(tmp_path / "log") == [{"step": 1, "loss": 2.5}, {"step": 2, "loss": 2.5}]
    (tmp_path / "log").write_text(line + other + line)  # a run that had gone back, and could not take lines away
    assert read_log(tmp_path / "log") == [{"step": 1, "loss": 2.5}]
    for broken in (b'{"st', b"5", b"[]", b"\xff\xfe"):
        (tmp_path / "log").write_bytes(line.encode() + broken + b"\n" + line.encode())
        with pytest.raises(ConfigError, match="line 2"):
            read_log(tmp_path / "log")


def test_auto_never_replaces_a_finished_model(whole, tmp_path):
    """Its checkpoints were deleted to save space, or lie on a disk that is not there."""
    shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}
    with pytest.raises(ConfigError, match=r"model\.safetensors but no checkpoint"):
        run(tiny_config(), tmp_path / "run", device="cpu", resume="auto", console=quiet())
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()} == before


@pytest.mark.parametrize("odd", ["a folder", "a file"])
def test_what_cannot_be_read_as_a_checkpoint_is_passed_over(odd, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    newest = list_checkpoints(tmp_path / "run")[-1]
    if odd == "a folder":
        (newest / "checkpoint.json").unlink()
        (newest / "checkpoint.json").mkdir()
    else:
        (tmp_path / "run" / "checkpoints" / "step-00000099").write_text("mine")
    found = find_checkpoint(tmp_path / "run")
    assert found.manifest["step"] == (8 if odd == "a folder" else 12) and "cannot be read" in found.passed_over[0]


def test_log_lines_that_wait_are_written_before_a_stop(tmp_path, monkeypatch):
    original, refused = RunLog.append, []

    def append(self, line):
        if self.path is not None and len(refused) < 3:
            refused.append(line)
            self.unwritten += line
            return
        original(self, line)

    monkeypatch.setattr(RunLog, "append", append)
    step = RunLog.step

    def interrupt(self, state):
        if state.step == 7:
            signal.raise_signal(signal.SIGTERM)
        return step(self, state)

    monkeypatch.setattr(RunLog, "step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(tiny_config(), tmp_path / "run", device="cpu", console=quiet())
    monkeypatch.undo()
    run(tiny_config(), tmp_path / "run", device="cpu", resume=True, console=quiet())
    assert [line["step"] for line in read_log(tmp_path / "run" / "log.jsonl")] == [1, 3, 6, 9, 12]


def test_a_checkpoint_is_saved_though_an_older_one_cannot_be_deleted(tmp_path, monkeypatch):
    def refuse(path):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(checkpoint, "remove", refuse)
    console = quiet()
    run(tiny_config(training={"keep": 2}), tmp_path / "run", device="cpu", console=console)
    assert "step 12 is saved, but an older checkpoint could not be deleted" in said(console)
    assert "could not be saved" not in said(console) and len(list_checkpoints(tmp_path / "run")) == 3


def test_a_page_that_cannot_be_written_does_not_fail_a_finished_run(tmp_path, monkeypatch):
    def refuse(*arguments, device):
        assert device == torch.device("cpu")  # the run's: samples are drawn where it was trained
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "report.html")

    monkeypatch.setattr("ict.experiment.main.write_report", refuse)
    console = quiet()
    assert run(tiny_config(), tmp_path / "run", device="cpu", console=console).is_file()
    assert "the page of step 12 could not be written" in said(console)


def test_a_run_of_an_older_version_can_go_on(tmp_path):
    """Its recipe lacks the keys that came since; and how a GPU computes may change on the way."""
    config = tiny_config(training={"steps": 4, "save_every": 4})
    run(config, tmp_path / "run", device="cpu", console=quiet())
    (manifest,) = (tmp_path / "run").glob("checkpoints/*/checkpoint.json")
    found = json.loads(manifest.read_text())
    for section, key in (("objective", "apart"), ("net", "intervals")):
        del found["recipe"][section][key]
    del found["recipe"]["speed"]
    later = tiny_config(training={"steps": 8, "save_every": 4}, speed={"graphs": False})
    then, images = Found(path=manifest.parent, manifest=found, passed_over=[]), load_images(later.data)
    check_same(later, then, images)
    with pytest.raises(ConfigError, match="not the one that"):
        check_same(tiny_config(net={"channels": 16}), then, images)
