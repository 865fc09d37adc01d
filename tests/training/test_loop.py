import json

import pytest
import torch
from helpers import step_of, tiny_config
from hypothesis import given
from hypothesis import strategies as st

from ict.config import Config
from ict.data import load_images
from ict.model import ModelSpec, build_model
from ict.objectives import build_objective
from ict.reading import ConfigError
from ict.training.budget import Budget
from ict.training.ema import WeightAverage, ramped_decay
from ict.training.loop import TrainState, new_state, train
from ict.training.optimiser import learning_rate
from ict.training.passes import load_batch
from ict.training.plan import Plan


def start(config: Config) -> TrainState:
    images = load_images(config.data)
    return new_state(config, build_model(ModelSpec.from_config(config, images.class_names), seed=config.seed))


def trained(config: Config) -> tuple[TrainState, list[dict]]:
    state, seen = start(config), []
    for s in train(config, state, load_images(config.data), Budget.from_config(config.training)):
        seen.append({"loss": s.loss.item(), "gradient": s.gradient.item(), "lr": s.lr, **s.stats})
    return state, seen


def same_weights(a: TrainState, b: TrainState) -> bool:
    weights = zip(a.model.state_dict().values(), b.model.state_dict().values(), strict=True)
    averages = [
        zip(x.weights.values(), y.weights.values(), strict=True) for x, y in zip(a.averages, b.averages, strict=True)
    ]
    return all(torch.equal(p, q) for pairs in (weights, *averages) for p, q in pairs)


def test_two_runs_of_one_seed_are_equal_to_the_bit(tiny):
    torch.manual_seed(1)
    a, seen_a = trained(tiny)
    torch.manual_seed(2)  # the global generator has no say
    b, seen_b = trained(tiny)
    assert seen_a == seen_b and same_weights(a, b)
    c, seen_c = trained(Config(**{**vars(tiny), "seed": 1}))
    assert seen_c != seen_a and not same_weights(a, c)


def test_the_run_passes_through_the_curriculum(tiny):
    _, seen = trained(tiny)
    assert [s["levels"] for s in seen] == [3] * 4 + [5] * 4 + [9] * 4


def test_accumulated_pieces_give_the_step_of_the_whole_batch():
    one = trained(tiny_config(training={"steps": 2}))[0]
    four = trained(tiny_config(training={"steps": 2, "accumulate": 4}))[0]
    for p, q in zip(one.model.parameters(), four.model.parameters(), strict=True):
        assert torch.allclose(p, q, atol=2e-6)


def test_the_loss_is_the_mean_over_the_batch_not_over_pieces():
    losses = [trained(tiny_config(training={"steps": 1, "accumulate": a}))[1][0]["loss"] for a in (1, 2, 8)]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


def test_training_lowers_the_loss():
    """Judged on the same images, levels and noise before and after."""
    config = tiny_config(objective={"s0": 8, "s1": 8}, training={"steps": 150, "batch": 32, "lr": 3e-3})
    images = load_images(config.data)
    x, labels = load_batch(config, images.pixels[:1000], images.labels[:1000], torch.arange(1000), seed=0, step=0)

    def judge(state):
        with torch.no_grad():
            step = step_of(1000, number=10**6)
            return build_objective(config)(state.model.eval(), x, labels, step).per_sample.mean().item()

    assert judge(trained(config)[0]) < 0.85 * judge(start(config))


def test_mirroring_mirrors(tiny):
    images = load_images(tiny.data)
    plain = tiny_config(data={"flip": False})
    batch = (images.pixels[:64], images.labels[:64], torch.arange(64))
    x, labels = load_batch(tiny, *batch, seed=0, step=0)
    y, _ = load_batch(plain, *batch, seed=0, step=0)
    mirrored = [not torch.equal(a, b) for a, b in zip(x, y, strict=True)]
    assert 16 < sum(mirrored) < 48
    assert all(torch.equal(a, b.flip(-1) if m else b) for a, b, m in zip(x, y, mirrored, strict=True))
    assert labels is not None and torch.equal(labels, images.labels[:64])


# --- budget and schedules


def test_a_run_bounded_by_images_rounds_up():
    config = tiny_config(training={"steps": 3}).training
    assert Budget.from_config(config).steps == 3
    from dataclasses import replace

    assert Budget.from_config(replace(config, steps=None, images=17)).steps == 3
    with pytest.raises(ConfigError, match="how long"):
        Budget.from_config(replace(config, steps=None))


def test_a_run_bounded_by_time_is_finished_when_the_time_is_over_and_not_before():
    budget = Budget(seconds=2.0)
    assert not budget.finished(10, 1.9999) and budget.progress(10, 1.9999) == (1999, 2000)
    assert budget.finished(10, 2.0) and budget.progress(10, 9.0) == (2000, 2000)


