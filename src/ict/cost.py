"""What a net costs, counted on the meta device: no memory is taken and nothing is computed."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from ict.config import ObjectiveConfig
from ict.model import ConsistencyModel, ModelSpec, build_model
from ict.objectives import find_method


@dataclass(frozen=True)
class Cost:
    """Of one image, in floating-point operations (a multiplication and an addition are two) and bytes."""

    parameters: int
    forward: int  # operations of one network call
    backward: int  # of the way back through it
    activations: int  # bytes that the student keeps for its backward pass, in float32

    def training(self, objective: ObjectiveConfig) -> int:
        """Operations of one training image: the student there and back, and what the method calls beside it."""
        return self.forward * (1 + sum(find_method(objective).beside(objective).values())) + self.backward

    def training_memory(self, averages: int, *, optimiser: str = "radam") -> int:
        """Bytes of float32 weights, gradients, what the optimiser keeps of each weight, and the averages.

        RAdam has two moments. Muon has a momentum and a step, and while it finds them anew, both twice.
        """
        return 4 * self.parameters * (1 + 1 + {"radam": 2, "muon": 4}[optimiser] + averages)


def meta_model(spec: ModelSpec) -> ConsistencyModel:
    """A model of the right shapes that holds no weights."""
    with torch.device("meta"):
        return build_model(spec)


def measure(spec: ModelSpec) -> Cost:
    """Count one image through a model in training mode."""
    model = meta_model(spec).train()
    kept: dict[int, tuple[Tensor, int]] = {}
    weights = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = (tensor, storage.nbytes())  # held, so that no address is used twice
        return tensor

    with torch.device("meta"):
        x, sigma = torch.zeros(1, *model.image_shape), torch.ones(1)
        label, key = torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long)
        with FlopCounterMode(display=False) as forward, saved_tensors_hooks(keep, lambda tensor: tensor):
            out = model(x, sigma, label if model.classes else None, key)
        with FlopCounterMode(display=False) as backward:
            out.sum().backward()
    return Cost(
        parameters=model.size,
        forward=forward.get_total_flops(),
        backward=backward.get_total_flops(),
        activations=sum(size for _, size in kept.values()),
    )
