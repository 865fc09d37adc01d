"""The guard: what it skips, what alarms it, what it leaves alone; and how a run goes back."""

import io
import itertools
import json
import math
import signal
from types import SimpleNamespace

import pytest
import torch
from helpers import check_step, tiny_config
from rich.console import Console

from ict.experiment import run
from ict.files import list_checkpoints
from ict.objectives import Loss
from ict.objectives.ict import ImprovedConsistencyTraining
from ict.ranks import ALONE
from ict.sampling import load
from ict.training.guard import BINS, FAR, IN_A_ROW, PATIENCE, SETTLED, Guard, GuardState
from ict.training.log import RunLog, TrainingFailed, read_log
from ict.training.passes import Passes

LONG = {"steps": 120, "log_every": 1, "save_every": 10, "keep": 3, "snapshots": 0}


def quiet() -> Console:
    return Console(file=io.StringIO(), width=300)


def guard_of() -> Guard:
    return Guard(tiny_config(), ALONE, torch.device("cpu"))


def feed(guard: Guard, value: float, *, steps: int = 1, levels: float = 11, gradient: float = 1.0) -> None:
    for _ in range(steps):
        guard.begin()
        check_step(guard, value, gradient, step=0, levels=levels)


def test_a_usual_run_does_not_alarm():
    guard, noise = guard_of(), torch.Generator().manual_seed(0)
    for step in range(3000):  # falls to a tenth, and spreads by half of itself
        value = (0.1 + 0.9 * math.exp(-step / 500)) * math.exp(0.5 * torch.randn((), generator=noise).item())
        feed(guard, value)
    assert guard.alarm is None and guard.calm


def test_a_loss_that_stays_far_above_what_was_usual_alarms_and_one_bad_step_does_not():
    guard = guard_of()
    feed(guard, 1.0, steps=2 * SETTLED)
    feed(guard, 50.0)
    feed(guard, 1.0, steps=PATIENCE)
    assert guard.alarm is None
    feed(guard, 1.0, steps=100)
    feed(guard, 2 * FAR, steps=2)
    assert guard.calm  # the fast average is not up yet
    feed(guard, 2 * FAR, steps=PATIENCE + 20)
    assert guard.alarm is not None and "the loss has been more than 10 times" in guard.alarm
    other = guard_of()
    feed(other, 1.0, steps=2 * SETTLED)
    feed(other, 1.0, steps=PATIENCE + 20, gradient=2 * FAR)
    assert other.alarm is not None and "the gradient has been" in other.alarm


def test_the_jump_at_a_switch_of_n_is_known_and_a_real_one_is_not():
    """From N = 11 to 1281 at once the weight grows 128 times; and then it grows by itself."""
    guard = guard_of()
    feed(guard, 1.0, steps=2 * SETTLED)
    feed(guard, 128.0, gradient=128.0, steps=3 * PATIENCE, levels=1281)
    assert guard.alarm is None and guard.calm
    feed(guard, 128.0 * 3 * FAR, gradient=128.0, steps=2 * PATIENCE, levels=1281)
    assert guard.alarm is not None


@pytest.mark.parametrize("power", [1.0, 1.25, 3.0])
def test_the_jump_grows_with_the_power_of_the_gap(power):
    guard = Guard(tiny_config(objective={"gap_power": power}), ALONE, torch.device("cpu"))
    feed(guard, 1.0, steps=2 * SETTLED)
    jump = 16.0**power
    feed(guard, jump, gradient=jump, steps=3 * PATIENCE, levels=161)
    assert guard.alarm is None and guard.calm


def test_a_switch_to_fewer_levels_is_no_divergence():
    """As when a run is made longer: the loss itself hardly depends on N."""
    guard = guard_of()
    feed(guard, 3.0, steps=2 * SETTLED, levels=1281)
    feed(guard, 5.0, steps=5 * PATIENCE, levels=11)
    assert guard.alarm is None and guard.figures()["loss_ema"] < 5.0


