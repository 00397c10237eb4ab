"""Whatever an adapter drafts, the text is the base's: a random one on any model, every decoder, greedy and sampled.

    python scripts/check_adapter_exact.py --model FOLDER --source train.jsonl --field question --limit 4

Greedy texts are compared with the library's own `generate` of the untouched base, sampled ones with its decoder `ar`
and the same seeds. An adapter of random weights drafts wrong nearly always, so that most of what is verified is turned
down. Ends with 1 if a text differs. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys

import torch

from jacobi_forcing import DecodeConfig, GatedAdapter, GenerateOutput, generate, provenance
from jacobi_forcing.config import ModelConfig, PromptsConfig
from jacobi_forcing.errors import guarded
from jacobi_forcing.loading import load
from jacobi_forcing.trajectories.prompts import load_prompts

DECODERS = ("ar", "jacobi", "window", "recycle", "multiblock")


def main() -> None:
    """Compare, print a table and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", required=True, help="folder or hub name")
    parser.add_argument("--source", default="builtin:word-problems", help="prompts, as in a recipe")
    parser.add_argument("--field", default="prompt", help="key that holds the prompt")
    parser.add_argument("--limit", type=int, default=4, help="prompts")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1], help="of sampled texts")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--scale", type=float, default=0.05, help="deviation of the adapter's weights")
    asked = parser.parse_args()
    loaded = load(ModelConfig(name=asked.model))
    source = PromptsConfig(source=asked.source, field=asked.field, limit=asked.limit)
    prompts = [torch.tensor([prompt.ids]) for prompt in load_prompts(source, loaded.tokenizer)]
    ways = [None, *asked.seeds]

    def text(ids: torch.Tensor, decoder: str, seed: int | None) -> tuple[list[int], int]:
        options = {"do_sample": seed is not None, "max_new_tokens": asked.max_new_tokens}
        if seed is not None:
            options |= {"temperature": 0.8, "top_k": 50}
        decode = DecodeConfig(decoder, asked.block_size, sample_seed=seed or 0)  # type: ignore[arg-type]  # a name of ours
        mask = torch.ones_like(ids)
        out = generate(loaded.model, ids, attention_mask=mask, decode=decode, return_dict_in_generate=True, **options)
        assert isinstance(out, GenerateOutput) and out.sequences is not None and out.stats is not None
        return out.sequences[0].tolist(), out.stats.forwards

    expected = {}
    for number, ids in enumerate(prompts):
        plain = type(loaded.model).generate(  # type: ignore[attr-defined]  # a mixin's
            loaded.model,
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=asked.max_new_tokens,
        )
        expected[number, None] = plain[0].tolist()
        for seed in asked.seeds:
            expected[number, seed] = text(ids, "ar", seed)[0]
    adapter = GatedAdapter.attach(loaded.model, rank=asked.rank)
    torch.manual_seed(0)
    for weight in adapter.parameters():
        torch.nn.init.normal_(weight, std=asked.scale)
    equal = {}
    print("| decoder | greedy | sampled | tokens per forward |")
    print("| --- | --- | --- | --- |")
    for decoder in DECODERS:
        tokens = forwards = 0
        same: dict[bool, list[bool]] = {False: [], True: []}
        for number, ids in enumerate(prompts):
            for seed in ways:
                found, count = text(ids, decoder, seed)
                same[seed is not None].append(found == expected[number, seed])
                tokens, forwards = tokens + len(found) - ids.shape[1], forwards + count
        equal[decoder] = {"greedy": same[False], "sampled": same[True]}
        cells = [f"{sum(part)}/{len(part)}" for part in same.values()]
        print(f"| {decoder} | {cells[0]} | {cells[1]} | {tokens / forwards:.2f} |")
    print(json.dumps({"kind": "adapter-exact", "equal": equal, "provenance": provenance.collect(model=asked.model)}))
    sys.exit(0 if all(all(part) for ways in equal.values() for part in ways.values()) else 1)


if __name__ == "__main__":
    sys.exit(guarded(main))
