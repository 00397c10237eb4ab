"""One look at a GPU: FlexAttention against the dense reference, and steps of 2k and 16k rows on models of 0.5B and 7B.

python scripts/gpu_check.py --output FOLDER            on a CUDA device with some 140 GB, a few minutes
python scripts/gpu_check.py --output FOLDER --tiny --device cpu    the same path on tiny models, to try the script

Models have the shape of Qwen2 and random weights in bfloat16, so nothing is downloaded. FOLDER/gpu_check.json is
written after every part, so that a part that fails or a limit that is met costs no other; the last line of standard
output is the same JSON. FOLDER is $OUT where no other is named. The exit status is 1 where a part failed.

Parts: `exactness`: losses and gradients of a packed row through FlexAttention and through a dense additive mask, fp32.
`compilations`: graphs compiled over twenty row lengths. One for each model and length: median seconds and peak memory
of training steps (forward, backward, optimiser) after two warm-ups; 0.5B trains all weights with AdamW, 7B a LoRA
adapter with activation checkpointing.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.bench.cost import synchronise
from jacobi_forcing.config import PeftSettings
from jacobi_forcing.errors import guarded
from jacobi_forcing.files import write_json
from jacobi_forcing.flexmask import bucket_lengths, row_mask
from jacobi_forcing.losses import Losses, LossItems, position_losses, reduce_losses
from jacobi_forcing.mask import KINDS
from jacobi_forcing.packing import PackedRows
from jacobi_forcing.peft_models import attach
from jacobi_forcing.recipe.planning.peak import Peak
from jacobi_forcing.tags import Tags
from jacobi_forcing.training import Collator
from jacobi_forcing.trajectories.trajectory import Trajectory

BLOCK = 16
WARM_UP, TIMED = 2, 5
SHAPES: dict[str, dict[str, Any]] = {
    "0.5B": {
        **{"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2},
        **{"intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True},
    },
    "7B": {
        **{"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4},
        **{"intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False},
    },
}
TINY: dict[str, Any] = {
    **{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"intermediate_size": 96, "vocab_size": 512},
}


class Check:
    """The parts, and what they found.

    Args:
        device: Where to run.
        tiny: Tiny models and rows, to try the script.
        file: Written after every part.
    """

    def __init__(self, device: torch.device, tiny: bool, file: Path) -> None:
        self.device, self.tiny, self.file = device, tiny, file
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        self.found: dict[str, Any] = {"device": name, "torch": torch.__version__, "tiny": tiny, "parts": {}}

    def part(self, name: str, work: Callable[[], Any]) -> None:
        """Run one part, keep what it found or why it failed."""
        started = time.perf_counter()
        try:
            result = {"ok": True, "found": work()}
        except Exception as error:  # one part that fails must not cost the others
            traceback.print_exc()
            result = {
                "ok": False,
                "error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            }
        self.found["parts"][name] = {**result, "seconds": round(time.perf_counter() - started, 1)}
        print(f"{name}: {json.dumps(self.found['parts'][name])}", file=sys.stderr, flush=True)
        write_json(self.file, self.found)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def model(self, size: str, dtype: torch.dtype) -> PreTrainedModel:
        """A random model of a size, or a tiny one."""
        shape = TINY if self.tiny else SHAPES[size]
        config = AutoConfig.for_model("qwen2", **shape, max_position_embeddings=32768, attn_implementation="sdpa")
        torch.manual_seed(0)
        with torch.device(self.device):
            made: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
        return made.train()

    def batch(self, length: int, longest: int, vocab: int, seed: int = 0) -> dict[str, torch.Tensor]:
        """A row of about `length` tokens of several samples, padded as training pads it."""
        generator = random.Random(seed)
        trajectories, left, sample = [], length, 0
        while left > 3 * BLOCK:
            prompt = min(64, left // 4)
            response = min((left - prompt) // 2, max(BLOCK, length // 6))
            text = generator.choices(range(vocab), k=response)
            blocks = [text[start : start + BLOCK] for start in range(0, response, BLOCK)]
            states = [[[b[0], *generator.choices(range(vocab), k=len(b) - 1)], b] for b in blocks]
            ids = generator.choices(range(vocab), k=prompt)
            trajectories.append(Trajectory(sample, ids, text, False, BLOCK, states))
            left, sample = left - prompt - 2 * response, sample + 1
        # Every block is noisy: so all masks differ, and there is something to learn.
        rows = PackedRows(trajectories, max_length=longest, window_size=2, t_min=0.6)
        batch = Collator(buckets=bucket_lengths(longest))([rows[0]])
        return {name: value.to(self.device) for name, value in batch.items()}

    def losses(self, backbone: Backbone, batch: dict[str, torch.Tensor], mask: str, flex: bool) -> Losses:
        """The losses of a batch, through FlexAttention or a dense mask."""
        tags, items = Tags.of(batch["tags"]), LossItems(**{name: batch[name] for name in LossItems._fields})
        hidden = backbone.hidden(batch["input_ids"], tags.position, row_mask(backbone, tags, mask, flex=flex))
        values = position_losses(backbone, hidden, items)
        return reduce_losses(*values, blocks=items.blocks, targets=items.targets, ar_weight=1.0)

    def exactness(self) -> dict[str, Any]:
        """Largest differences between both forms of the mask, beside the size of what is compared; fp32, all masks."""
        shape = {**TINY, "num_hidden_layers": 4, "hidden_size": 128}
        config = AutoConfig.for_model("qwen2", **shape, max_position_embeddings=4096, attn_implementation="sdpa")
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).to(self.device).train()
        backbone, batch = (
            Backbone(model),
            self.batch(380 if self.tiny else 900, 384 if self.tiny else 1024, TINY["vocab_size"]),
        )
        backward = self.device.type == "cuda"  # FlexAttention has none elsewhere
        found = {}
        for mask in KINDS:
            totals, grads = [], []
            for flex in (False, True):
                model.zero_grad()
                with backbone.flex() if flex else contextlib.nullcontext(), torch.set_grad_enabled(backward):
                    total = self.losses(backbone, batch, mask, flex).total
                    if backward:
                        total.backward()
                totals.append(total.item())
                grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
            entry = {"dense": totals[0], "flex": totals[1], "difference": abs(totals[0] - totals[1])}
            if backward:
                entry["largest_gradient"] = max(float(g.abs().max()) for g in grads[0])
                entry["gradient_difference"] = max(float((a - b).abs().max()) for a, b in zip(*grads, strict=True))
                assert entry["gradient_difference"] < 5e-3 * entry["largest_gradient"], entry
            assert entry["difference"] < 1e-3 * max(1.0, abs(totals[0])), entry
            found[mask] = entry
        return found

    def compilations(self) -> dict[str, Any]:
        """Graphs that dynamo compiles over twenty row lengths."""
        torch._dynamo.reset()
        counters.clear()
        backbone = Backbone(self.model("0.5B", torch.bfloat16 if self.device.type == "cuda" else torch.float32))
        longest, generator, padded = 512 if self.tiny else 2048, random.Random(0), set()
        for seed in range(20):
            batch = self.batch(generator.randint(longest // 8, longest), longest, backbone.vocab_size, seed)
            padded.add(batch["input_ids"].shape[1])
            with torch.no_grad(), backbone.flex():
                self.losses(backbone, batch, KINDS[0], True)
        graphs = int(counters["stats"]["unique_graphs"])
        assert graphs <= 3, graphs
        return {"lengths": 20, "padded_to": sorted(padded), "graphs": graphs}

    def step(self, size: str, length: int, flex: bool) -> dict[str, Any]:
        """Seconds and peak memory of a training step."""
        with Peak(str(self.device)) as peak:
            dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
            model: Any = self.model(size, dtype)
            if size == "7B":
                model.activation_checkpointing_enable()
                model.enable_input_require_grads()
                model = attach(model, PeftSettings("lora", rank=16))
            backbone = Backbone(model)
            batch = self.batch(length, length, backbone.vocab_size)
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
            seconds, total = [], torch.zeros(())
            for _ in range(WARM_UP + (1 if self.tiny else TIMED)):
                synchronise(self.device)
                started = time.perf_counter()
                with backbone.flex() if flex else contextlib.nullcontext():
                    total = self.losses(backbone, batch, KINDS[0], flex).total
                    total.backward()
                optimizer.step()
                optimizer.zero_grad()
                synchronise(self.device)
                seconds.append(time.perf_counter() - started)
        tokens, median = int((Tags.of(batch["tags"]).sample >= 0).sum()), statistics.median(seconds[WARM_UP:])
        return {
            "tokens": tokens,
            "padded_to": batch["input_ids"].shape[1],
            "seconds": round(median, 4),
            "first_seconds": round(seconds[0], 2),
            "tokens_per_second": round(tokens / median, 1),
            "peak_bytes": round(peak.bytes),
            "loss": total.item(),
            "trained": "lora, checkpointing" if size == "7B" else "all weights",
        }


def main() -> int:
    """Run all parts; 1 where one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default=os.environ.get("OUT", "."), help="folder of gpu_check.json")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models and rows, to try the script")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("There is no CUDA device here; --tiny --device cpu tries the script")
    check = Check(device, options.tiny, Path(options.output) / "gpu_check.json")
    check.part("exactness", check.exactness)
    check.part("compilations", check.compilations)
    lengths = (256, 512) if options.tiny else (2048, 16384)
    for size in SHAPES:
        for length in lengths:
            # Dense beside it where it is no gigabyte: what the rule saves.
            for flex in (True, False) if length == lengths[0] or size == "0.5B" else (True,):
                if flex and device.type != "cuda":
                    continue  # no backward pass
                name = f"{size}, {length} tokens, {'flex' if flex else 'dense mask'}"
                check.part(name, functools.partial(check.step, size, length, flex))
    print(json.dumps(check.found))
    return 0 if all(part["ok"] for part in check.found["parts"].values()) else 1


if __name__ == "__main__":
    sys.exit(guarded(main))
