"""Muon for the layers' matrices and AdamW for the rest, as one optimiser that the library's trainer can drive.

Both come from torch. On small models Muon learns from far fewer responses than AdamW; the paper uses AdamW.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

ADAM_SHARE = 0.3
"""Learning rate of the AdamW part as a share of Muon's; as in the training of the embedded base model."""


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon on two-dimensional weights outside the embeddings and the head, AdamW on all others.

    Args:
        model: Its parameters that require gradients are optimised.
        lr: Learning rate of Muon, scaled to match AdamW's update size; AdamW gets `ADAM_SHARE` of it.
        betas: Of AdamW.
        weight_decay: Of both.
    """

    def __init__(self, model: PreTrainedModel, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        outside = {id(p) for p in _ends(model)}
        trained = [p for p in model.parameters() if p.requires_grad]
        matrices = [p for p in trained if p.ndim == 2 and id(p) not in outside]
        others = [p for p in trained if p.ndim != 2 or id(p) in outside]
        # LoRA trains matrices alone; torch takes no optimiser of nothing.
        groups: list[dict[str, Any]] = [{"params": matrices, "lr": lr}, {"params": others, "lr": lr * ADAM_SHARE}]
        super().__init__([group for group in groups if group["params"]], {"lr": lr})
        self.parts: list[torch.optim.Optimizer] = []
        if matrices:
            muon = torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
            self.parts.append(muon)
        if others:
            self.parts.append(torch.optim.AdamW(others, lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # no overload
        """One step of both; the learning rates are those that a scheduler left in `param_groups`."""
        for part, group in zip(self.parts, self.param_groups, strict=True):
            part.param_groups[0]["lr"] = group["lr"]
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """The states of both, and the groups that a scheduler changes."""
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        return {"parts": [part.state_dict() for part in self.parts], "groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        for group, saved in zip(self.param_groups, state_dict["groups"], strict=True):
            group.update(saved)


def _ends(model: PreTrainedModel) -> list[nn.Parameter]:
    """Weights of the embeddings and the head, tied or not."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return [p for module in (*tables, model.get_output_embeddings()) for p in module.parameters()]
