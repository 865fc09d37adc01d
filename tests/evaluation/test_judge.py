"""Judging models and images: the features of digits, the cache, records, the search of noise levels, and bad input."""

import io
import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import tiny_config
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

import ict.evaluation.judge as judge_module
from ict.cli import app
from ict.data import Images, load_images
from ict.evaluation.features import open_features
from ict.evaluation.judge import Judge, draw, look_at_real, summary
from ict.evaluation.records import IDENTITY, add_record, main_scores, published_rows, read_records, with_spread
from ict.evaluation.tune import Ladder, Search, coarse, tune
from ict.experiment import run
from ict.experiment.parts import Run
from ict.model import ModelSpec, build_model
from ict.pixels import to_uint8
from ict.ranks import ALONE
from ict.reading import ConfigError
from ict.sampling import Generator, check_ladder, load
from ict.training.ema import WeightAverage
from ict.training.guard import Guard

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def digits() -> Images:
    return load_images(tiny_config().data)


@pytest.fixture(scope="module")
def net():
    return open_features("digits", weights=None, device=CPU)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("judge") / "run"
    run(tiny_config(), folder, device="cpu", console=Console(file=io.StringIO()))
    return folder


def untrained(classes: bool = True) -> Generator:
    config = tiny_config() if classes else tiny_config(data={"classes": 0})
    spec = ModelSpec.from_config(config, tuple("0123456789"))
    model = build_model(spec)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return Generator(model, spec, {"step": 3, "ema": 0.9})


def test_the_digit_features_read_digits(digits, net):
    logits = net(digits.pixels)[1]
    assert (logits.argmax(dim=1) == digits.labels)[1200:].double().mean() > 0.98  # those it was not fitted to
    with pytest.raises(ConfigError, match="grey images of 8×8"):
        net(torch.zeros(1, 3, 8, 8, dtype=torch.uint8))


def test_real_images_score_best_and_noise_worst(digits, net):
    judge = Judge.of(digits, net, samples=500)
    noise = Images(pixels=torch.randint(0, 256, (500, 1, 8, 8), dtype=torch.uint8), labels=torch.zeros(500).long(),
                   class_names=digits.class_names)  # fmt: skip
    same, none = judge.judge_images(digits), judge.judge_images(noise)
    assert same["FD-digits"] < 1e-6 and same["precision"] == same["recall"] == 1 and same["copies"] == 1
    assert none["FD-digits"] > 100 and none["precision"] < 0.1 and none["recall"] < 0.1
    assert "FID" not in same and "IS" not in same


def test_the_features_of_a_set_are_kept_by_its_checksum(digits, net, monkeypatch, tmp_path):
    first = look_at_real(digits, net)
    monkeypatch.setattr(judge_module, "look", lambda *_, **__: pytest.fail("looked again"))
    again = look_at_real(digits, net)
    assert torch.equal(first.features, again.features) and torch.equal(
        first.moments.covariance, again.moments.covariance
    )
    other = Images(pixels=digits.pixels.flip(-1), labels=digits.labels, class_names=digits.class_names)
    with pytest.raises(pytest.fail.Exception):
        look_at_real(other, net)
    with pytest.raises(pytest.fail.Exception):
        look_at_real(digits, replace(net, checksum="another"))
    (stored,) = (tmp_path / "cache" / "features").iterdir()
    stored.write_bytes(stored.read_bytes()[:-9])
    with pytest.raises(pytest.fail.Exception):  # damaged: made again
        look_at_real(digits, net)


def test_of_a_large_set_features_from_all_over_are_kept(digits, net, monkeypatch):
    whole = look_at_real(digits, net)
    monkeypatch.setattr(judge_module, "KEPT", 500)
    some = look_at_real(digits, net, batch=101)
    assert torch.allclose(some.features, whole.features[::4], atol=1e-5) and len(some.features) <= 500
    assert some.moments.count == 1797 and torch.allclose(some.moments.mean, whole.moments.mean)


