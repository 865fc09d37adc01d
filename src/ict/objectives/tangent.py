"""What the methods without a grid share: derivatives along a path, and losses known by their gradients."""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ict.model import ConsistencyModel
from ict.nets.kernels import plain_layers
from ict.precision import full_precision


def derivative(
    function: Callable[..., Tensor], at: tuple[Tensor, ...], along: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """A function's value at a point, and its derivative there along a direction (forward mode); neither has a gradient.

    Fused kernels have no forward mode, neither this project's nor those of attention: torch's plain layers have. They
    compute in float32 (or tf32): what half precision does to a derivative has not been measured.
    """
    eager = torch.compiler.set_stance("force_eager")  # torch.compile does not trace this
    with torch.no_grad(), plain_layers(), full_precision(), sdpa_kernel(SDPBackend.MATH), eager:
        return cast(tuple[Tensor, Tensor], torch.func.jvp(function, at, along))


def unwrapped(model: ConsistencyModel) -> ConsistencyModel:
    """The model itself, where it is spread over ranks: for calls that need no gradient."""
    return cast(ConsistencyModel, getattr(model, "module", model))


def pull(output: Tensor, slope: Tensor) -> Tensor:
    """A loss a sample whose gradient is ⟨slope, ∂output⟩ and whose value is ½ ‖slope‖² -> [B]."""
    return 0.5 * (output - output.detach() + slope).flatten(1).square().sum(dim=1)


def shown_as(loss: Tensor, figure: Tensor) -> Tensor:
    """The same gradient, another value: for a loss that is nearly constant by its own weight."""
    return loss + (figure - loss).detach()
