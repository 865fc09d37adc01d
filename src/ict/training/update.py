"""What a step does with its gradient: the optimiser's step, the averages, and the average that teaches."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ict.config import Config
from ict.model import ConsistencyModel
from ict.nets.kernels import have_triton
from ict.ranks import Ranks
from ict.training.ema import WeightAverage, approach
from ict.training.muon import Muon


class Update:
    """Moves weights and averages; in one kernel for each way to move where it can, otherwise by torch's own.

    `prepare`, `launch`, `settle`. The kernels find out for themselves whether a step is to be taken, so they are under
    way before the host knows: the GPU need not wait for it.
    """

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
        followers = len(averages) + (target is not None)
        self.fuses = (
            config.speed.fused_update and model.device.type == "cuda" and have_triton() and followers <= 4
            and isinstance(optimiser, torch.optim.RAdam) and ranks.count == 1
        )  # fmt: skip
        self.muon = optimiser if isinstance(optimiser, Muon) else None
        turned = set() if self.muon is None else set(self.muon.inside)
        named = list(model.named_parameters())
        self.plain = [(name, parameter) for name, parameter in named if parameter not in turned]
        self.turned = [(name, parameter) for name, parameter in named if parameter in turned]
        self.there = {} if target is None else dict(target.named_parameters())
        self.table: Any = None  # where the numbers of RAdam's parameters lie,
        self.moves: Any = None  # … and of Muon's
        self.states: list[dict[str, Tensor]] = []
        self.scale = 1.0
        self.number = 0
        self.target_decay: float | None = None

    @torch.no_grad()
    def prepare(self, *, scale: float) -> None:
        """What can be done while the GPU still computes the gradient, which is `scale` times too large."""
        self.scale = scale
        if self.fuses and not self.ready_to_fuse():
            self.fuses = False
        some = self.turned if self.fuses else [*self.plain, *self.turned]
        gradients = [parameter.grad for _, parameter in some if parameter.grad is not None]
        if scale != 1 and gradients:
            torch._foreach_mul_(gradients, 1 / scale)
        if self.muon is not None:
            self.muon.prepare()
        if self.fuses:
            self.find()

    def ready_to_fuse(self) -> bool:
        """Whether all have a gradient and RAdam is as far with each: if not, torch keeps count of them."""
        self.states = [begin(self.optimiser, parameter) for _, parameter in self.plain]
        return all(parameter.grad is not None for _, parameter in [*self.plain, *self.turned]) and (
            self.table is not None or len({float(state["step"]) for state in self.states}) <= 1
        )

    def find(self) -> None:
        """Look where everything lies."""
        from ict.training import fused

        rows: list[list[Tensor]] = [
            [p.detach() for _, p in self.plain],
            [p.grad for _, p in self.plain if p.grad is not None],
            [state["exp_avg"] for state in self.states],
            [state["exp_avg_sq"] for state in self.states],
        ]
        self.table = self.table or fused.Table()
        self.table.find([*rows, *self.followers(self.plain)])
        if self.muon is not None:
            self.moves = self.moves or fused.Table()
            steps = [step for _, _, step in self.muon.ready or []]
            self.moves.find([[p.detach() for _, p in self.turned], steps, *self.followers(self.turned)])

    def followers(self, named: list[tuple[str, Parameter]]) -> list[list[Tensor]]:
        """The averages of some parameters, and what else goes after them."""
        rows = [[average.weights[name] for name, _ in named] for average in self.averages]
        return [*rows, [self.there[name].detach() for name, _ in named]] if self.there else rows

    @torch.no_grad()
    def launch(self, good: Tensor, *, number: int, target_decay: float | None = None) -> None:
        """Update number `number` (from 0), unless `good`, which the device may not know yet, turns out to be false."""
        assert (target_decay is None) == (self.target is None)
        self.number, self.target_decay = number, target_decay
        if not self.fuses:
            return
        from ict.training import fused

        group = self.optimiser.param_groups[0]
        rates = [1 - average.decay_at(number) for average in self.averages]
        rates += [] if target_decay is None else [1 - target_decay]
        flag = good.to(torch.int32)
        fused.update(
            self.table, flag, step=int(self.states[0]["step"].item()) + 1, lr=float(group["lr"]),
            betas=group["betas"], eps=group["eps"], scale=self.scale, rates=rates,
        )  # fmt: skip
        if self.muon is not None:
            fused.move(self.moves, flag, lr=float(group["lr"]), rates=rates)

    @torch.no_grad()
    def settle(self, *, taken: bool) -> None:
        """What is left once the host knows, too: to keep count, or all that no kernel has done."""
        if not taken:
            return
        if self.fuses:
            torch._foreach_add_([state["step"] for state in self.states], 1)
            if self.muon is not None:
                self.muon.keep()
            return
        self.optimiser.step()
        for average in self.averages:
            average.update(self.model, self.number)
        if self.target is not None and self.target_decay is not None:
            follow(self.target, self.model, decay=self.target_decay)


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
