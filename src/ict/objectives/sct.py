"""sCT (Lu and Song, 2024, "Simplifying, stabilizing and scaling continuous-time consistency models").

TrigFlow is the noise of §2 on a circle: with σ = σ_d tan t, x_t = cos t · (x₀ + σ z) = cos t x₀ + sin t σ_d z. There
f = cos t x_t − sin t σ_d F(x_t / σ_d), which is this project's model with σ_min = 0 and F of the other sign: c_in x,
c_skip x and c_out are x_t / σ_d, cos t x_t and σ_d sin t. So the net and the model are those of all other methods.

The derivative along the path, times cos t (the paper's weight 1 / tan t, with ∂f/∂F = −σ_d sin t, leaves that), is

    g = −cos² t (σ_d F − dx_t/dt) − r cos t sin t (x_t + σ_d dF/dt),    r from 0 to 1 in the warm-up of the tangent,

and what is minimised is a weight times ‖F_θ − stopgrad(F_θ) − g / (‖g‖ + 0.1)‖². Of the paper: TrigFlow, the weight,
the product cos t sin t inside of the derivative, warm-up, normalisation with 0.1. What differs:

- c_noise is ¼ ln σ and not t, so that one net serves all methods. The paper warns of its slope at both ends; times
  cos t sin t that slope is ¼ everywhere.
- The adaptive weight e^w(t) of the paper is learned, with the optimum 1 / E[‖·‖² | t]. Here each sample has its own
  ‖·‖² in place of the mean over its level, by `objective.power` = 1: nothing more to train, to average or to save.
  A normalised tangent is nearly 1 long, so both are nearly the same for all levels but the highest.
  Both norms are of one sample, so at the exact answer the mean of what they leave is not 0. Over the pixels of an image
  lengths hardly vary and that is little; for points of the plane it is not, and `objective.power` = 0 with a large
  `objective.floor` (1 / c is a factor of the gradient alone then) is the method without either (docs/toy2d.md).
- The net's norms are as they are elsewhere, not the paper's pixel norms, and samples are drawn with the model's σ_min:
  that changes c_out by σ_min / σ, 0.003 % at σ_max.
"""

from typing import ClassVar

import torch
from torch import Tensor

from ict.config import Config
from ict.model import ConsistencyModel, scalings, spread
from ict.objectives.base import Loss, Phase, Step, add_noise, one_derivative, within
from ict.objectives.tangent import derivative, shown_as, unwrapped
from ict.weighting import adaptive_weight


class SimplifiedConsistencyTraining:
    """E[w ‖F_θ − F_θ⁻ − g / (‖g‖ + floor)‖²], ln σ ~ N(p_mean, p_std²); the loss that is shown is ‖g‖ / √d."""

    keys: ClassVar[tuple[str, ...]] = ("warmup", "floor", "power")
    beside = staticmethod(one_derivative)

    def __init__(self, config: Config):
        self.section, self.noise = config.objective, config.noise
        self.power = 1.0 if config.objective.power is None else config.objective.power

    def __call__(self, model: ConsistencyModel, images: Tensor, labels: Tensor | None, step: Step) -> Loss:
        section, noise = self.section, self.noise
        phase = step.phase or self.phase(step)
        sigma = within(step.lognormal(section.p_mean, section.p_std), noise)
        z, key = step.noise(images, sigma).to(images.dtype), step.keys()

        student = model(add_noise(images, sigma, z), sigma, labels, key)
        g = self.tangent(unwrapped(model), images, sigma, z, labels, key, share=phase.tensors["share"])
        length = g.flatten(1).norm(dim=1)
        # F_θ − F_θ⁻ is −(f_θ − f_θ⁻) / c_out: zero, but with a gradient, which goes through the model as everywhere.
        c_out = scalings(sigma, sigma_min=noise.sigma_min, sigma_data=noise.sigma_data).c_out
        miss = (student - student.detach()) / spread(c_out, student) + g / spread(length + section.floor, g)
        squared = miss.flatten(1).square().sum(dim=1)
        loss = adaptive_weight(squared, power=self.power) * squared
        figure = length / images[0].numel() ** 0.5
        return Loss(shown_as(loss, figure), dict(phase.figures), sigma=sigma, output=student)

    def tangent(
        self,
        model: ConsistencyModel,
        images: Tensor,
        sigma: Tensor,
        z: Tensor,
        labels: Tensor | None,
        key: Tensor | None,
        *,
        share: Tensor | float,
    ) -> Tensor:
        """g; with a share r of 1 it is cos t · df/dt."""
        sigma_data, length = self.noise.sigma_data, torch.sqrt(sigma**2 + self.noise.sigma_data**2)
        cos, sin = (spread(side / length, images) for side in (torch.full_like(sigma, sigma_data), sigma))
        x, dx = cos * images + sin * sigma_data * z, cos * sigma_data * z - sin * images
        c_noise = (0.25 * sigma.log()).to(torch.float32)
        minus_f, minus_slope = derivative(
            lambda x, c_noise: model.net(x, c_noise, labels, key),
            (x / sigma_data, c_noise),
            (cos * sin * dx / sigma_data, torch.full_like(c_noise, 0.25)),
        )
        share = torch.as_tensor(share, dtype=images.dtype, device=images.device)
        stable = -(cos**2) * (-sigma_data * minus_f.to(x.dtype) - dx)
        return stable - share * (cos * sin * x - sigma_data * minus_slope.to(x.dtype))

    def phase(self, step: Step) -> Phase:
        """How much of the tangent's second part counts: r = min(1, progress / warmup)."""
        ready = step.done >= self.section.warmup * step.total
        share = 1.0 if ready else step.done / (self.section.warmup * step.total)
        return Phase({"share": torch.full((), share, device=step.samples.device)}, {"share": share})