def test_samples_are_those_of_the_generator(digits, net):
    generator = untrained()
    judge = Judge.of(digits, net, samples=300)
    labels = judge.labels(generator, 300, seed=7)
    assert labels is not None
    drawn = torch.cat(list(draw(generator, labels, generator.ladder(2), 300, 7, 64)))
    assert torch.equal(drawn, to_uint8(generator.sample(300, steps=2, seed=7, label=labels.tolist(), batch=300)))


def test_classes_are_drawn_as_often_as_they_are_and_independently(digits, net):
    """Of an uneven set. Dealt out in proportion, numbers of a class would not vary, and KID would be biased."""
    uneven = Images(pixels=digits.pixels, labels=digits.labels.clamp(max=2), class_names=tuple("0123456789"))
    judge, generator = Judge.of(uneven, net, samples=300), untrained()
    counts = torch.stack(
        [torch.bincount(judge.labels(generator, 1000, seed=seed), minlength=10) for seed in range(100)]  # type: ignore
    ).double()
    share = torch.bincount(uneven.labels, minlength=10) / 1797
    deviation = (1000 * share * (1 - share)).sqrt()  # of a binomial
    assert ((counts.mean(dim=0) - 1000 * share).abs() <= 4 * deviation / 10).all()
    assert (counts.std(dim=0)[:3] / deviation[:3] - 1).abs().max() < 0.3


def test_what_cannot_be_judged(digits, net):
    with pytest.raises(ConfigError, match="64 samples are too few"):
        Judge.of(digits, net, samples=64)
    judge = Judge.of(digits, net, samples=100)
    few = Images(pixels=digits.pixels[:50], labels=digits.labels[:50], class_names=digits.class_names)
    with pytest.raises(ConfigError, match="50 real images are too few"):
        Judge.of(few, net, samples=100)
    large = Images(
        pixels=torch.zeros(99, 3, 16, 16, dtype=torch.uint8), labels=torch.zeros(99).long(), class_names=("",)
    )
    with pytest.raises(ConfigError, match="compare like with like"):
        judge.judge_images(large)
    generator = untrained()
    next(iter(generator.model.parameters())).data.fill_(torch.nan)
    with pytest.raises(ConfigError, match="not finite"):
        judge.judge(generator, samples=100)
    other = replace(untrained().spec, class_names=tuple("abcdefghij"))
    with pytest.raises(ConfigError, match="its own set"):
        judge.judge(Generator(build_model(other), other), samples=100)


def test_repeats_give_mean_and_deviation():
    scores = [{"FID": 1.0, "KID": 0.1, "KID deviation": 0.01}, {"FID": 3.0, "KID": 0.1, "KID deviation": 0.03}]
    assert summary(scores[:1]) == scores[0]
    found = summary(scores)
    assert found["FID"] == 2 and found["FID over seeds"] == pytest.approx(2**0.5) and found["KID deviation"] == 0.02
    assert main_scores(found) == {"FID": 2.0, "KID": 0.1}
    assert with_spread("FID", found) == "2.00 ± 1.41" and with_spread("IS", found) == ""


# --- records


def test_records_are_added_and_replaced(tmp_path):
    path = tmp_path / "eval.json"
    record = {"model": "m", "run": "r", "step": 1, "ema": 0.9, "sigmas": [80.0], "samples": 9, "seeds": [0],
              "features": "digits", "weights": "w", "real": {}, "scores": {"FD-digits": 5.0}}  # fmt: skip
    add_record(path, record)
    add_record(path, {**record, "step": 2})
    add_record(path, {**record, "scores": {"FD-digits": 4.0}})
    assert [(r["step"], r["scores"]["FD-digits"]) for r in read_records(path)] == [(2, 5.0), (1, 4.0)]
    for damaged in (b"", b"[]", b'{"format": "ict-eval-1"}', b'{"format": "other", "records": []}',
                    b'{"format": "ict-eval-1", "records": [{}]}'):  # fmt: skip
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match="move it away"):
            add_record(path, record)
        assert path.read_bytes() == damaged


