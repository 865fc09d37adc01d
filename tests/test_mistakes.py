"""Mistakes seen in public iCT code, made here on purpose: each must be caught by the tests named beside it.

Each case changes one line in a copy of the sources and runs those tests against the copy: `make test-slow`.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]

MISTAKES = {
    "pseudo-Huber per pixel with the c of the whole image": (
        "distance.py",
        "    squared = squared_l2(x, y)\n",
        "    s = _difference(x, y).square()\n    return (torch.sqrt(s + c * c) - c).mean(dim=1)\n",
        "test_distance.py",
    ),
    "c computed with d instead of its root": (
        "distance.py", "0.00054 * math.sqrt(dimensions)", "0.00054 * dimensions", "test_distance.py",
    ),
    "half precision before the difference is taken": (
        "distance.py", "return (x.to(dtype) - y.to(dtype))", "return (x.bfloat16() - y.bfloat16()).to(dtype)",
        "test_distance.py",
    ),
    "a root of zero, with a gradient that is not a number": (
        "distance.py",
        "    return squared / (torch.sqrt(squared + c * c) + c)",
        "    return torch.sqrt(squared)",
        "test_distance.py",
    ),
    "P_mean with the wrong sign": ("noise.py", "p_mean: float = -1.1", "p_mean: float = 1.1", "test_noise.py"),
    "a recipe's P_mean with the wrong sign": (
        "config.py", "p_mean: float = -1.1", "p_mean: float = 1.1", "objectives/test_ict.py",
    ),
    "a grid that drops sigma_min": (
        "noise.py", "    return sigmas\n", "    return sigmas[1:]\n", "test_noise.py",
    ),
    "levels in descending order": (
        "noise.py", "    return sigmas\n", "    return sigmas.flip(0)\n", "test_noise.py",
    ),
    "c_in missing": ("model.py", "self.net(c_in * x,", "self.net(x,", "test_model.py"),
    "c_in without its root": ("model.py", "c_in=variance.rsqrt()", "c_in=1 / variance", "test_model.py"),
    "raw sigma fed to the net": ("model.py", "c_noise=0.25 * sigma.log()", "c_noise=sigma", "test_model.py"),
    "c_skip without sigma_min": (
        "model.py", "c_skip=1 / (((sigma - sigma_min)", "c_skip=1 / (((sigma)", "test_model.py",
    ),
    "c_out without sigma_min": ("model.py", "c_out=(sigma - sigma_min)", "c_out=sigma", "test_model.py"),
    "Fourier scale left at 16": (
        "config.py", "fourier_scale: float = 0.02", "fourier_scale: float = 16.0", "nets/test_nets.py",
    ),
    "teacher and student with different dropout masks": (
        "objectives/ict.py", "(lower, low, labels, key)", "(lower, low, labels, key + 1)", "objectives/test_ict.py",
    ),
    "dropout that depends on the global generator": (
        "nets/dropout.py", "torch.where(hashed_mask(x.shape, keys, p=self.p),",
        "torch.where(torch.rand_like(x) >= self.p,", "nets/test_nets.py",
    ),
    "teacher in evaluation mode": (
        "objectives/ict.py", "        with torch.no_grad():", "        model.eval()\n        with torch.no_grad():",
        "objectives/test_ict.py",
    ),
    "gradient through the teacher": (
        "objectives/ict.py", "with torch.no_grad():", "with torch.enable_grad():", "objectives/test_ict.py",
    ),
    "fresh noise for the teacher": (
        "objectives/ict.py", "return step_down(self.score, images, labels, noisy, low, high, z)",
        "return step_down(self.score, images, labels, noisy, low, high, torch.randn_like(z))", "objectives/test_ict.py",
    ),
    "the weight of the other side: no 1/gap": (
        "weighting.py", "return (sigma_high - sigma_low) ** -gap_power", "return 1 / sigma_low",
        "objectives/test_ict.py",
    ),
    "levels told apart in half precision": (
        "nets/layers.py", "        with exact(embedding):", "        if True:", "test_precision.py",
    ),
    "a noise embedding in half precision": (
        "nets/unet.py", "        with exact(c_noise):", "        if True:", "test_precision.py",
    ),
    "gradients of a scaled loss that stay scaled": (
        "training/update.py", "if scale != 1 and gradients:", "if False:", "training/test_update.py",
    ),
    "pairs drawn from the room that a larger N will need": (
        "objectives/ict.py", "value=2.0)", "value=0.0)", "objectives/test_ict.py",
    ),
    "a step up along the mean noise": (
        "objectives/score.py", "return lower + spread(", "return lower - spread(", "objectives/test_score.py",
    ),
    "N that is not a function of the step": (
        "objectives/ict.py", "        n = self.levels(step.done, step.total)",
        "        n = self.n = getattr(self, 'n', self.levels(step.done, step.total))", "objectives/test_ict.py",
    ),
    "noise that depends on the place in the piece, not in the batch": (
        "objectives/base.py", "z = rng.normal(self.samples, shape", "z = rng.normal(torch.arange(len(images)), shape",
        "objectives/test_ict.py",
    ),
    "sampler noise scaled by a list index": (
        "sampling.py", "x + (sigma**2 - model.noise.sigma_min**2) ** 0.5 * z", "x + call * z", "test_sampling.py",
    ),
    "sampler noise of the full level": (
        "sampling.py", "(sigma**2 - model.noise.sigma_min**2) ** 0.5", "sigma", "test_sampling.py",
    ),
    "student EMA without a ramp": (
        "training/ema.py", "min(decay, 1 - 1 / (1 + ramp * updates)) if ramp > 0 else decay", "decay",
        "training/test_loop.py",
    ),
    "a ternary search that returns a stale value": (
        "evaluation/tune.py", "return min(self.tried, key=lambda place: self.tried[place])", "return low",
        "evaluation/test_judge.py::test_the_search_does_not_return_a_stale_value",
    ),
    "the mean over pieces instead of the batch": (
        "training/passes.py", "loss.per_sample.sum() / training.batch", "loss.per_sample.mean()",
        "training/test_loop.py",
    ),
}  # fmt: skip


def run_tests(source: Path, tests: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-n", "0", "--deselect"]
    command += ["nets/test_nets.py::test_compiled_student_and_teacher_share_the_mask_with_eager", tests]
    return subprocess.run(command, cwd=ROOT / "tests", env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_mistake_is_caught(mistake, tmp_path):
    file, right, wrong, tests = MISTAKES[mistake]
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "src" / "ict" / file
    text = path.read_text()
    assert text.count(right) >= 1, f"{file} has changed: bring this case up to date"
    path.write_text(text.replace(right, wrong))
    done = run_tests(tmp_path / "src", tests)
    assert done.returncode == 1 and "1 failed" in done.stdout, done.stdout[-2000:]


def test_without_a_mistake_the_same_tests_pass(tmp_path):
    """And they do test the copy."""
    shutil.copytree(ROOT / "src", tmp_path / "src")
    assert run_tests(tmp_path / "src", "test_distance.py").returncode == 0
    (tmp_path / "src" / "ict" / "distance.py").write_text("")
    assert run_tests(tmp_path / "src", "test_distance.py").returncode != 0
