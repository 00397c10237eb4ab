"""Peak memory of one training step: logits in chunks against all at once, at several row lengths.

python scripts/measure_memory.py --model FOLDER --lengths 2048 4096

Each case runs in a process of its own: it loads the model, makes a packed row of exactly that many tokens, runs forward
and backward, and tells its peak less what it held before the step. On a CPU that is the process's peak resident set,
on a CUDA device what torch's allocator counted. The last line of standard output is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from typing import Any

import torch

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.config import ModelConfig
from jacobi_forcing.errors import guarded
from jacobi_forcing.flexmask import row_mask
from jacobi_forcing.loading import load
from jacobi_forcing.losses import LossItems, position_losses, reduce_losses
from jacobi_forcing.packing import PackedRows
from jacobi_forcing.recipe.planning.peak import Peak, process_peak
from jacobi_forcing.tags import Tags
from jacobi_forcing.training import Collator
from jacobi_forcing.trajectories.trajectory import Trajectory

BLOCK, PROMPT = 16, 64
LOGITS = {"chunked": 512, "dense": 1 << 30}


def row(length: int, vocab: int) -> dict[str, torch.Tensor]:
    """One packed row of exactly `length` tokens: a prompt, and a response of random ids whose states are random too."""
    generator = random.Random(0)
    prompt = PROMPT + length % 2
    response = generator.choices(range(vocab), k=(length - prompt) // 2)
    states = []
    for start in range(0, len(response), BLOCK):
        block = response[start : start + BLOCK]
        states.append([[block[0], *generator.choices(range(vocab), k=len(block) - 1)], block])
    trajectory = Trajectory(0, generator.choices(range(vocab), k=prompt), response, False, BLOCK, states)
    rows = PackedRows([trajectory], max_length=length, window_size=8)
    batch = Collator()([rows[0]])
    assert batch["input_ids"].shape[1] == length
    return batch


def case(options: argparse.Namespace) -> dict[str, Any]:
    """One step in this process."""
    loaded = load(ModelConfig(options.model, device=options.device, dtype=options.dtype))
    backbone = Backbone(loaded.model.train())
    if options.checkpointing:
        loaded.model.activation_checkpointing_enable()
    batch = {name: value.to(backbone.device) for name, value in row(options.lengths[0], backbone.vocab_size).items()}
    for parameter in loaded.model.parameters():  # so that gradients, which every case has, are not in the difference
        parameter.grad = torch.zeros_like(parameter)
    tags, items = Tags.of(batch["tags"]), LossItems(**{name: batch[name] for name in LossItems._fields})
    # Buffers of kernels and of the allocator are made on a short row, and do not count.
    _step(backbone, {**row(256, backbone.vocab_size)}, LOGITS["chunked"])
    held = torch.cuda.memory_allocated() if backbone.device.type == "cuda" else _resident()
    started = time.perf_counter()
    with Peak(options.device) as peak:
        loss = _step(backbone, batch, LOGITS[options.logits])
    return {
        "tokens": options.lengths[0],
        "logits": options.logits,
        "loss_positions": int(items.query.numel()),
        "peak_bytes": round(peak.bytes - held),
        "whole_bytes": round(peak.bytes),
        "seconds": round(time.perf_counter() - started, 1),
        "loss": loss,
        "samples": int(tags.sample.max()) + 1,
    }


def _step(backbone: Backbone, batch: dict[str, torch.Tensor], chunk: int) -> float:
    batch = {name: value.to(backbone.device) for name, value in batch.items()}
    tags, items = Tags.of(batch["tags"]), LossItems(**{name: batch[name] for name in LossItems._fields})
    hidden = backbone.hidden(
        batch["input_ids"], tags.position, row_mask(backbone, tags, "noise_conditioned", flex=False)
    )
    values = position_losses(backbone, hidden, items, chunk)
    losses = reduce_losses(*values, blocks=items.blocks, targets=items.targets, ar_weight=1.0)
    losses.total.backward()
    return losses.total.item()


def _resident() -> float:
    """What this process holds now, bytes; elsewhere than on Linux its peak so far."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return float(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    except OSError:
        return process_peak()


def child(options: argparse.Namespace, length: int, logits: str) -> dict[str, Any]:
    """One case in a process of its own."""
    command = [sys.executable, __file__, "--model", options.model, "--lengths", str(length), "--logits", logits]
    command += ["--device", options.device, "--dtype", options.dtype, *(["--checkpointing"] * options.checkpointing)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{length} tokens, {logits}: {done.stderr.strip().splitlines()[-1] if done.stderr else 'killed'}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Run the cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder or hub name")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096], help="packed tokens of the row")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--checkpointing", action="store_true", help="activations are computed twice, not kept")
    parser.add_argument("--logits", choices=[*LOGITS], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.logits:
        print(json.dumps(case(options)))
        return
    cases = []
    print(f"{'tokens':>7} {'logits':>8} {'peak of the step':>18} {'seconds':>8} {'loss':>10}")
    for length in options.lengths:
        for logits in LOGITS:
            found = child(options, length, logits)
            cases.append(found)
            peak = f"{found['peak_bytes'] / 1e9:.2f} GB"
            print(f"{length:>7} {logits:>8} {peak:>18} {found['seconds']:>8} {found['loss']:>10.4f}", flush=True)
    growth = {}
    for logits in LOGITS:
        of = [found for found in cases if found["logits"] == logits]
        if len(of) > 1:
            bytes_, tokens = (of[-1][key] - of[0][key] for key in ("peak_bytes", "tokens"))
            growth[logits] = bytes_ / tokens
            print(f"growth, {logits}: {growth[logits] / 1e6:.3f} MB a token")
    settings = {"checkpointing": options.checkpointing, "device": options.device, "dtype": options.dtype}
    print(json.dumps({"model": os.path.basename(options.model), **settings, "cases": cases, "bytes_per_token": growth}))


if __name__ == "__main__":
    sys.exit(guarded(main))