def test_published_rows_stand_only_beside_the_same_scores():
    assert {name for name, _, _ in published_rows("cifar10", ["FID", "KID"])} >= {"iCT", "iCT-deep"}
    assert published_rows("cifar10", ["FD-dinov2", "precision"]) == [] == published_rows("digits", ["FD-digits"])
    assert ("iCT-deep", 2, {"FID": 2.24, "IS": 9.89}) in published_rows("cifar10", ["FID"])


# --- the search


@pytest.mark.parametrize("valley", [1, 2, 300, 640, 1000, 1278])
def test_the_search_finds_the_valley_and_gives_the_best_it_has_seen(valley):
    asked = []

    def function(place: int) -> float:
        assert place not in asked  # each is computed once
        asked.append(place)
        return abs(place - valley) + 1.0

    low, middle, high = coarse(Search(function), 1280)
    assert low <= valley <= high and low <= middle <= high and len(asked) == 9
    asked.clear()
    search = Search(function)
    best = search.thirds(low, high, stop=8)
    assert search.tried[best] == min(search.tried.values()) and abs(best - valley) <= 8


def test_the_search_does_not_return_a_stale_value():
    """A better value met early, and left behind by noise, is the answer."""
    values = {53: 0.1}
    search = Search(lambda place: values.get(place, 1 + abs(place - 400) / 400))
    search.tried.clear()
    search(53)
    assert search.thirds(1, 1279, stop=8) == 53


def test_a_step_of_the_ladder_is_a_step_of_the_sampler(digits, net):
    generator, judge = untrained(), Judge.of(digits, net, samples=100)
    ladder = Ladder(generator, judge, samples=100, seed=3, batch=33)
    ladder.settle(2.0)
    ours = to_uint8(torch.cat(list(ladder.call(0.5, 100))))
    labels = judge.labels(generator, 100, seed=3)
    assert labels is not None
    theirs = to_uint8(generator.sample(100, sigmas=[80.0, 2.0, 0.5], seed=3, label=labels.tolist()))
    assert (ours.int() - theirs.int()).abs().max() <= 1
    scored = ladder.score(0.5, 100)
    assert scored == pytest.approx(
        judge.judge(generator, samples=100, sigmas=[80.0, 2.0, 0.5], seed=3)["FD-digits"], rel=1e-3
    )


def test_tuning_many_steps_stays_on_the_grid(digits, net, monkeypatch):
    """A score that always prefers the lowest level leaves nothing for the next step: that is said."""
    generator, judge = untrained(), Judge.of(digits, net, samples=70)
    monkeypatch.setattr(Ladder, "score", lambda self, sigma, samples: sigma)
    with pytest.raises(ConfigError, match="no level is left below"):
        tune(generator, judge, steps=6, samples=70, first=70, stop=1)
    monkeypatch.setattr(Ladder, "score", lambda self, sigma, samples: -sigma)
    sigmas, _ = tune(generator, judge, steps=4, samples=70, first=70, stop=1)
    check_ladder(sigmas, generator.spec)


def test_tuning_is_never_worse_than_what_it_has_seen(digits, net, monkeypatch):
    rng = np.random.default_rng(0)
    generator, judge, said = untrained(), Judge.of(digits, net, samples=70), []
    monkeypatch.setattr(Ladder, "score", lambda self, sigma, samples: float(rng.normal()))
    _, score = tune(generator, judge, steps=2, samples=70, first=70, say=lambda *line: said.append(line))
    assert score == min(found for _, found, _ in said)


def test_tuning_gives_falling_levels_and_their_score(digits, net):
    generator, judge, said = untrained(), Judge.of(digits, net, samples=80), []
    sigmas, score = tune(generator, judge, steps=3, samples=80, first=70, stop=200, say=lambda *line: said.append(line))
    assert len(sigmas) == 3 and sigmas[0] == 80 and sigmas == sorted(sigmas, reverse=True)
    assert score == min(found for sigma, found, count in said if count == 80 and sigma == sigmas[2])
    with pytest.raises(ConfigError, match="use 2 or more"):
        tune(generator, judge, steps=1, samples=80, first=70)


# --- the commands


def invoke(*arguments: object):
    done = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})
    return done, str(done.exception) if done.exception else done.output


