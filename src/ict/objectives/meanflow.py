"""MeanFlow (Geng et al., 2025, "Mean flows for one-step generative modeling"): the average velocity of a flow.

Between noise and images runs z = (1 − t) x₀ + t e, with velocity v = e − x₀. The average velocity from r to t,
u(z, r, t) = (1 / (t − r)) ∫ v ds, obeys u = v − (t − r) du/dt, where du/dt = ∂u/∂z · v + ∂u/∂t goes along the path;
the net is pulled towards the right-hand side. With r = t that is flow matching. One step is z − t u(z, 0, t).

Times are logit-normal, and ln(t / (1 − t)) is ln σ: the levels are lognormal, as elsewhere. As in the paper the two
times are drawn alike and sorted, some samples have r = t (a quarter on CIFAR-10, as its code has it), the net is told
t and t − r, and the weight is 1 / (loss + 0.001)^p. What differs: images are drawn from σ_max = 80, t = 0.988, where
the paper has t = 1; and the paper's augmentation of CIFAR-10 is not here.
"""

from typing import ClassVar

import torch
from torch import Tensor

from ict import rng
from ict.config import Config
from ict.distance import squared_l2
from ict.model import AverageVelocity, ConsistencyModel, flow_time, spread
from ict.objectives.base import Loss, Phase, Step, add_noise, one_derivative
from ict.objectives.tangent import derivative, shown_as, unwrapped
from ict.rng import Stream
from ict.weighting import adaptive_weight


class MeanFlow:
    """E[w ‖u_θ(z, r, t) − stopgrad(v − (t − r) du_θ/dt)‖²]; the loss that is shown is the root of its mean square."""

    keys: ClassVar[tuple[str, ...]] = ("power", "apart")
    beside = staticmethod(one_derivative)

    def __init__(self, config: Config):
        self.section, self.noise = config.objective, config.noise
        self.power = 0.75 if config.objective.power is None else config.objective.power

    def __call__(self, model: ConsistencyModel, images: Tensor, labels: Tensor | None, step: Step) -> Loss:
        low, high = self.draw_levels(step)
        e, key = step.noise(images, high).to(images.dtype), step.keys()
        noisy, t, r = add_noise(images, high, e), flow_time(high), flow_time(low)
        z, v = spread(1 - t, images) * noisy, e - images
        plain = unwrapped(model)
        assert isinstance(plain, AverageVelocity)

        student = model(noisy, high, labels, key, to=low)  # type: ignore
        slope = derivative(lambda z, t: plain.velocity(z, t, r, labels, key), (z, t), (v, torch.ones_like(t)))[1]
        squared = squared_l2(student, v - spread(t - r, v) * slope)
        loss = adaptive_weight(squared, power=self.power) * squared
        figure = torch.sqrt(squared / images[0].numel())
        return Loss(shown_as(loss, figure), {}, sigma=high, output=student)

    def draw_levels(self, step: Step) -> tuple[Tensor, Tensor]:
        """The noise levels of r and t -> two float64 [B], equal for some samples."""
        section, noise, where = self.section, self.noise, {"seed": step.seed, "step": step.number}
        drawn = rng.normal(step.samples, (2,), **where, stream=Stream.LEVEL).double()
        levels = torch.exp(section.p_mean + section.p_std * drawn).clamp(noise.sigma_min, noise.sigma_max)
        low, high = levels.amin(dim=1), levels.amax(dim=1)
        apart = rng.uniform(step.samples, 1, **where, stream=Stream.INTERVAL)[:, 0] < section.apart
        return torch.where(apart, low, high), high

    def phase(self, step: Step) -> Phase:
        """The same from first to last."""
        return Phase({}, {})
