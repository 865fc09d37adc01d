"""The command line as a person meets it: real processes, exit codes, messages."""

import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from helpers import tiny_config
from PIL import Image

from ict import sampling
from ict.cli import app
from ict.display import DataProgress
from ict.frontpage import COMMANDS
from ict.model import ModelSpec, build_model, pack_model
from ict.reading import ConfigError
from ict.recipes import to_toml

ROOT = Path(__file__).parents[1]


def ict(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess:
    """`python -m ict` from the bare checkout."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "ict", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    (folder / "tiny.toml").write_text(to_toml(tiny_config()))
    done = ict("train", "tiny.toml", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "N = 3 → 5 (step 4) → 9 (step 8)" in done.stdout
    assert "step 12 · N 9 · loss" in done.stdout and "images/s" in done.stdout and "left" in done.stdout
    assert "warning: each of the 3 values of N gets only about 4 steps" in done.stdout
    assert (folder / "runs" / "tiny" / "report.html").exists()
    return folder / "runs" / "tiny"


def test_help_lists_every_command():
    page = ict("--help")
    assert page.returncode == 0 and ict().stdout == page.stdout
    registered = {command.name or command.callback.__name__ for command in app.registered_commands}
    registered |= {group.name for group in app.registered_groups}
    assert registered == set(COMMANDS)
    assert all(f"  {name} " in page.stdout for name in COMMANDS)


@pytest.mark.parametrize("arguments", [("--help",), ("recipes",), ("train", "--help"), ("train", "nothing")])
def test_light_commands_do_not_load_torch(arguments):
    code = (
        "import sys, atexit; sys.argv = ['ict', *sys.argv[1:]]\n"
        "atexit.register(lambda: print('TORCH' if 'torch' in sys.modules else 'LIGHT', file=sys.stderr))\n"
        "from ict.frontpage import main; sys.exit(main())"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment)
    assert done.stderr.endswith("LIGHT\n")


def test_help_takes_at_most_five_times_as_long_as_python_itself():
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}

    def best(*arguments):
        times = []
        for _ in range(7):
            begun = time.perf_counter()
            subprocess.run([sys.executable, *arguments], env=environment, check=True, capture_output=True)
            times.append(time.perf_counter() - begun)
        return min(times)

    assert best("-m", "ict", "--help") <= 5 * best("-c", "pass")


def test_version():
    import ict as package

    assert ict("--version").stdout == f"ict {package.__version__}\n"


def test_sample_writes_a_sheet(trained, tmp_path):
    done = ict("sample", trained, "-n", 6, "--columns", 3, "--scale", 2, "--out", tmp_path / "a.png", "--steps", 2)
    assert done.returncode == 0 and "6 images" in done.stdout
    assert Image.open(tmp_path / "a.png").size == (3 * 18 - 2, 2 * 18 - 2)


def test_sample_writes_single_files_that_do_not_depend_on_the_batch(trained, tmp_path):
    for folder, batch in (("a", 2), ("b", 100)):
        out = tmp_path / folder
        assert ict("sample", trained, "-n", 5, "--out", out, "--batch", batch, "--label", 3).returncode == 0
        assert sorted(path.name for path in out.iterdir()) == [f"0000{i}.png" for i in range(5)]
    for i in range(5):
        a, b = (Image.open(tmp_path / folder / f"0000{i}.png") for folder in "ab")
        assert a.size == (8, 8) and a.tobytes() == b.tobytes()


def test_sample_takes_classes_in_turn(tmp_path):
    spec = ModelSpec.from_config(tiny_config(), tuple("0123456789"))
    model = build_model(spec)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    (tmp_path / "m.safetensors").write_bytes(pack_model(spec, model.state_dict(), {}))
    for folder, label in (("both", "3, 5"), ("three", "3"), ("five", "5")):
        assert (
            ict("sample", tmp_path / "m.safetensors", "-n", 4, "--out", tmp_path / folder, "--label", label).returncode
            == 0
        )
    three, both, five = ([p.read_bytes() for p in sorted((tmp_path / f).iterdir())] for f in ("three", "both", "five"))
    assert both == [three[0], five[1], three[2], five[3]] != three


def test_info_of_recipe_model_and_run(trained):
    recipe = ict("info", "digits", "--set", "training.batch=77").stdout
    assert "639,649" in recipe and "→ 161 (step 1,600)" in recipe and "batch 77" in recipe
    model = ict("info", trained / "model.safetensors").stdout
    assert "step 12" in model and "classes" in model
    assert "tiny" in ict("info", trained).stdout
    paper = ict("info", "imagenet64-ict", "--tflops", 400).stdout
    assert "282,168,003" in paper and "→ 1281 (step 700,000)" in paper and "83.2 days at 400 TFLOP/s" in paper


def test_recipes_are_listed():
    assert "digits" in ict("recipes").stdout


def test_report_can_be_written_again(trained):
    (trained / "report.html").unlink()
    assert ict("report", trained).returncode == 0
    assert (trained / "report.html").exists()


def test_a_budget_of_time(trained, tmp_path):
    done = ict("train", trained, "--out", tmp_path / "timed", "--budget", "3s", "--seed", 4)
    assert done.returncode == 0, done.stderr
    assert "N = 3 → 5 (1 s) → 9 (2 s)" in done.stdout
    assert 'budget = "3s"' in (tmp_path / "timed" / "recipe.toml").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "digit"), "did you mean 'digits'"),
        (("train", "digits", "--set", "training.lrr=1"), "did you mean 'lr'"),
        (("train", "digits", "--set", "objective.s0=500"), "objective.s0 = 500 is above objective.s1 = 160"),
        (("train", "digits", "--set", "noise.sigma_min=90"), "must be below noise.sigma_max"),
        (("train", "digits", "--set", "net.multipliers=[1,1,1,1,1]"), "cannot be halved 4 times"),
        (("train", "digits", "--set", "net.kind=vit"), "choose from unet"),
        (("train", "digits", "--set", "data.classes=3"), "has 10 classes"),
        (("train", "digits", "--steps", 3, "--budget", "3m"), "exclude each other"),
        (("train", "digits", "--budget", "soon"), "--budget = 'soon'"),
        (("train", "digits", "--device", "tpu9"), "--device tpu9 cannot be used here"),
        (("train", "digits", "--resume"), "no checkpoint"),
        (("train", "digits", "--resume", "--overwrite"), "exclude each other"),
        (("train", "digits", "--resume=maybe"), "--resume, or --resume auto"),
        (("info", "digits", "--set", "objective.kind=foo"), "choose from ict"),
        (("train", "digits", "--set", "lr=1"), "write training.lr=1"),
        (("train", "digits", "--set", "kind=ect"), "write net.kind or objective.kind=ect"),
        (("train", "digits", "--set", "steps=4"), "write training.steps or evaluation.steps=4"),
        (("data", "inspect", "digits", "--out", "sheet.jpg"), "the sheet is a .png"),
        (("sample", "nowhere"), "there is no model at nowhere"),
        (("sample", "."), "holds no model"),
        (("info", "nowhere"), "no recipe"),
        (("report", "nowhere"), "recipe.toml"),
        (("train", "cifar10-ict"), "set data.path"),
        (("info", "digits", "--tflops", 0), "--tflops 0"),
        (("train", "digits", "--set", "objective.distance=ssim"), "choose from pseudo_huber"),
        (("train", "digits", "--set", "training.lr_schedule=warm"), "choose from constant"),
        (("train", "digits", "--set", "training.lr=1" + "0" * 400), "too large"),
        (("train", "digits", "--set", "training.batch=100000000000"), "training.batch"),
        (("train", "digits", "--set", "objective.p_mean=1000", "--set", "objective.p_std=0.1"), "put no weight"),
        (("train", "digits", "--set", "name=2024-01-01"), "must be a text, not a date"),
        (("train", "digits", "--set", "a=1\nb=2"), "section.key=value"),
        (("train", "digits", "--out", ""), "--out"),
        (("paint",), "No such command"),
        (("train", "digits", "--setp", 1), "No such option"),
    ],
)
def test_user_errors_end_with_a_message_and_code_2(arguments, message, tmp_path):
    done = ict(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr
    assert not any(tmp_path.rglob("*.toml"))  # nothing was begun


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--label", "cat"), "no class is called 'cat'"),
        (("--label", "²"), "no class is called"),
        (("--label", ""), "no class is called"),
        (("--sigmas", ""), "--sigmas"),
        (("-n", 10**12), "at most 10 million"),
        (("--scale", 100000), "too large"),
        (("--sigmas", "80,x"), "--sigmas 80,x"),
        (("--sigmas", "80,99"), "falling"),
        (("--steps", 0), "steps = 0"),
        (("-n", 0), "at least 1 image"),
        (("--ema", 0.5), "has the rates 0.9, 0.99"),
        (("--scale", 0), "--scale 0"),
        (("--steps", 10**9), "use 1 to 1000"),
        (("--steps", 2, "--sigmas", "80,0.8"), "--steps and --sigmas exclude each other"),
        (("--label", "9" * 5000), "no class is called"),
    ],
)
def test_sample_refuses_what_it_cannot_do(arguments, message, trained, tmp_path):
    done = ict("sample", trained, "--out", tmp_path / "x.png", *arguments)
    assert done.returncode == 2 and message in done.stderr and not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_refused_before_drawing(trained, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    monkeypatch.setattr("ict.sampling.sample_numbers", None)  # nothing is drawn
    for out, scale, message in (
        ("file", 1, "is a file: give a folder, or a .png"),
        ("folder.png", 1, "is a folder: name a file"),
        ("file/b.png", 1, "file is not a folder"),
        ("dangling/b.png", 1, "dangling is not a folder"),
        ("new/deep/a.png", 100_000, "too large"),
        ("/proc/x.png", 1, "cannot be written in /proc"),
        ("/proc/x", 1, "cannot be written in /proc"),
    ):
        with pytest.raises(ConfigError, match=message):
            app(["sample", str(trained), "--out", str(tmp_path / out), "--scale", str(scale)], standalone_mode=False)
    with pytest.raises(ConfigError, match="cannot be written in /proc"):
        app(["tune", str(trained), "--write", "/proc/x.safetensors"], standalone_mode=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "file", "folder.png"]


def test_single_files_are_written_as_they_are_drawn(trained, tmp_path, monkeypatch, capsys):
    """What is there when it is stopped stays, and the same command draws the rest."""
    real, calls = sampling.sample_numbers, []

    def tired(*arguments, **options):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    arguments = ["sample", str(trained), "-n", "7", "--batch", "3", "--out", str(tmp_path / "some")]
    with monkeypatch.context() as patch:
        patch.setattr(sampling, "sample_numbers", tired)
        assert app(arguments, standalone_mode=False) == 130
    assert "stopped: 6 of 7 images are in" in capsys.readouterr().err
    first = {path.name: path.read_bytes() for path in (tmp_path / "some").iterdir()}
    assert sorted(first) == [f"0000{i}.png" for i in range(6)]
    calls.clear()
    with monkeypatch.context() as patch:
        patch.setattr(sampling, "sample_numbers", tired)
        app([*arguments, "--seed", "1"], standalone_mode=False)
    mixed = [path.name for path in (tmp_path / "some").iterdir() if path.read_bytes() == first.get(path.name)]
    assert not mixed  # nothing of the first draw is left among the second
    app(arguments, standalone_mode=False)
    again = {path.name: path.read_bytes() for path in (tmp_path / "some").iterdir()}
    assert len(again) == 7 and again.items() > first.items()


def test_long_work_without_a_terminal_says_a_line_at_times(monkeypatch, capsys):
    monkeypatch.setattr("ict.display.QUIET", 0.0)
    with DataProgress("drawing", total=2000) as progress:
        progress(1500, 2000)
    with DataProgress("drawing", total=2000, quiet=True) as progress:
        progress(1500, 2000)
    assert capsys.readouterr().err == "drawing: 1,500 of 2,000 (75%)\n"


def with_names(path: Path, names: tuple[str, ...]) -> Path:
    """A model file whose classes are called so."""
    spec = ModelSpec.from_config(tiny_config(data={"classes": len(names)}), names)
    path.write_bytes(pack_model(spec, build_model(spec).state_dict(), {}))
    return path


def test_a_class_with_a_comma_in_its_name(tmp_path):
    model = with_names(tmp_path / "m.safetensors", ("a,b", "c"))
    for label in ("a,b", "c", "0,1"):
        assert ict("sample", model, "-n", 2, "--label", label, "--out", tmp_path / "x.png").returncode == 0


def test_names_in_a_file_do_not_command_the_terminal(tmp_path):
    model = with_names(tmp_path / "m.safetensors", ("\x1b[2J\x07evil", "c"))
    done = ict("sample", model, "--label", "zz", "--out", tmp_path / "x.png")
    assert done.returncode == 2 and "evil" in done.stderr and "\x1b" not in done.stderr and "\x07" not in done.stderr


def test_a_header_without_end_is_refused(tmp_path):
    deep = {"ict": "[" * 100_000}
    safetensors.torch.save_file({"a": torch.zeros(1)}, tmp_path / "m.safetensors", metadata=deep)
    done = ict("sample", tmp_path / "m.safetensors", "--out", tmp_path / "x.png")
    assert done.returncode == 2 and "its header cannot be read" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("report", "nowhere"), "nowhere is not the folder of a run"),
        (("info", "nowhere.safetensors"), "there is no model at nowhere.safetensors"),
        (("sample", "recipe.toml"), "give a model that `ict train` wrote, or a run's folder"),
        (("eval", ".", "--steps", "2", "--sigmas", "80,0.8"), "--steps and --sigmas exclude each other"),
        (("eval", ".", "--weights", "nowhere", "--samples", "10"), "--weights is for other features"),
        (("sample", ".", "--out", "x.svg"), "written as .png"),
    ],
)
def test_errors_name_what_is_wrong(arguments, message, trained):
    done = ict(*arguments, cwd=trained)
    assert done.returncode == 2 and message in done.stderr, done.stderr


def test_pictures_are_png(trained, tmp_path):
    done = ict("sample", trained, "--out", tmp_path / "x.jpg")
    assert done.returncode == 2 and "written as .png" in done.stderr and not list(tmp_path.iterdir())


def test_samples_do_not_mix_with_other_files(trained, tmp_path):
    """A folder is scored as a whole; the same command again is no other file."""
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / ".hidden").touch()
    for count, code in ((3, 0), (3, 0), (4, 0), (2, 2)):
        done = ict("sample", trained, "-n", count, "--out", tmp_path / "some")
        assert done.returncode == code, done.stderr
    assert "holds other files (00002.png, 00003.png): give an empty folder" in done.stderr


def test_a_reader_that_goes_away_does_not_stop_a_run(trained, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = f"{sys.executable} -m ict train {trained} --out {tmp_path / 'run'} --set training.log_every=1 | head -2"
    subprocess.run(command, shell=True, env=environment, capture_output=True, check=True)
    assert (tmp_path / "run" / "report.html").exists()


def test_a_terminal_without_our_characters(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-m", "ict", "info", "digits"], capture_output=True, env=environment)
    assert done.returncode == 0 and b"639,649" in done.stdout


def test_the_recipe_of_a_run_belongs_to_that_run(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "elsewhere")
    done = ict("train", tmp_path / "elsewhere" / "recipe.toml", "--resume", "--steps", 13, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "elsewhere" / "checkpoints" / "step-00000013").is_dir()


def test_a_folder_of_images_from_inspection_to_samples(trained, tmp_path, monkeypatch):
    monkeypatch.setenv("ICT_CACHE", str(tmp_path / "cache"))
    for i in range(12):
        path = tmp_path / "pile" / ("odd" if i % 2 else "even") / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((20 + i, 30), 60).convert("RGB").save(path)
    (tmp_path / "pile" / "odd" / "broken.png").write_text("text")
    (tmp_path / "pile" / "odd" / "empty.png").write_bytes(b"")
    seen = ict("data", "inspect", tmp_path / "pile", "--size", 16, "--out", tmp_path / "sheet.png")
    assert seen.returncode == 0, seen.stderr
    assert "even 6, odd 6" in seen.stdout and "odd/broken.png" in seen.stdout
    assert seen.stdout.count("not an image of a known format") == seen.stdout.count("empty file") == 2  # sum, and file
    assert Image.open(tmp_path / "sheet.png").mode == "RGB"
    ready = ict("data", "prepare", tmp_path / "pile", "--size", 16)
    assert "12 images, 2 refused" in ready.stdout
    changes = [f"data.source={tmp_path / 'pile'}", "data.image_size=16", "data.channels=3", "data.classes=2"]
    options = [word for change in [*changes, "net.attention=[]"] for word in ("--set", change)]
    done = ict("train", trained, "--out", tmp_path / "run", "--steps", 2, *options)
    assert done.returncode == 0, done.stderr
    drawn = ict("sample", tmp_path / "run", "-n", 2, "--label", "odd", "--out", tmp_path / "s.png")
    assert drawn.returncode == 0, drawn.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("data", "inspect", "nowhere"), "there is no nowhere"),
        (("data", "prepare", ".", "--fit", "stretch"), 'use "crop" or "pad"'),
        (("data", "prepare", "."), "no image was found"),
        (("data", "prepare", ".", "--size", 2), "data.image_size = 2"),
        (("data", "get", "imagenet"), "'imagenet' cannot be brought: choose from cifar10"),
        (("data", "get", "cifar10", "--from", "http://127.0.0.1:1/x"), "cannot be brought"),
        (("data", "inspect", "cifar10"), "ict data get cifar10"),
        (("data", "inspect", "hf:./nothing"), "cannot be opened"),
        (("train", "digits", "--set", "data.source=./nowhere"), "there is no nowhere"),
    ],
)
def test_data_errors(arguments, message, tmp_path, monkeypatch):
    monkeypatch.setenv("ICT_CACHE", str(tmp_path / "cache"))
    done = ict(*arguments, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_a_set_is_brought_checked_and_found_without_a_path(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from ict.data import cifar10, load_images
    from ict.download import Download, checksum
    from ict.files import sha256

    monkeypatch.setenv("ICT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cifar10, "RECORDS", 4)
    contents = {name: bytes([7, *([i] * 3072)] * 4) for i, name in enumerate(cifar10.CHECKSUMS)}
    with tarfile.open(tmp_path / "set.tar.gz", "w:gz") as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    place = tmp_path / "set.tar.gz"
    get = ("data", "get", "cifar10", "--from", place.as_uri())
    monkeypatch.setattr(
        cifar10, "ARCHIVE", Download(url="file:///nowhere", sha256=checksum(place), size=place.stat().st_size)
    )
    refused = CliRunner().invoke(app, get)
    assert isinstance(refused.exception, ConfigError) and "data_batch_1 is missing or" in str(refused.exception)
    monkeypatch.setattr(cifar10, "CHECKSUMS", {name: sha256(content) for name, content in contents.items()})
    for _ in range(2):  # the second time it is there
        done = CliRunner().invoke(app, get)
        assert done.exit_code == 0 and "60,000 images, checked" in done.stdout, done.output
        place.unlink(missing_ok=True)
    config = tiny_config(data={"source": "cifar10", "image_size": 32, "channels": 3})
    assert load_images(config.data).pixels[:, 0, 0, 0].tolist() == [i for i in range(5) for _ in range(4)]


def test_a_named_set_is_inspected_as_it_is():
    seen = ict("data", "inspect", "digits")
    assert seen.returncode == 0 and "1,797" in seen.stdout and "8×8 pixels, grey" in seen.stdout
    assert "needs no preparing" in ict("data", "prepare", "digits").stdout


def test_a_damaged_model_file(trained, tmp_path):
    (tmp_path / "m.safetensors").write_bytes((trained / "model.safetensors").read_bytes()[:2000])
    for command in ("sample", "info"):
        done = ict(command, tmp_path / "m.safetensors")
        assert done.returncode == 2 and "damaged" in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_a_signal_saves_and_says_how_to_go_on(number, code, trained, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "ict", "train", trained, "--out", tmp_path / "run", "--steps", "100000"]
    command += ["--set", "training.log_every=1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    for line in process.stdout:
        if "step 5 " in line:
            break
    process.send_signal(number)
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert "and saved; go on with: ict train" in rest and "Traceback" not in errors
    more = ict("train", tmp_path / "run", "--resume", *(["auto"] if code == 143 else []), "--steps", 20)
    assert more.returncode == 0 and "going on from" in more.stdout
