"""What the tests of several processes run: on its own, in one process, or by torchrun in two; and how to start that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from collecting import run
from jacobi_forcing.backbone import Backbone
from jacobi_forcing.processes import is_main
from jacobi_forcing.training import AdapterConfig, AdapterTrainer, JacobiForcingConfig, JacobiForcingTrainer
from jacobi_forcing.trajectories import collect as collect_module
from jacobi_forcing.trajectories.collector import CollectWork
from jacobi_forcing.trajectories.executors import ShardResult, Tell
from reference_losses import random_trajectory
from tiny_models import tiny_model

N = 4
# Seven samples of unequal lengths, the first of them shorter than a block; mode full packs them into five rows.
TRAJECTORIES = [random_trajectory(sample, 3 + sample, (3, 11, 8, 14, 6, 13, 9)[sample], N) for sample in range(7)]
COMMON: dict[str, Any] = {
    "block_size": N,
    "max_steps": 5,
    "learning_rate": 0.1,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
    "optim": "sgd",
    "logging_steps": 1,
    "use_cpu": True,
    "disable_tqdm": True,
    "report_to": "none",
    "dataloader_pin_memory": False,
    "ddp_find_unused_parameters": False,
}


def full(folder: Path, batch: int, resume: str | None = None, **changes: Any) -> JacobiForcingTrainer:
    """Train a whole model."""
    own = {"max_length": 40, "window_size": 4, "per_device_train_batch_size": batch, "schedule_phase": "random"}
    args = JacobiForcingConfig(output_dir=str(folder), **{**COMMON, **own, "save_strategy": "no", **changes})
    trainer = JacobiForcingTrainer(tiny_model("llama"), args, TRAJECTORIES)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def adapter(folder: Path, batch: int, resume: str | None = None, **changes: Any) -> AdapterTrainer:
    """Train a gated adapter."""
    own = {"rank": 3, "lines_per_response": 3, "max_sweeps": 2, "per_device_train_batch_size": batch}
    args = AdapterConfig(output_dir=str(folder), **{**COMMON, **own, "save_strategy": "no", **changes})
    trainer = AdapterTrainer(tiny_model("llama"), args, TRAJECTORIES)
    writes: list[Path] = []
    save = trainer.adapter.save
    trainer.adapter.save = lambda place, *rest: (writes.append(Path(place)), save(place, *rest))[1]  # type: ignore[method-assign]  # watched
    trainer.train(resume_from_checkpoint=resume)
    assert is_main() or not writes, "only the main process writes"
    return trainer


def outcome(trainer: Any) -> dict[str, Any]:
    """What is compared: the trained weights and the figures logged."""
    weights: dict[str, Tensor] = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
    return {"weights": weights, "log": [entry for entry in trainer.state.log_history if "loss" in entry]}


def sharded_gradients(folder: Path) -> dict[str, Tensor]:
    """Gradients of one step of FSDP2, put together again: through the forward of the wrapped model, as in training."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from jacobi_forcing.training.sharing import within_forward

    args = JacobiForcingConfig(output_dir=str(folder), **{**COMMON, "max_length": 40, "window_size": 4})
    model = tiny_model("llama")
    trainer = JacobiForcingTrainer(model, args, TRAJECTORIES)
    rows = trainer.train_dataset.rows
    mine = [rows[index] for index in range(len(rows))][dist.get_rank() :: 2]
    batch = trainer.data_collator(mine)
    counts = torch.tensor([int(batch["blocks"]), int(batch["targets"])])
    dist.all_reduce(counts)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    losses = within_forward(model, model, trainer.losses, batch, *counts.tolist())
    (losses.total * 2).backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


class Doomed:
    """Work that kills its process with shard 1 in hand, once; it keeps a list of the shards that were begun."""

    filters: tuple[str, ...] = ()

    def __init__(self, work: CollectWork, folder: Path) -> None:
        self.work, self.folder = work, folder

    def __call__(self, shard: int, samples: Sequence[int], tell: Tell | None = None) -> ShardResult:
        with (self.folder / "begun").open("a") as begun:
            begun.write(f"{shard}\n")
        result = self.work(shard, samples, tell)
        if shard == 1 and not (self.folder / "died").exists():
            (self.folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return result


def shared_backbone() -> Backbone:
    """The model that collects, made anew in an actor."""
    torch.set_num_threads(1)
    return Backbone(tiny_model("llama"))


def collect_shared(folder: Path) -> None:
    """A collection by as many processes as there are; the kill comes to one of them."""
    real = collect_module.TorchrunExecutor.run
    killed = sys.argv[2] == "killed" and not is_main()
    if killed:
        collect_module.TorchrunExecutor.run = lambda self, work, *rest: real(self, Doomed(work, folder), *rest)  # type: ignore[method-assign]  # watched
    run(tiny_model("llama"), folder / "out", shard_size=1)


def torchrun(folder: Path, *arguments: str, processes: int = 2, **environment: str) -> subprocess.CompletedProcess[str]:
    """Start something in several processes on this machine and wait for it."""
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return subprocess.run(
        [*command, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def main(folder: Path) -> None:
    """Everything that is compared with one process, in one go: starting processes is what takes long."""
    steps = {"save_strategy": "steps", "save_steps": 3}
    found = {
        "full": outcome(full(folder / "full", 2, **steps)),
        "resumed": outcome(full(folder / "again", 2, resume=str(folder / "full" / "checkpoint-3"))),
        "accumulated": outcome(full(folder / "accumulated", 1, gradient_accumulation_steps=2)),
        "on_policy": outcome(full(folder / "on_policy", 2, states="on_policy")),
        "adapter": outcome(adapter(folder / "adapter", 2, **steps)),
        "adapter resumed": outcome(adapter(folder / "more", 2, resume=str(folder / "adapter" / "checkpoint-3"))),
        "sharded": sharded_gradients(folder / "sharded"),
    }
    if is_main():
        torch.save(found, folder / "found.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[2:]:
        collect_shared(Path(sys.argv[1]))
    else:
        main(Path(sys.argv[1]))