def test_scoring_a_run(trained, tmp_path):
    done, text = invoke("eval", trained, "--steps", "1,2", "--samples", 200, "--repeats", 2)
    assert done.exit_code == 0, text
    assert (
        "FD" in text and "precision" in text and "200 samples against 1,797 real images" in text and "FID" not in text
    )
    records = read_records(trained / "eval.json")
    assert [len(record["sigmas"]) for record in records] == [1, 2] and records[0]["seeds"] == [0, 1]
    assert records[0]["step"] == 12 and records[0]["scores"]["FD-digits over seeds"] > 0
    page = (trained / "report.html").read_text()
    assert "<h2>Scores</h2>" in page and "200 samples against 1,797 images of digits, by digits" in page
    done, text = invoke("eval", trained, "--samples", 100, "--checkpoints", "--ema", "all")
    assert done.exit_code == 0, text
    rows = [record for record in read_records(trained / "eval.json") if record["samples"] == 100]
    assert {(r["step"], r["ema"]) for r in rows} == {(s, e) for s in (4, 8, 12) for e in (0.9, 0.99)}
    page = (trained / "report.html").read_text()  # a curve over the checkpoints for each average
    assert "checkpoint: EMA 0.9, σ = 80" in page and "checkpoint: EMA 0.99, σ = 80" in page


def test_a_page_shows_the_runs_own_images_whatever_it_was_compared_with(trained, tmp_path, digits):
    for i, (image, label) in enumerate(zip(digits.pixels[:300], digits.labels[:300], strict=True)):
        place = tmp_path / "other" / str(int(label)) / f"{i:03d}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(255 - image[0].numpy()).save(place)
    invoke("eval", trained, "--samples", 150)
    before = (trained / "report.html").read_text().split("<h2>Are they copies?</h2>")[1].split("<h2>")[0]
    done, text = invoke("eval", trained, "--samples", 150, "--data", tmp_path / "other", "--features", "digits")
    assert done.exit_code == 0, text
    page = (trained / "report.html").read_text()
    assert page.split("<h2>Are they copies?</h2>")[1].split("<h2>")[0] == before
    assert "150 samples against 300 images" in page and "150 samples against 1,797 images" in page  # two tables


def test_all_averages_of_a_run_whose_oldest_checkpoint_is_damaged(trained, tmp_path):
    import shutil

    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "step-00000004" / "ema-0.99.safetensors").write_bytes(b"")
    done, text = invoke("eval", tmp_path / "run", "--samples", 100, "--ema", "all", "--out", tmp_path / "e.json")
    assert done.exit_code == 0, text


def test_a_damaged_file_of_scores_is_said_before_anything_is_drawn(trained, tmp_path, monkeypatch):
    (tmp_path / "e.json").write_text("{")
    monkeypatch.setattr("ict.evaluation.command.open_judge", lambda *_, **__: pytest.fail("began"))
    assert "move it away" in invoke("eval", trained, "--out", tmp_path / "e.json")[1]


def test_records_of_two_processes_are_all_kept(tmp_path):
    program = (
        "import sys; from pathlib import Path; from ict.evaluation.records import IDENTITY, add_record\n"
        "for i in range(10): add_record(Path(sys.argv[1]), {**dict.fromkeys(IDENTITY), 'step': (sys.argv[2], i),"
        " 'scores': {}})"
    )
    path = tmp_path / "eval.json"
    both = [subprocess.Popen([sys.executable, "-c", program, path, name]) for name in "ab"]
    assert [one.wait() for one in both] == [0, 0] and len(read_records(path)) == 20


def test_scoring_saved_images(tmp_path, digits):
    (tmp_path / "images").mkdir()
    for i, image in enumerate(digits.pixels[:100]):
        Image.fromarray(image[0].numpy()).save(tmp_path / "images" / f"{i:03d}.png")
    done, text = invoke("eval", "--images", tmp_path / "images", "--data", "digits", "--out", tmp_path / "e.json")
    assert done.exit_code == 0, text
    scores = json.loads((tmp_path / "e.json").read_text())["records"][0]["scores"]
    assert scores["precision"] == 1 and scores["FD-digits"] < 20
    Image.new("L", (16, 16)).save(tmp_path / "images" / "large.png")
    done, text = invoke("eval", "--images", tmp_path / "images", "--data", "digits")
    assert "8×8, 16×16 pixels" in text and "a score of resized images means nothing" in text


