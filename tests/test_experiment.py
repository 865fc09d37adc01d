"""Whole runs: what is written, what a resume gives, what a fault leaves behind."""

import errno
import io
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from helpers import tiny_config
from rich.console import Console

import ict.training.checkpoint as checkpoint
from ict.config import ConfigError
from ict.experiment import run
from ict.files import DamagedFile, write_atomically
from ict.sampling import load
from ict.training.checkpoint import check_checkpoint, find_checkpoint, list_checkpoints
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


def test_an_interrupted_run_saves_and_resumes_to_the_bit(whole, tmp_path, monkeypatch):
    original = RunLog.step

    def interrupt(self, state):
        record = original(self, state)
        if state.step == 5:
            raise KeyboardInterrupt
        return record

    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "step", interrupt)
        console = quiet()
        with pytest.raises(KeyboardInterrupt):
            run(tiny_config(), tmp_path / "run", device="cpu", console=console)
    assert "stopped at step 5 and saved" in said(console)
    assert list_checkpoints(tmp_path / "run")[-1].name == "step-00000005"
    run(tiny_config(), tmp_path / "run", device="cpu", resume=True, console=quiet())
    assert result(tmp_path / "run") == result(whole)


def test_resuming_a_finished_run_changes_nothing(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    run(tiny_config(), tmp_path / "run", device="cpu", resume=True, console=quiet())
    assert result(tmp_path / "run") == result(whole)


def test_a_longer_budget_may_be_resumed_other_changes_not(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"training.lr: 0.001 then, 0.5 now"):
        run(tiny_config(training={"lr": 0.5}), tmp_path / "run", device="cpu", resume=True, console=quiet())
    run(tiny_config(training={"steps": 14}), tmp_path / "run", device="cpu", resume=True, console=quiet())
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


def test_a_diverged_run_stops_with_an_explanation(tmp_path):
    config = tiny_config(training={"lr": 1e30, "log_every": 1})
    with pytest.raises(TrainingFailed, match=r"lower training.lr"):
        run(config, tmp_path / "run", device="cpu", console=quiet())


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


def test_no_good_checkpoint_is_an_error_that_names_each(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    for path in list_checkpoints(tmp_path / "run"):
        (path / "optimiser.pt").unlink()
    with pytest.raises(ConfigError, match=r"step-00000012: optimiser.pt is missing(.|\n)*step-00000004"):
        find_checkpoint(tmp_path / "run")
    with pytest.raises(ConfigError, match="start without --resume"):
        find_checkpoint(tmp_path / "nothing")


def test_a_full_disk_keeps_the_last_good_checkpoint(whole, tmp_path, monkeypatch):
    original, written = checkpoint.write_synced, []

    def full(path, data):
        written.append(path)
        if len(written) > 7:  # the first checkpoint has 5 files; the second fails at its third
            path.write_bytes(data[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        original(path, data)

    monkeypatch.setattr(checkpoint, "write_synced", full)
    with pytest.raises(OSError, match=r"No space left.*ema-0\.99"):
        run(tiny_config(), tmp_path / "run", device="cpu", console=quiet())
    monkeypatch.undo()
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000004"]  # nothing half-written
    run(tiny_config(), tmp_path / "run", device="cpu", resume=True, console=quiet())
    assert result(tmp_path / "run") == result(whole)


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a small disk")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_really_full_disk(small_disk):
    with pytest.raises(OSError, match=r"No space left on device \(it needs .* MiB\).*step-0") as caught:
        run(tiny_config(training={"keep": 10, "save_every": 1}), small_disk / "run", device="cpu", console=quiet())
    assert caught.value.errno == errno.ENOSPC
    found = find_checkpoint(small_disk / "run")
    assert found.passed_over == [] and found.manifest["step"] >= 1


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
    (tmp_path / "log").write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert read_log(tmp_path / "log") == [{"step": 1}, {"step": 2}]
    (tmp_path / "log").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ConfigError, match="line 2"):
        read_log(tmp_path / "log")