def test_a_run_bounded_by_time_ends_in_time():
    config = tiny_config()
    from dataclasses import replace

    config = replace(config, training=replace(config.training, steps=None, budget="2s"))
    state = start(config)
    levels = [s.stats["levels"] for s in train(config, state, load_images(config.data), Budget(seconds=2.0))]
    assert 2.0 <= state.seconds < 4.0
    assert levels[0] == 3 and levels[-1] == 9 and levels == sorted(levels)


@given(st.floats(0.5, 0.99999), st.integers(0, 10**6), st.floats(0.01, 1))
def test_the_ramp_bounds_the_window_by_the_steps_so_far(decay, updates, ramp):
    got = ramped_decay(decay, updates, ramp=ramp)
    assert 0 <= got <= decay
    assert 1 / (1 - got) <= (1 + ramp * updates) * (1 + 1e-6)
    assert ramped_decay(decay, updates, ramp=0) == decay
    assert [ramped_decay(0.9999, k, ramp=0.5) for k in (0, 2, 6)] == [0, 0.5, 0.75]


def test_average_is_the_recursion():
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 1.0)
    average = WeightAverage(model, decay=0.75, ramp=0)
    torch.nn.init.constant_(model.weight, 5.0)
    average.update(model, 0)
    assert average.weights["weight"].item() == 0.75 * 1 + 0.25 * 5
    assert model.weight.item() == 5.0


def test_a_short_run_is_not_dominated_by_its_start():
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 100.0)
    average = WeightAverage(model, decay=0.9999, ramp=0.1)
    torch.nn.init.constant_(model.weight, 1.0)
    for update in range(50):
        average.update(model, update)
    assert average.weights["weight"].item() == pytest.approx(1.0, abs=0.01)


def test_learning_rates_follow_progress():
    def at(progress, **training):
        return learning_rate(tiny_config(training={"lr": 1.0, **training}).training, progress)

    assert [at(p) for p in (0, 0.5, 1)] == [1, 1, 1]
    assert [at(p, lr_schedule="cosine") for p in (0, 0.5, 1)] == pytest.approx([1, 0.5, 0])
    assert [at(p, lr_schedule="trapezoid") for p in (0, 0.7, 0.85, 1)] == pytest.approx([1, 1, 0.5, 0])
    assert [at(p, lr_warmup=0.2) for p in (0, 0.1, 0.2, 0.9)] == pytest.approx([0, 0.5, 1, 1])


def test_the_schedule_reaches_the_optimiser():
    config = tiny_config(training={"lr": 0.25, "lr_schedule": "cosine", "steps": 4})
    state = start(config)
    used = [s.optimiser.param_groups[0]["lr"] for s in train(config, state, load_images(config.data), Budget(steps=4))]
    assert used == pytest.approx([0.25, 0.25 * (1 + 0.5**0.5) / 2, 0.125, 0.25 * (1 - 0.5**0.5) / 2])


def test_the_optimiser_is_radam_with_the_papers_settings():
    state = start(tiny_config(training={"lr": 1e-4}))
    assert type(state.optimiser) is torch.optim.RAdam
    group = state.optimiser.param_groups[0]
    assert group["betas"] == (0.9, 0.999) and group["eps"] == 1e-8 and group["weight_decay"] == 0


# --- what a run says before it starts


def test_a_plan_says_which_n_it_reaches():
    plan = Plan.of(tiny_config(objective={"s0": 10, "s1": 1280}), Budget(steps=400_000))
    assert plan.reached == 1281 and plan.warning() is None
    assert "→ 21 (step 50,000)" in plan.describe() and "→ 1281 (step 350,000)" in plan.describe()


def test_a_plan_warns_of_a_run_too_short():
    short = Plan.of(tiny_config(objective={"s0": 10, "s1": 1280}), Budget(steps=5))
    assert "ends with N = 161" in (short.warning() or "")
    hasty = Plan.of(tiny_config(objective={"s0": 10, "s1": 1280}), Budget(steps=400))
    assert "only about 50 steps" in (hasty.warning() or "")


@pytest.mark.parametrize("objective", [{"curriculum": "linear"}, {"curriculum": "cosine"}, {"s0": 10, "s1": 19}])
def test_a_plan_does_not_ask_for_what_no_length_would_reach(objective):
    config = tiny_config(objective={"s0": 10, "s1": 160, **objective})
    assert Plan.of(config, Budget(steps=400_000)).warning() is None


def test_a_timed_plan_warns_once_it_knows_the_speed():
    plan = Plan.of(tiny_config(objective={"s0": 10, "s1": 160}), Budget(seconds=60))
    assert plan.timed and plan.warning() is None
    assert "(12 s)" in plan.describe()
    assert plan.warning(steps=200) is not None and plan.warning(steps=5000) is None


def test_records_are_json(tiny):
    json.dumps(trained(tiny)[1])