def test_tuning_a_run_and_writing_the_model(trained, tmp_path):
    done, text = invoke(
        "tune", trained, "--samples", 90, "--first", 70, "--ema", "all", "--write", tmp_path / "m.safetensors"
    )
    assert done.exit_code == 0, text
    assert "best: EMA 0.9" in text and "--sigmas 80," in text
    generator = load(tmp_path / "m.safetensors")
    sigma = float(text.split("--sigmas 80,")[1].split()[0])
    assert generator.spec.sigma_mid == pytest.approx(sigma, abs=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("eval",), "give a model to score, or --images"),
        (("eval", "RUN", "--images", "x"), "give a model to score, or --images"),
        (("eval", "RUN", "--features", "inception", "--samples", 3000), "ict data get inception"),
        (("eval", "RUN", "--features", "fid"), "--features = 'fid' is not known"),
        (("eval", "RUN", "--samples", 10), "10 samples are too few"),
        (("eval", "RUN", "--steps", "0"), "--steps 0: use 1 to 1000"),
        (("eval", "RUN", "--steps", "1.5"), "--steps 1.5: give whole numbers"),
        (("eval", "RUN", "--steps", "inf"), "--steps inf: give whole numbers"),
        (("eval", "RUN", "--samples", 10**12), "at most 10 million"),
        (("eval", "RUN", "--seed", "-1"), "--seed -1: use"),
        (("eval", "RUN", "--split", "test"), "not divided"),
        (("eval", "RUN", "--out", "RUN"), "is a folder"),
        (("eval", "--images", "x", "--data", "digits", "--checkpoints"), "are for models"),
        (("tune", "RUN", "--batch", "0"), "--batch 0: use at least 1"),
        (("eval", "RUN", "--ema", "0.5"), "has the rates 0.9, 0.99"),
        (("eval", "RUN", "--data", "cifar10", "--features", "digits"), "ict data get cifar10"),
        (("eval", "RUN", "--sigmas", "80,90", "--samples", 100), "falling noise levels"),
        (("eval", "RUN/model.safetensors", "--ema", "all"), "leave --ema out"),
        (("eval", "nowhere", "--data", "digits"), "there is no model at nowhere"),
        (("eval", "--images", "nowhere"), "--data: say which real images"),
        (("tune", "RUN", "--steps", "1", "--samples", 100), "use 2 or more"),
        (("tune", "RUN", "--write", "x.pt"), "name a .safetensors file"),
        (("tune", "RUN", "--samples", 60), "too few"),
    ],
)
def test_errors_of_the_commands(arguments, message, trained):
    _, text = invoke(*(str(one).replace("RUN", str(trained)) for one in arguments))
    assert message in text


# --- on the way


def test_scores_in_training_keep_the_best_model(tmp_path):
    config = tiny_config(evaluation={"times": 3, "samples": 100})
    said = io.StringIO()
    folder = tmp_path / "run"
    run(config, folder, device="cpu", console=Console(file=said, width=300))
    records = read_records(folder / "eval.json")
    assert [record["step"] for record in records] == [4, 8, 12] and "the best so far" in said.getvalue()
    best = min(records, key=lambda record: record["scores"]["FD-digits"])
    assert load(folder / "best.safetensors").origin["step"] == best["step"]
    plain = run(tiny_config(), tmp_path / "plain", device="cpu", console=Console(file=io.StringIO()))
    assert plain.read_bytes() == (folder / "model.safetensors").read_bytes()  # scoring changes nothing
    run(config, folder, device="cpu", overwrite=True, console=Console(file=io.StringIO()))
    assert len(read_records(folder / "eval.json")) == 3


