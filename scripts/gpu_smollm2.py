"""SmolLM2-135M on one GPU in nine minutes: collect, two rounds of training, measure, in bf16 and without a network.

python scripts/gpu_smollm2.py prepare            here: gather what must travel; prints the calls to make
python scripts/gpu_smollm2.py run --minutes 9    there
python scripts/gpu_smollm2.py unpack FOLDER OUT  here: the adapters, out of the folder that came back

--tiny --device cpu tries the same path with few steps. OUTPUT/gpu_smollm2.json is written after every part, so that one
that fails or meets its limit costs no other; the last line of standard output is the same JSON. What is not done when a
part's share of the time is spent is cut short, and an adapter is kept as far as it had been trained. The exit status
is 1 where a part failed. Weights are trained in fp32 under bf16 autocast, like those of every recipe in bf16.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from safetensors.torch import load_file, save_file

from carried import MIB, join, pack, sizes_of, split, unpack
from fetch_smollm2 import convert, extract
from gpu_clock import OutOfTimeError, Pace, within
from gpu_plan import TINY, Plan, Sizes
from gpu_prepare import FOLDERS, MANIFEST, add_options, prepare
from jacobi_forcing.adapter_file import SETTINGS, WEIGHTS
from jacobi_forcing.config import ModelConfig
from jacobi_forcing.entry import FOLDER as ENTRY
from jacobi_forcing.errors import guarded
from jacobi_forcing.files import new_folder, read_json, remove, write_json
from jacobi_forcing.recipe.measuring import measure_model
from jacobi_forcing.recipe.run import run_recipe
from jacobi_forcing.recipe.settings import recipe_of
from jacobi_forcing.training.trainer import last_checkpoint

NAME = "gpu_smollm2.json"
PART_BYTES = 15 * MIB
RESERVE = 10.0
"""Seconds at the end that no part is given."""
MAIN_SHARE, KEEP_SECONDS = 0.9, 6.0
FIRST_TIMED, TIMED_SHARE = 3, 0.6
"""Prompts that are timed before it is known how long one takes; the share of a part that timing may take."""


class Session:
    """The parts, and what they found.

    Args:
        options: Of `run`.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.started, self.total = time.perf_counter(), 60 * options.minutes
        self.device, self.output, self.carried = options.device, Path(options.output), options.carried
        self.work, self.base = options.work, options.model or str(options.carried / "base")
        self.plan = Plan(self.base, self.device, self.work, self.carried, TINY if options.tiny else Sizes())
        self.given, self.clock = options.model is not None, Pace()
        self.prompt_seconds: dict[str, float] = {}
        self.token_seconds = 0.0
        cuda = torch.device(self.device).type == "cuda"
        self.found: dict[str, Any] = {
            **{"device": torch.cuda.get_device_name() if cuda else self.device, "tiny": options.tiny},
            **{"torch": torch.__version__, "transformers": transformers.__version__, "minutes": options.minutes},
            **{"parts": {}, "adapters": {}},
        }

    @property
    def left(self) -> float:
        """Seconds that parts may still take."""
        return self.total - RESERVE - (time.perf_counter() - self.started)

    def parts(self) -> list[tuple[str, float, Callable[[float], Any]]]:
        """Name, share of the time and work of each part, the most wanted first."""
        parts: list[tuple[str, float, Callable[[float], Any]]] = []
        for domain in self.plan.domains():
            work = functools.partial
            first = domain == "orders"
            # Other domains have no base alone: library and `ar` of the base run beside the adapter anyway.
            parts += [(f"{domain}, base", 1.5, work(self.measure, domain, "base"))] if first else []
            parts += [
                (f"{domain}, adapter", 5.0 if first else 3.0, work(self.train, domain, "adapter")),
                (f"{domain}, adapter, measured", 2.0, work(self.measure, domain, "adapter")),
            ]
            if first:
                parts += [
                    (f"{domain}, full", 3.0, work(self.train, domain, "full")),
                    (f"{domain}, full, measured", 1.5, work(self.measure, domain, "full")),
                ]
        return parts

    def run(self) -> int:
        """All parts, each with its share of what is left; 1 where one failed."""
        self.part("base", self.left, self.unpack_base)
        if self.found["parts"]["base"]["ok"]:
            parts = self.parts()
            for index, (name, share, work) in enumerate(parts):
                self.part(name, self.left * share / sum(other for _, other, _ in parts[index:]), work)
        print(json.dumps(self.found))
        return 0 if all(part["ok"] for part in self.found["parts"].values()) else 1

    def part(self, name: str, seconds: float, work: Callable[[float], Any]) -> None:
        """Do one part, keep what it found or why it failed."""
        started = time.perf_counter()
        print(f"{name}: {seconds:.0f} s at most", file=sys.stderr, flush=True)
        try:
            result = {"ok": True, "found": work(seconds)}
        except (Exception, OutOfTimeError, SystemExit) as error:  # one part that fails must not cost the others
            traceback.print_exc()
            result = {"ok": False, "error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
        took = {"seconds": round(time.perf_counter() - started, 1), "allotted": round(seconds, 1)}
        self.found["parts"][name] = {**result, **took}
        print(f"{name}: {'done' if result['ok'] else result['error']}, {took}", file=sys.stderr, flush=True)
        write_json(self.output / NAME, self.found)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def unpack_base(self, seconds: float) -> dict[str, Any]:
        """Join, verify and convert what was carried, unless that is done."""
        folder = Path(self.base)
        if self.given or (folder / "config.json").is_file():
            return {"model": folder.name}
        folders = [self.carried / name for name in FOLDERS]
        manifests = [folder / MANIFEST for folder in folders if (folder / MANIFEST).is_file()]
        if not manifests:
            raise SystemExit(f"There is nothing in {self.carried}: run prepare, and carry what it made")
        manifest = read_json(manifests[0])
        with within(seconds):
            file = join(manifest, folders, self.work / manifest["name"])
            if file.suffix == ".whl":
                convert(extract(file, self.work / "package"), folder)
            else:
                unpack(file, folder)
        return {"file": file.name, "bytes": manifest["bytes"], "sha256": manifest["sha256"]}

    def train(self, domain: str, mode: str, seconds: float) -> dict[str, Any]:
        """A few steps to see how fast they are, then as many as there is time for; an adapter is brought home."""
        started, plan = time.perf_counter(), self.plan
        with within(seconds / 2):
            taken = run_recipe(recipe_of(plan.pace(domain, mode)), reporter=self.clock)["stages"]
        step = self.clock.seconds or taken["train-1"]["seconds"] / plan.sizes.pace_steps
        allowed = seconds - (time.perf_counter() - started) - KEEP_SECONDS
        rounds = plan.rounds(domain, mode, MAIN_SHARE * allowed, step, taken)
        found: dict[str, Any] = {"seconds_per_step": round(step, 4), "rounds": rounds}
        try:
            with within(allowed):
                report = run_recipe(recipe_of(plan.recipe(domain, mode, rounds)), reporter=self.clock)
            found["stages"] = report["stages"]
        except OutOfTimeError as error:
            found["cut_short"] = str(error)
        finally:
            if mode == "adapter":
                self.keep(domain)
        return found

    def newest(self, domain: str, mode: str) -> Path | None:
        """The folder with the weights that were trained longest, those of a checkpoint where a round was cut short."""
        for place in sorted(self.plan.folder(domain, mode).glob("round-*"), reverse=True):
            weights = WEIGHTS if mode == "adapter" else "model.safetensors"
            for folder in (place / "model", last_checkpoint(place / "checkpoints")):
                if folder is not None and (folder / weights).is_file():
                    return folder
        return None

    def keep(self, domain: str) -> None:
        """Put adapter (bf16), recipe and logs into the output, in parts that are small enough to be sent back."""
        source = self.newest(domain, "adapter")
        if source is None:
            return
        kept = self.work / f"{domain}-kept"
        with new_folder(kept) as folder:
            weights = {name: value.to(torch.bfloat16) for name, value in load_file(source / WEIGHTS).items()}
            save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
            shutil.copy(source / SETTINGS, folder / SETTINGS)
            shutil.copytree(source / ENTRY, folder / ENTRY)
            shutil.copy(self.plan.folder(domain, "adapter") / "recipe.yaml", folder)
            for log in self.plan.folder(domain, "adapter").glob("round-*/log.jsonl"):
                shutil.copy(log, folder / f"{log.parent.name}-{log.name}")
        archive = pack(kept, self.work / f"{domain}-adapter.tar")
        targets = [(self.output, size) for size in sizes_of(archive.stat().st_size, PART_BYTES)]
        self.found["adapters"][domain] = split(archive, targets)

    def measure(self, domain: str, what: str, seconds: float) -> dict[str, Any]:
        """Quality and speed of the base, of the base with the adapter, or of the new weights."""
        changes: dict[str, Any] = {}
        if what != "base":
            trained = self.work / f"{domain}-kept" if what == "adapter" else self.newest(domain, what)
            if trained is None or not trained.is_dir():
                raise RuntimeError("nothing was trained that could be measured")
            changes = {"adapter" if what == "adapter" else "name": str(trained)}
        model = ModelConfig.from_dict(self.plan.model(**changes))
        sizes = (16,) if what == "base" else (16, 32)
        with within(seconds):
            asked = self.plan.evaluation(domain, self.timed(domain, seconds), sizes)
            found = measure_model(model, asked, label=f"{domain}, {what}", reporter=self.clock)
        if (took := self.clock.seconds) is not None:
            self.prompt_seconds.setdefault(domain, took)
            tokens = found["decoders"][0]["tokens"] / asked.speed_prompts
            self.token_seconds = max(self.token_seconds, took / tokens)
        return found

    def timed(self, domain: str, seconds: float) -> int:
        """Prompts that can be timed: by what one took before, or by the longest answer where the domain is new."""
        one = self.prompt_seconds.get(domain, self.token_seconds * self.plan.tokens(domain))
        return int(TIMED_SHARE * seconds / one) if one else FIRST_TIMED


def bring_home(options: argparse.Namespace) -> None:
    """The adapters out of the folder that came back, as folders that `--adapter` takes."""
    for domain, manifest in read_json(options.folder / NAME)["adapters"].items():
        with tempfile.TemporaryDirectory() as temporary:
            archive = join(manifest, [options.folder], Path(temporary) / manifest["name"])
            print(unpack(archive, options.out / domain))


def main() -> int:
    """Do what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    add_options(verbs.add_parser("prepare", help="here, in the root of the repository: gather what must travel"))
    run = verbs.add_parser("run", help="there: all parts")
    run.add_argument("--carried", type=Path, default=Path("runs/gpu"), help="the folder that `prepare` filled")
    run.add_argument("--model", help="a model that is there already, in place of the carried one")
    run.add_argument("--work", type=Path, default=Path("runs/gpu-work"), help="folder to work in; emptied first")
    run.add_argument("--output", default=os.environ.get("OUT", "."), help=f"folder of {NAME} and the adapters")
    run.add_argument("--minutes", type=float, default=9.0, help="wall-clock limit of the whole run")
    run.add_argument("--device", default="cuda")
    run.add_argument("--tiny", action="store_true", help="few prompts and steps, to try the script")
    home = verbs.add_parser("unpack", help="here: the adapters, out of the folder that came back")
    home.add_argument("folder", type=Path)
    home.add_argument("out", type=Path)
    options = parser.parse_args()
    if options.verb == "prepare":
        prepare(options)
        return 0
    if options.verb == "unpack":
        bring_home(options)
        return 0
    if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
        sys.exit("There is no CUDA device here; --tiny --device cpu tries the script")
    remove(options.work)
    return Session(options).run()


if __name__ == "__main__":
    sys.exit(guarded(main))
