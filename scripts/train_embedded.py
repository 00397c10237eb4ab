"""Train the embedded base model from nothing, on CPU, deterministically.

Usage::

    python scripts/make_embedded_tokenizer.py --out src/jacobi_forcing/embedded/base
    python scripts/train_embedded.py --out src/jacobi_forcing/embedded/base

Hidden matrices are optimised by Muon and everything else by AdamW, both from torch; the learning rate warms up and then
falls linearly to zero. Loss is taken on the answer only, end-of-text token included. One JSON line per log point
goes to `--log` (kept in `scripts/`), the last one with the solve rate on 1,000 held-out problems.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from jacobi_forcing.embedded.problems import is_solved, problems


def make_model(tokenizer: PreTrainedTokenizerBase, seed: int) -> LlamaForCausalLM:
    """A four-layer Llama of 1.4 M parameters with tied embeddings."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=160,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=5,
        num_key_value_heads=5,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def batches(
    tokenizer: PreTrainedTokenizerBase, size: int, seed: int
) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Endless batches, each as two (ids, labels) halves [size / 2, longest] sorted by length to save padding.

    Padding stands on the right; labels are -100 outside the answer.
    """
    stream = problems("train", seed)
    while True:
        drawn = [next(stream) for _ in range(size)]
        prompts = tokenizer([p.prompt for p in drawn])["input_ids"]
        answers = tokenizer([p.completion for p in drawn])["input_ids"]
        rows = [(p, [*a, tokenizer.eos_token_id]) for p, a in zip(prompts, answers, strict=True)]
        rows.sort(key=lambda row: len(row[0]) + len(row[1]))
        yield [pad_rows(half, tokenizer.pad_token_id) for half in (rows[: size // 2], rows[size // 2 :])]


def pad_rows(rows: list[tuple[list[int], list[int]]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(prompt, answer) id lists as one (ids, labels) pair [rows, longest]."""
    longest = max(len(p) + len(a) for p, a in rows)
    ids = torch.full((len(rows), longest), pad)
    labels = torch.full((len(rows), longest), -100)
    for i, (p, a) in enumerate(rows):
        ids[i, : len(p) + len(a)] = torch.tensor(p + a)
        labels[i, len(p) : len(p) + len(a)] = torch.tensor(a)
    return ids, labels


@torch.no_grad()
def solve_rate(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, count: int, seed: int = 1) -> float:
    """Share of `count` held-out problems that greedy decoding solves."""
    drawn = list(problems("heldout", seed, count))
    solved = 0
    for start in range(0, count, 250):
        chunk = drawn[start : start + 250]
        inputs = tokenizer([p.prompt for p in chunk], return_tensors="pt", padding=True)
        inputs.pop("token_type_ids", None)
        out = model.generate(**inputs, max_new_tokens=160, do_sample=False)
        texts = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        solved += sum(is_solved(text, p.result) for text, p in zip(texts, chunk, strict=True))
    return solved / count


def optimisers(model: LlamaForCausalLM, muon_lr: float, adam_lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embeddings and norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [
        torch.optim.Muon(matrices, lr=muon_lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=adam_lr, weight_decay=0.0, betas=(0.9, 0.98)),
    ]


def train(args: argparse.Namespace) -> None:
    """Run the whole training and write model and log."""
    torch.use_deterministic_algorithms(True)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer or args.out)
    model = make_model(tokenizer, args.seed)
    optims = optimisers(model, args.muon_lr, args.adam_lr)

    def factor(step: int) -> float:
        return min((step + 1) / args.warmup, (args.steps - step) / (args.steps - args.warmup))

    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, factor) for o in optims]
    stream = batches(tokenizer, args.batch_size, args.seed)
    begin = time.monotonic()
    with args.log.open("w") as log:

        def write(**entry: object) -> None:
            line = json.dumps({**entry, "seconds": round(time.monotonic() - begin, 1)})
            print(line, flush=True)
            log.write(line + "\n")
            log.flush()

        write(parameters=sum(p.numel() for p in model.parameters()), **{k: str(v) for k, v in vars(args).items()})
        mean = 0.0
        for step in range(1, args.steps + 1):
            loss = torch.zeros(())
            halves = next(stream)
            answer_tokens = sum(int((labels != -100).sum()) for _, labels in halves)
            for ids, labels in halves:
                # Padding stands on the right, where causal attention never looks: no mask, so the fused kernel is used.
                part = model(input_ids=ids, labels=labels, num_items_in_batch=answer_tokens).loss
                part.backward()
                loss += part.detach()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optim, scheduler in zip(optims, schedulers, strict=True):
                optim.step()
                optim.zero_grad()
                scheduler.step()
            mean += loss.item() / args.log_every
            if step % args.log_every == 0:
                rate = solve_rate(model.eval(), tokenizer, 200) if step % args.eval_every == 0 else None
                model.train()
                write(step=step, loss=round(mean, 5), solve_rate=rate)
                mean = 0.0
                if rate is not None:
                    model.save_pretrained(args.out)
        write(step=args.steps, solve_rate_1000=solve_rate(model.eval(), tokenizer, 1000))
    model.save_pretrained(args.out)


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("src/jacobi_forcing/embedded/base"))
    parser.add_argument("--tokenizer", type=Path, default=None, help="folder of the tokenizer; --out by default")
    parser.add_argument("--log", type=Path, default=Path("scripts/train_embedded.log.jsonl"))
    parser.add_argument("--steps", type=int, default=3200)
    parser.add_argument("--batch-size", type=int, default=32, help="problems per step")
    parser.add_argument("--warmup", type=int, default=100, help="steps")
    parser.add_argument("--muon-lr", type=float, default=1e-2)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--log-every", type=int, default=50, help="steps")
    parser.add_argument("--eval-every", type=int, default=400, help="steps")
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
