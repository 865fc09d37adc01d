"""What a step does with its gradient: the optimiser's step, the averages, and the average that teaches."""

import torch
from torch import Tensor

from ict.config import Config
from ict.model import ConsistencyModel
from ict.nets.kernels import have_triton
from ict.ranks import Ranks
from ict.training.ema import WeightAverage, approach
from ict.training.muon import Muon


class Update:
    """Moves weights and averages; in one kernel where it can, otherwise by torch's own."""

    def __init__(
        self,
        config: Config,
        model: ConsistencyModel,
        optimiser: torch.optim.Optimizer,
        averages: list[WeightAverage],
        target: ConsistencyModel | None,
        *,
        ranks: Ranks,
    ):
        self.model, self.optimiser, self.averages, self.target = model, optimiser, averages, target
        slots = len(averages) + (target is not None)
        self.fuses = (
            config.speed.fused_update and model.device.type == "cuda" and have_triton() and slots <= 4
            and type(optimiser) is torch.optim.RAdam and ranks.count == 1
        )  # fmt: skip
        self.named = list(model.named_parameters())
        self.there = {} if target is None else dict(target.named_parameters())
        self.table = None
        self.scale = 1.0

    @torch.no_grad()
    def prepare(self, *, scale: float) -> None:
        """What can be done while the GPU still computes the gradient, which is `scale` times too large."""
        self.scale = scale
        if not self.fuses:
            if scale != 1:
                torch._foreach_mul_([p.grad for p in self.model.parameters() if p.grad is not None], 1 / scale)
            if isinstance(self.optimiser, Muon):
                self.optimiser.prepare()
            return
        from ict.training import fused

        named = self.named
        self.states = [begin(self.optimiser, parameter) for _, parameter in named]
        whole = all(parameter.grad is not None for _, parameter in named)
        if not whole or (self.table is None and len({float(state["step"]) for state in self.states}) > 1):
            self.fuses = False  # each parameter has had updates of its own: torch keeps count of them
            self.prepare(scale=scale)
            return
        rows: list[list[Tensor]] = [
            [p.detach() for _, p in named],
            [p.grad for _, p in named if p.grad is not None],
            [state["exp_avg"] for state in self.states],
            [state["exp_avg_sq"] for state in self.states],
            *([average.weights[name] for name, _ in named] for average in self.averages),
        ]
        if self.there:
            rows.append([self.there[name] for name, _ in named])
        self.table = self.table or fused.Table()
        self.table.find(rows)

    @torch.no_grad()
    def take(self, *, number: int, target_decay: float | None = None) -> None:
        """Update number `number` (from 0); after `prepare`."""
        if self.fuses:
            self.take_fused(number, target_decay)
            return
        self.optimiser.step()
        for average in self.averages:
            average.update(self.model, number)
        if self.target is not None:
            assert target_decay is not None
            follow(self.target, self.model, decay=target_decay)

    def take_fused(self, number: int, target_decay: float | None) -> None:
        from ict.training import fused

        (group,) = self.optimiser.param_groups
        rates = [1 - average.decay_at(number) for average in self.averages]
        if self.target is not None:
            assert target_decay is not None
            rates.append(1 - target_decay)
        assert self.table is not None
        fused.update(
            self.table, step=int(self.states[0]["step"].item()) + 1, lr=float(group["lr"]), betas=group["betas"],
            eps=group["eps"], scale=self.scale, rates=rates,
        )  # fmt: skip
        torch._foreach_add_([state["step"] for state in self.states], 1)


def begin(optimiser: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """The optimiser's state for one parameter, as torch's RAdam keeps it."""
    state = optimiser.state[parameter]
    if not state:
        state["step"] = torch.tensor(0.0, dtype=torch.float32)
        for moment in ("exp_avg", "exp_avg_sq"):
            state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    return state


def follow(target: ConsistencyModel, model: ConsistencyModel, *, decay: float) -> None:
    """θ⁻ ← μ θ⁻ + (1 − μ) θ (§2)."""
    approach(target.state_dict(), model, decay=decay)
