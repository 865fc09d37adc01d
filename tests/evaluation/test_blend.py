"""Averages blended: the sum, the search for shares, and the command."""

import io
import re
from pathlib import Path

import pytest
import torch
from helpers import tiny_config
from rich.console import Console
from typer.testing import CliRunner

import ict.evaluation.blend
from ict.cli import app
from ict.evaluation.blend import FINEST, blend, directions, parse_shares, search, show_shares
from ict.experiment import run
from ict.model import read_model
from ict.reading import ConfigError
from ict.sampling import load

RATES = [0.9, 0.95, 0.99]


def test_a_blend_is_the_sum_of_shares():
    one, two = (
        {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(0.3)},
        {"a": torch.tensor([3.0, -2.0]), "b": torch.tensor(0.3)},
    )
    found = blend([one, two], (1.5, -0.5))
    assert found["a"].tolist() == [0.0, 4.0]
    assert torch.equal(found["b"], one["b"])  # what does not differ stays as it is, to the bit
    assert found["a"].dtype == torch.float32


@pytest.mark.parametrize("count", [2, 3, 4])
def test_no_direction_changes_the_sum_and_together_they_lead_everywhere(count):
    ways = torch.tensor(list(directions(count)))
    assert ways.sum(1).abs().max() == 0 and torch.linalg.matrix_rank(ways) == count - 1


def test_the_search_finds_the_best_shares_and_says_their_own_score():
    best, asked = torch.tensor([-0.3, 0.45, 0.85]), []

    def score(shares):
        asked.append(shares)
        return 5 + (torch.tensor(shares) - best).square().sum().item()

    found, value = search(score, (0.0, 0.0, 1.0), tries=200)
    assert (torch.tensor(found) - best).abs().max() <= FINEST and sum(found) == pytest.approx(1)
    before = list(asked)
    assert len(before) == len(set(before))  # nothing is asked twice
    assert value == score(found) == min(map(score, before))


def test_the_search_stops_after_so_many_tries():
    asked = []
    found, value = search(lambda shares: asked.append(shares) or float(len(asked)), (0.0, 1.0), tries=3)
    assert len(asked) == 3 and (found, value) == ((0.0, 1.0), 1.0)


def test_shares_are_read_as_they_are_shown():
    assert parse_shares("0.99:1.25,0.9:-0.25", RATES) == (-0.25, 0.0, 1.25)
    assert show_shares((-0.25, 0.0, 1.25), RATES) == "0.9:-0.25,0.99:1.25"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.99", "like 0.9998:1.25"),
        ("0.99:x,0.9:1", "like 0.9998:1.25"),
        ("0.99:1:2", "like 0.9998:1.25"),
        ("", "like 0.9998:1.25"),
        ("0.98:1", "the run has the averages 0.9, 0.95, 0.99"),
        ("0.99:0.5,0.9:0.4", "add up to 0.9, not to 1"),
        ("0.99:0.5,0.99:0.5", "named twice"),
        ("0.99:nan,0.9:1", "use -100 to 100"),
        ("0.99:1e9,0.9:-999999999", "use -100 to 100"),
    ],
)
def test_other_shares_are_refused(text, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_shares(text, RATES)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("blend") / "run"
    training = {"ema": (0.99, 0.9, 0.5), "ema_ramp": 0.0, "steps": 12, "snapshots": 0, "lr": 1e-2}
    run(tiny_config(training=training), folder, device="cpu", console=Console(file=io.StringIO()))
    return folder


def invoke(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(one) for one in arguments], env={"COLUMNS": "200"})
    return done.exit_code, done.output if done.exit_code == 0 else str(done.exception)


def test_the_command_searches_and_writes_a_model(trained, tmp_path):
    out = tmp_path / "best.safetensors"
    code, said = invoke("blend", trained, "--samples", 100, "--tries", 4, "--steps", "1,2", "--write", out)
    assert code == 0, said
    lines = [line for line in said.splitlines() if "FD-digits" in line]
    assert len(lines) == 4 and lines[0].split()[0] == "0.99:1"  # begins with the model that is used
    sums = [sum(map(float, line.split("FD-digits")[1].split("/"))) for line in lines]
    shares = re.search(r"best: --shares (\S+)", said)[1]
    chosen = [line.split()[0] for line in lines].index(shares)
    assert sums[chosen] <= min(sums) + 0.002  # they are rounded when they are said
    assert load(out).origin["ema"] == shares and load(out).sample(2).shape == (2, 1, 8, 8)
    again = tmp_path / "again.safetensors"
    assert invoke("blend", trained, "--shares", shares, "--write", again)[0] == 0
    assert again.read_bytes() == out.read_bytes()


def test_a_blend_that_answers_no_numbers_does_not_end_the_search(trained, monkeypatch):
    real, calls = ict.evaluation.blend.score_of, []

    def score(*arguments):
        calls.append(1)
        if len(calls) in (1, 3):
            raise ConfigError("the model gives numbers that are not finite")
        return real(*arguments)

    monkeypatch.setattr(ict.evaluation.blend, "score_of", score)
    code, said = invoke("blend", trained, "--samples", 100, "--tries", 4, "--steps", 1)
    assert code == 0 and said.count("FD-digits inf") == 2 and "best: --shares 0.99:1\n" not in said


def test_shares_given_by_hand_make_that_model(trained, tmp_path):
    out = tmp_path / "b.safetensors"
    assert invoke("blend", trained, "--shares", "0.9:1.5,0.99:-0.5", "--write", out)[0] == 0
    parts = [load(trained, ema=rate).model.state_dict() for rate in (0.9, 0.99)]
    for name, tensor in read_model(out)[0].state_dict().items():
        assert torch.allclose(tensor, 1.5 * parts[0][name] - 0.5 * parts[1][name], atol=1e-6)


def test_what_cannot_be_blended_is_refused(trained, tmp_path):
    code, said = invoke("blend", trained / "model.safetensors")
    assert code != 0 and "give the folder of a run" in said
    code, said = invoke("blend", tmp_path / "nowhere")
    assert code != 0 and "there is no run at" in said
    code, said = invoke("blend", trained, "--shares", "0.9:1")
    assert code != 0 and "--write" in said
    code, said = invoke("blend", trained, "--tries", 0)
    assert code != 0 and "--tries 0" in said
    code, said = invoke("blend", trained, "--write", tmp_path / "a.png")
    assert code != 0 and "name a .safetensors file" in said
    one = run(
        tiny_config(training={"ema": (0.9,), "steps": 1, "snapshots": 0}), tmp_path / "one", console=Console(quiet=True)
    )
    code, said = invoke("blend", one.parent)
    assert code != 0 and "kept one average, 0.9" in said
