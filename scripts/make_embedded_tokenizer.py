"""Train the embedded model's tokenizer: byte-level BPE, digits one by one, so that any text can be encoded."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from jacobi_forcing.embedded.problems import problems


def build(vocab_size: int, samples: int) -> PreTrainedTokenizerFast:
    """Train on `samples` problems of the training split; token 0 pads and token 1 ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d| ?[A-Za-z]+| ?[^\sA-Za-z\d]|\s"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = (p.prompt + p.completion for p in itertools.islice(problems("train", seed=0), samples))
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", model_max_length=512, padding_side="left"
    )


def main() -> None:
    """Write the tokenizer's files into a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("src/jacobi_forcing/embedded/base"))
    parser.add_argument("--vocab-size", type=int, default=512)
    parser.add_argument("--samples", type=int, default=4000)
    args = parser.parse_args()
    build(args.vocab_size, args.samples).save_pretrained(args.out)


if __name__ == "__main__":
    main()