def test_what_is_logged_by_level_is_what_was_seen():
    guard = guard_of()
    for levels in (11, 21, 41):
        for _ in range(60):
            guard.begin()
            sigma = torch.full((4,), 1.0, dtype=torch.float64)
            guard.watch(Loss(torch.full((4,), 2.0), {}, sigma=sigma), scale=1.0)
            check_step(guard, 2.0, 1.0, step=0, levels=levels)
        assert [value for value in guard.figures()["loss_by_level"] if value is not None] == [2.0]


@pytest.mark.parametrize("growth", [1.009, 1.011, 1.02])
def test_a_slow_divergence_is_noticed_too(growth):
    """What grows by a per cent a step would be followed by its own slow average."""
    guard, value = guard_of(), 1.0
    feed(guard, 1.0, steps=2 * SETTLED)
    for _ in range(3000):
        value *= growth
        feed(guard, value)
        if guard.alarm is not None:
            break
    assert value < 300


def test_steps_that_are_often_skipped_alarm():
    guard = guard_of()
    for step in range(100):
        feed(guard, 1.0 if step % 10 == 0 else math.nan)
    assert guard.alarm is not None and "of the last steps" in guard.alarm
    other = guard_of()
    for step in range(500):
        feed(other, math.nan if step % 10 == 0 else 1.0)
    assert other.alarm is None and other.state.skipped == 50


def test_a_figure_that_was_zero_may_rise():
    guard = guard_of()
    feed(guard, 0.0, steps=2 * SETTLED, gradient=0.0)
    feed(guard, 1.0, steps=3 * PATIENCE)
    assert guard.alarm is None


def test_what_is_not_finite_is_skipped_and_counted():
    for bad in (math.nan, math.inf):
        guard = guard_of()
        feed(guard, 1.0, steps=5)
        feed(guard, bad)
        feed(guard, 1.0, gradient=bad)
        assert guard.state.skipped == 2 and guard.alarm is None and not guard.calm
        feed(guard, 1.0)
        assert guard.calm and guard.state.smooth == 1.0
        feed(guard, bad, steps=IN_A_ROW)
        assert "not finite" in guard.alarm


def test_levels_of_noise_are_told_apart():
    guard = guard_of()
    guard.begin()
    sigma = torch.tensor([0.002, 0.0021, 1.0, 80.0], dtype=torch.float64)
    output = torch.zeros(4, 1, 2, 2, requires_grad=True)
    loss = Loss(torch.tensor([1.0, 3.0, math.nan, 5.0]) + output.sum((1, 2, 3)) * 2, {}, sigma=sigma, output=output)
    guard.watch(loss, scale=4.0)
    (loss.per_sample.sum() / 4).backward()
    check_step(guard, 1.0, 1.0, step=0, levels=11)
    seen = guard.history[-1]
    assert seen["loss_by_level"][0] == 2.0 and seen["loss_by_level"][-1] == 5.0
    assert [math.isnan(value) for value in seen["loss_by_level"] if value is not None] == [False, True, False]
    assert seen["gradient_by_level"][0] == pytest.approx(4.0)  # |2| over 4 pixels: √(4 · 2²)
    assert len(seen["loss_by_level"]) == BINS


def test_a_guard_goes_on_from_what_was_kept_of_it():
    guard, other = guard_of(), guard_of()
    feed(guard, 1.5, steps=70)
    other.forget(GuardState.load(json.loads(json.dumps(guard.state.save()))))
    for one in (guard, other):
        feed(one, 2.5, steps=30, levels=21)
    assert guard.state == other.state


# --- whole runs


def spoil(monkeypatch, change) -> None:
    """Let `change(seed, step)` say what the losses of a step are multiplied with."""
    original = ImprovedConsistencyTraining.__call__

    def spoiled(self, model, images, labels, place):
        loss = original(self, model, images, labels, place)
        return Loss(loss.per_sample * change(place.seed, place.number), loss.stats, loss.sigma, loss.output)

    monkeypatch.setattr(ImprovedConsistencyTraining, "__call__", spoiled)