def test_a_score_from_before_a_way_back_stays_the_one_of_its_model(tmp_path, monkeypatch):
    """Step 4 of the first way scores 5; the second way has 12 there, 8 later: the best is still that of 5."""
    folder, scores = tmp_path / "run", {(0, 2): 10.0, (0, 4): 5.0, (1, 4): 12.0, (1, 6): 8.0, (1, 8): 9.0}

    def keep(attempt: int, step: int) -> None:
        state = SimpleNamespace(step=step, attempt=attempt, averages=[average], model=model)
        this = Run(
            config=config, folder=folder, images=None, spec=spec, state=state, budget=None, log=None,
            console=Console(file=io.StringIO()), guard=Guard(config, ALONE, torch.device("cpu")), saver=None,
            judge=SimpleNamespace(net=SimpleNamespace(frechet="FD-digits")),
        )  # fmt: skip
        this.score()

    def evaluated(generator, judge, plan, *, name, ranks=ALONE):
        step = generator.origin["step"]
        attempt = 1 if (0, step) in done or (0, step) not in scores else 0
        done.append((attempt, step))
        record = dict.fromkeys(IDENTITY) | {"model": name, "step": step, "scores": {"FD-digits": scores[attempt, step]}}
        yield record

    config, done = tiny_config(), []
    spec = ModelSpec.from_config(config, tuple("0123456789"))
    model = build_model(spec)
    average = WeightAverage(model, decay=0.9, ramp=0.0)
    folder.mkdir()
    monkeypatch.setattr("ict.experiment.parts.evaluate", evaluated)
    held = []
    for attempt, step in scores:
        keep(attempt, step)
        held.append(load(folder / "best.safetensors").origin["step"])
    assert done == list(scores) and held == [2, 4, 4, 4, 4]
    records = read_records(folder / "eval.json")
    assert {(one.get("attempt", 0), one["step"]): one["scores"]["FD-digits"] for one in records} == scores


@pytest.mark.parametrize(
    "sections",
    [
        {"evaluation": {"times": 1, "samples": 100, "steps": 1001}},
        {"evaluation": {"times": 1, "samples": 10**7 + 1}},
    ],
)
def test_scores_that_cannot_be_had_are_refused_with_the_recipe(sections):
    with pytest.raises(ConfigError, match="evaluation"):
        tiny_config(**sections)


@pytest.mark.parametrize(("steps", "taken"), [(None, 18), (1, 18), (4, 4)])
def test_a_diffusion_model_is_scored_on_the_way(steps, taken, tmp_path):
    """Older recipes of runs have a 1 where nothing was said."""
    scoring = {"times": 1, "samples": 100} | ({"steps": steps} if steps else {})
    config = tiny_config(objective={"kind": "edm"}, evaluation=scoring, training={"steps": 2})
    run(config, tmp_path / "run", device="cpu", console=Console(file=io.StringIO()))
    (record,) = read_records(tmp_path / "run" / "eval.json")
    assert len(record["sigmas"]) == taken


def test_a_score_that_fails_does_not_end_a_run(tmp_path, monkeypatch):
    def failing(*arguments, **options):
        raise ConfigError("the model gives numbers that are not finite")

    monkeypatch.setattr("ict.experiment.parts.evaluate", failing)
    said = io.StringIO()
    config = tiny_config(evaluation={"times": 2, "samples": 100})
    run(config, tmp_path / "run", device="cpu", console=Console(file=said, width=300))
    assert said.getvalue().count("has no score: the model gives numbers") == 2
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_a_run_that_cannot_be_scored_does_not_begin(tmp_path):
    config = tiny_config(evaluation={"times": 1, "features": "inception", "samples": 3000})
    with pytest.raises(ConfigError, match="ict data get inception"):
        run(config, tmp_path / "run", device="cpu", console=Console(file=io.StringIO()))
    assert not (tmp_path / "run").exists()


def test_images_of_the_set_have_a_checksum(digits):
    changed = digits.pixels.clone()
    changed[0, 0, 0, 0] ^= 1
    other = Images(pixels=changed, labels=digits.labels, class_names=digits.class_names)
    assert digits.checksum != other.checksum and len(digits.checksum) == 64
