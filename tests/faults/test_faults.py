"""What a run comes through: kills, damage, full disks, lost ranks. Run by `make test-faults`; see docs/faults.md."""

import io
import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from helpers import tiny_config
from rich.console import Console

from ict.experiment import run
from ict.files import DamagedFile, list_checkpoints, sha256
from ict.training.checkpoint import find_checkpoint, seal
from ict.training.log import read_log

pytestmark = pytest.mark.faults
HERE = Path(__file__).parent


def quiet() -> Console:
    return Console(file=io.StringIO(), width=300)


# --- killed processes


@pytest.mark.parametrize("seed", [0, 1])
def test_a_run_that_is_killed_at_random_moments_ends_as_if_it_had_not_been(seed, tmp_path):
    seen = kills(tmp_path, seed, 105)
    assert seen["kills"] >= 105 and seen["inside a save"] >= 20
    assert seen["most steps lost"] <= 6  # a save of 3 steps ago may still be on its way to the disk


@pytest.mark.parametrize("half", [0, 1])
def test_a_run_that_is_killed_at_any_operation_on_the_disk_goes_on(half, tmp_path):
    assert kills(tmp_path, half, 0)["operations"] > 40


def kills(folder: Path, seed: int, count: int) -> dict[str, int]:
    program = [sys.executable, HERE / "kills.py", folder, str(seed), str(count)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return json.loads(done.stdout)


# --- damaged checkpoints


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(tiny_config(), folder, device="cpu", console=quiet())
    return folder


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


DAMAGE = {
    "missing": lambda data: None,
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "a byte short": lambda data: data[:-1],
    "a byte longer": lambda data: data + b"\0",
    "first byte flipped": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "a byte flipped in the middle": lambda data: flipped(data, len(data) // 2),
    "a byte flipped at a third": lambda data: flipped(data, len(data) // 3),
    "last byte flipped": lambda data: data[:-1] + bytes([data[-1] ^ 128]),
    "zeros": lambda data: bytes(len(data)),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_to_any_file_is_found_and_the_checkpoint_before_is_used(damage, whole, tmp_path):
    newest = list_checkpoints(whole)[-1]
    names = sorted(path.name for path in newest.iterdir())
    assert len(names) == 5
    for name in names:
        folder = tmp_path / name
        shutil.copytree(whole, folder)
        path = folder / "checkpoints" / newest.name / name
        data = DAMAGE[damage](path.read_bytes())
        path.unlink() if data is None else path.write_bytes(data)
        found = find_checkpoint(folder)
        assert found.manifest["step"] == 8
        assert len(found.passed_over) == 1 and name in found.passed_over[0] and newest.name in found.passed_over[0]
    console = quiet()
    run(tiny_config(), folder, device="cpu", resume=True, console=console)
    assert "passed over" in console.file.getvalue()
    assert (folder / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


class Evil:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def test_a_malicious_checkpoint_is_refused_without_its_side_effect(whole, tmp_path):
    """Its manifest is right; what it holds is a program."""
    for name in ("optimiser.pt", "student.safetensors"):
        folder, trace = tmp_path / name, tmp_path / f"trace-{name}"
        shutil.copytree(whole, folder)
        newest = list_checkpoints(folder)[-1]
        buffer = io.BytesIO()
        torch.save(Evil(trace), buffer, pickle_module=pickle)
        for data in (pickle.dumps(Evil(trace)), buffer.getvalue()):
            (newest / name).write_bytes(data)
            manifest = json.loads((newest / "checkpoint.json").read_text())
            manifest["files"][name] = sha256(data)
            (newest / "checkpoint.json").write_bytes(seal(manifest))
            with pytest.raises(DamagedFile, match=name):
                run(tiny_config(), folder, device="cpu", resume=True, console=quiet())
            assert not trace.exists()


# --- disks


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2500k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("needs the right to mount a small disk")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_run_outlives_a_disk_that_is_full_for_a_while(small_disk, whole):
    filler, original = small_disk / "filler", Console.print
    console = quiet()
    seen: list[str] = []

    def watch(self, *things, **options):
        text = " ".join(map(str, things))
        seen.append(text)
        if "step 5 " in text:
            filler.write_bytes(bytes(1024 * int(shutil.disk_usage(small_disk).free / 1024)))
        if "step 10 " in text:
            filler.unlink()
        return original(self, *things, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Console, "print", watch)
        config = tiny_config(training={"log_every": 1, "keep": 2})
        run(config, small_disk / "run", device="cpu", console=console)
    told = "\n".join(seen)
    assert re.search(r"step 8 could not be saved .*No space left.*needs [\d.]+ MiB.*MiB free.*goes on", told)
    assert [line["step"] for line in read_log(small_disk / "run" / "log.jsonl")] == list(range(1, 13))  # none is lost
    ours, theirs = (safetensors.torch.load_file(f / "model.safetensors") for f in (small_disk / "run", whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_run_outlives_a_disk_that_becomes_read_only(small_disk):
    console, original = quiet(), Console.print

    def watch(self, *things, **options):
        text = " ".join(map(str, things))
        if "step 5 " in text:
            subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
        if "step 10 " in text:
            subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
        return original(self, *things, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Console, "print", watch)
        run(tiny_config(training={"log_every": 1, "keep": 2}), small_disk / "run", device="cpu", console=console)
    assert re.search(r"step 8 could not be saved .*Read-only", console.file.getvalue())
    assert [line["step"] for line in read_log(small_disk / "run" / "log.jsonl")] == list(range(1, 13))


# --- many ranks


def torchrun(count: int, folder: Path, *options: str, restarts: int = 0) -> list[str]:
    flags = ["--standalone", f"--nproc-per-node={count}", f"--max-restarts={restarts}", "--monitor-interval=0.1"]
    return [sys.executable, "-m", "torch.distributed.run", *flags, str(HERE / "ranked.py"), str(folder), *options]


def finished(program: list[str], *, code: int = 0) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    finished([sys.executable, str(HERE / "ranked.py"), str(folder)])
    return folder


def distance(a: Path, b: Path) -> float:
    ours, theirs = (safetensors.torch.load_file(folder / "model.safetensors") for folder in (a, b))
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


@pytest.mark.parametrize(
    ("count", "options"),
    [(2, []), (4, []), (2, ["accumulate=4"]), (2, ["shard_optimiser=true"]), (4, ["shard_optimiser=true"])],
)
def test_many_ranks_train_as_one(count, options, alone, tmp_path):
    folder = tmp_path / "run"
    finished(torchrun(count, folder, *options))
    ours, theirs = (read_log(one / "log.jsonl") for one in (folder, alone))
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert mine["gradient"] == pytest.approx(other["gradient"], rel=1e-4)
    assert distance(folder, alone) < 1e-5


def test_every_image_is_seen_once_an_epoch_by_one_rank(tmp_path):
    """1,797 digits, 112 steps of 16 and a bit: all ranks' images of the first 1,797 places are all of them once."""
    folder = tmp_path / "run"
    finished(torchrun(2, folder, "steps=113", "save_every=1000"))
    taken = {}
    for rank in range(2):
        for line in (tmp_path / f"run-images-{rank}").read_text().splitlines():
            step, *images = map(int, line.split())
            taken[step, rank] = images
    stream = [image for key in sorted(taken) for image in taken[key]]
    assert sorted(stream[:1797]) == list(range(1797))


def test_a_rank_with_a_nan_makes_all_skip_the_step(alone, tmp_path):
    folder = tmp_path / "run"
    finished(torchrun(2, folder, "nan=7"))
    lines = {line["step"]: line for line in read_log(folder / "log.jsonl")}
    assert lines[7]["skipped"] == 0 and 8 not in lines and lines[24]["skipped"] == 1
    assert 0 < distance(folder, alone) < 0.1
    assert all(torch.isfinite(one).all() for one in safetensors.torch.load_file(folder / "model.safetensors").values())


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pair") / "run"
    finished(torchrun(2, folder, "steps=60"))
    return folder


@pytest.mark.parametrize("number", range(20))
def test_a_killed_rank_is_restarted_and_the_run_ends_with_the_right_weights(number, pair, tmp_path):
    draw, folder = random.Random(number), tmp_path / "run"
    step = draw.randint(1, 30)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    program = torchrun(2, folder, "steps=60", restarts=3)
    with (tmp_path / "said").open("w") as said:
        group = subprocess.Popen(program, stdout=said, stderr=subprocess.STDOUT, env=environment)
        wait_for(lambda: last_step(folder) >= step, group)
        os.kill(draw.choice(children(group.pid)), signal.SIGKILL)
        assert group.wait(timeout=300) == 0, (tmp_path / "said").read_text()
    assert step < 4 or "going on from" in (tmp_path / "said").read_text()
    assert distance(folder, pair) == 0


@pytest.mark.parametrize("options", [[], ["shard_optimiser=true"]])
def test_ranks_go_on_and_go_back_together(options, pair, tmp_path):
    """A run on two ranks that is stopped, resumed and thrown back; with a sharded optimiser too."""
    for steps in (30, 60):
        finished(torchrun(2, tmp_path / "run", f"steps={steps}", 'curriculum="constant"', *options))
    finished(torchrun(2, tmp_path / "whole", "steps=60", 'curriculum="constant"', *options))
    assert distance(tmp_path / "run", tmp_path / "whole") == 0
    said = finished(torchrun(2, tmp_path / "back", "steps=60", "nan=30", "often=20", *options))
    assert "Going back to step" in said
    said = finished(torchrun(2, tmp_path / "anew", "steps=20", "nan=1", "often=15", "save_every=100", *options))
    assert "Going back to the start" in said


@pytest.mark.parametrize("everyone", [False, True])
def test_ranks_stop_together_when_asked(everyone, pair, tmp_path):
    """Whether torchrun alone gets the signal, or all its ranks too, as schedulers send it."""
    folder = tmp_path / "run"
    group = subprocess.Popen(
        torchrun(2, folder, "steps=2000"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    wait_for(lambda: last_step(folder) >= 5, group)
    for process in [*(children(group.pid) if everyone else []), group.pid]:
        os.kill(process, signal.SIGTERM)
    said, _ = group.communicate(timeout=120)
    assert "and saved" in said, said
    assert find_checkpoint(folder).manifest["step"] == last_step(folder)


def last_step(folder: Path) -> int:
    return max((line["step"] for line in read_log(folder / "log.jsonl")), default=0)


def wait_for(ready, group: subprocess.Popen) -> None:
    ends = time.monotonic() + 120
    while not ready():
        assert group.poll() is None and time.monotonic() < ends, "the ranks have not come so far"
        time.sleep(0.02)


def children(process: int) -> list[int]:
    """Processes that a process has started and that are ranks."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rsplit(")", 1)[1].split()[1])
            if parent == process and "ranked.py" in (path.parent / "cmdline").read_text():
                found.append(int(path.parent.name))
        except (OSError, IndexError):
            continue
    return sorted(found)