def test_a_step_with_a_nan_is_left_out_and_the_run_is_sound(tmp_path, monkeypatch):
    spoil(monkeypatch, lambda seed, step: math.nan if step == 20 else 1.0)
    run(tiny_config(training=LONG | {"steps": 30}), tmp_path / "run", device="cpu", console=quiet())
    lines = read_log(tmp_path / "run" / "log.jsonl")
    assert [line["step"] for line in lines] == [*range(1, 21), *range(22, 31)]
    assert lines[-1]["skipped"] == 1 and lines[0]["skipped"] == 0
    assert load(tmp_path / "run").sample(2).isfinite().all()


@pytest.mark.parametrize("factor", [math.nan, 1e4])
def test_a_run_that_diverges_goes_back_and_goes_another_way(factor, tmp_path, monkeypatch):
    """The draws of the recipe's own seed are bad from step 75 on; those that the run turns to are not."""
    spoil(monkeypatch, lambda seed, step: factor if seed == 0 and step >= 75 else 1.0)
    console, folder = quiet(), tmp_path / "run"
    run(tiny_config(training=LONG), folder, device="cpu", console=console)
    said = console.file.getvalue()
    assert "Going back to step 70, with another order of the data" in said
    lines = read_log(folder / "log.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 121)) and lines[-1]["loss"] < 100
    evidence = json.loads(next((folder / "guard").glob("step-*.json")).read_text())
    assert evidence["attempt"] == 0 and len(evidence["images_of_the_last_batch"]) == 8
    assert evidence["steps"][-1]["step"] == evidence["step"] - 1 and len(evidence["steps"]) >= 70
    assert json.loads((list_checkpoints(folder)[-1] / "checkpoint.json").read_text())["attempt"] == 1


def test_a_run_that_has_gone_back_resumes_to_the_bit(tmp_path, monkeypatch):
    spoil(monkeypatch, lambda seed, step: math.nan if seed == 0 and step >= 75 else 1.0)
    models = []
    for name, stops in (("whole", [120]), ("broken", [100, 120])):
        for steps in stops:
            config = tiny_config(training=LONG | {"steps": steps, "lr_schedule": "constant"}, objective={"s0": 8})
            run(config, tmp_path / name, device="cpu", console=quiet(), resume="auto")
        models.append((tmp_path / name / "model.safetensors").read_bytes())
    assert models[0] == models[1]


def test_a_run_that_always_diverges_gives_up_and_says_why(tmp_path, monkeypatch):
    spoil(monkeypatch, lambda seed, step: math.nan if step >= 35 else 1.0)
    console = quiet()
    with pytest.raises(TrainingFailed, match=r"diverged by step 45 \(it has gone back 2 times already\).*not finite"):
        run(tiny_config(training=LONG | {"rollbacks": 2}), tmp_path / "run", device="cpu", console=console)
    said = console.file.getvalue()
    assert "Going back to step 30" in said and "Going back to step 20" in said  # further, as 30 was no help
    assert len(list((tmp_path / "run" / "guard").glob("step-*.json"))) == 3
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_a_nan_in_the_last_step_does_not_cost_the_run(tmp_path, monkeypatch):
    """Nobody knows whether the weights are sound after it; so its end is tried again, with other draws."""
    spoil(monkeypatch, lambda seed, step: math.nan if seed == 0 and step == 29 else 1.0)
    run(tiny_config(training=LONG | {"steps": 30}), tmp_path / "run", device="cpu", console=quiet())
    assert list_checkpoints(tmp_path / "run")[-1].name == "step-00000030"
    assert load(tmp_path / "run").sample(2).isfinite().all()


def test_a_checkpoint_that_is_due_at_a_skipped_step_is_written_at_the_next(tmp_path, monkeypatch):
    spoil(monkeypatch, lambda seed, step: math.nan if step == 9 else 1.0)
    config = tiny_config(training=LONG | {"steps": 18, "keep": 5})
    run(config, tmp_path / "run", device="cpu", console=quiet())
    assert [path.name[-2:] for path in list_checkpoints(tmp_path / "run")] == ["11", "18"]


def test_a_run_that_ends_high_goes_back_and_ends_again(tmp_path, monkeypatch):
    spoil(monkeypatch, lambda seed, step: 1e5 if seed == 0 and step >= 110 else 1.0)
    console = quiet()
    run(tiny_config(training=LONG), tmp_path / "run", device="cpu", console=console)
    assert "Going back to step 110" in console.file.getvalue()
    assert read_log(tmp_path / "run" / "log.jsonl")[-1]["loss"] < 100


@pytest.mark.parametrize(("bad", "count", "last"), [(40, 120, 105), (115, 135, 120)])
def test_a_timed_run_that_goes_back_keeps_its_time_unless_it_is_over(bad, count, last, tmp_path, monkeypatch):
    """On the way no step has an earlier N; an end that was bad is tried again, from where the run goes back to."""
    clock, taken, take = itertools.count(), [], Passes.take

    def counted(self, *arguments, done, total, **options):
        taken.append(done)
        return take(self, *arguments, done=done, total=total, **options)

    def ticking():
        return next(clock) / 100  # a step takes 10 ms

    monkeypatch.setattr("ict.training.loop.time", SimpleNamespace(monotonic=ticking))
    spoil(monkeypatch, lambda seed, step: math.nan if step >= bad and seed == 0 else 1.0)
    training = LONG | {"steps": None, "budget": "1.2s", "save_every": 35}
    with monkeypatch.context() as patch:
        patch.setattr(Passes, "take", counted)
        run(tiny_config(training=training), tmp_path / "run", device="cpu", console=quiet())
    _, *taken = taken  # the first was rehearsed
    assert len(taken) == count and (taken == sorted(taken)) == (bad == 40)
    assert load(tmp_path / "run").origin["step"] == last


def test_ways_back_are_counted_over_restarts_and_lead_further_back(tmp_path, monkeypatch):
    """The alarm comes a little later each time; what was gone back to was no help."""
    first = {0: 75}
    spoil(monkeypatch, lambda seed, step: math.nan if step >= first.setdefault(seed, 75 + len(first)) else 1.0)
    config, console = tiny_config(training=LONG), quiet()
    with pytest.raises(TrainingFailed, match="gone back 3 times"):
        run(config, tmp_path / "run", device="cpu", console=console)
    steps = [int(part.split(",")[0]) for part in console.file.getvalue().split("Going back to step ")[1:]]
    assert steps[:2] == [70, 60]
    with pytest.raises(TrainingFailed, match="gone back 3 times"):
        run(config, tmp_path / "run", device="cpu", console=quiet(), resume="auto")


def test_a_longer_run_is_not_a_divergence(tmp_path):
    """N falls back where a run is made longer."""
    section = {"s0": 2, "s1": 64}
    for steps in (120, 4000):
        config = tiny_config(objective=section, training=LONG | {"steps": steps, "log_every": 10, "save_every": 40})
        if steps == 120:
            run(config, tmp_path / "run", device="cpu", console=quiet())
            continue
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ict.training.log.RunLog.step", stop_at(240))
            with pytest.raises(KeyboardInterrupt):
                run(config, tmp_path / "run", device="cpu", console=quiet(), resume=True)
    assert read_log(tmp_path / "run" / "log.jsonl")[-1]["step"] == 240 and not (tmp_path / "run" / "guard").exists()


def stop_at(last: int):
    original = RunLog.step

    def step(self, state):
        if state.step == last:
            signal.raise_signal(signal.SIGINT)
        return original(self, state)

    return step


def test_a_run_that_diverges_before_its_first_checkpoint_starts_anew(tmp_path, monkeypatch):
    spoil(monkeypatch, lambda seed, step: math.nan if seed == 0 and step >= 3 else 1.0)
    console = quiet()
    config = tiny_config(training=LONG | {"steps": 30, "save_every": 1000})
    run(config, tmp_path / "run", device="cpu", console=console)
    assert "Going back to the start, as nothing was saved yet" in console.file.getvalue()
    assert [line["step"] for line in read_log(tmp_path / "run" / "log.jsonl")] == list(range(1, 31))
