"""Counts and streams: exact tokens and forwards of scripted runs, and text that arrives whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TextStreamer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from decoding import DECODERS, SCRIPT, ScriptedModel, prompt, reference, run_script
from jacobi_forcing import DecodeConfig, generate
from jacobi_forcing.decode.stats import DecodeStats, RowStats, SweepStats
from jacobi_forcing.errors import ConfigError
from tiny_models import shared_model

# Counts ----------------------------------------------------------------------------------------------------------

# Block size 4, 12 tokens. A draft drawn from the prompt is wrong, so one token is added and the predictions behind it,
# all right, are the next draft. `slots` are those of each forward: the prompt's 3 and 4 guesses first.
TRACES = {
    "ar": {"accepted": [1] * 12, "slots": [3] + [1] * 11},
    "jacobi": {"accepted": [1, 4, 1, 3, 1, 2], "slots": [7, 4, 4, 3, 3, 2]},
    "window": {"accepted": [1, 4, 1, 4, 1, 1], "slots": [7, 4, 4, 4, 2, 1]},
    # No token of the script comes twice, so the pool has nothing to offer.
    "recycle": {"accepted": [1, 4, 1, 4, 1, 1], "slots": [7, 4, 4, 4, 2, 1]},
    # By default two blocks of 4 are in flight all the time, as far as the budget has room for them.
    "multiblock": {"accepted": [1, 8, 1, 2], "slots": [11, 8, 3, 2]},
}


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_scripted_run_is_counted_exactly(decoder: str) -> None:
    tokens, stats, slots = run_script(decoder)
    assert tokens == SCRIPT[:12]
    assert stats.accepted == TRACES[decoder]["accepted"]
    assert slots == TRACES[decoder]["slots"]
    assert (stats.tokens, stats.forwards) == (12, len(slots))
    assert stats.tokens_per_forward == 12 / len(slots)


def test_tokens_per_forward_of_ar_is_exactly_one() -> None:
    assert run_script("ar")[1].tokens_per_forward == 1.0
    assert run_script("ar", max_new_tokens=1)[1].tokens_per_forward == 1.0
    assert run_script("ar", eos_token_id=SCRIPT[6], pad_token_id=0)[1].tokens_per_forward == 1.0


def test_only_tokens_up_to_the_end_are_counted() -> None:
    tokens, stats, slots = run_script("window", eos_token_id=SCRIPT[6], pad_token_id=0)
    assert tokens == SCRIPT[:7]
    assert stats.accepted == [1, 4, 1, 1]
    assert (stats.tokens, stats.forwards) == (7, len(slots)) == (7, 4)
    assert stats.histogram == {1: 3, 4: 1}


def counted(*accepted: int) -> RowStats:
    """Counts of a row whose sweeps added these numbers of tokens."""
    return RowStats(sum(accepted), [SweepStats(number, number, 0, number) for number in accepted])


def test_a_batch_counts_each_rows_own_forwards() -> None:
    stats = DecodeStats([counted(1, 4), counted(1, 1, 1)])
    assert (stats.tokens, stats.forwards, stats.tokens_per_forward) == (8, 5, 1.6)
    assert DecodeStats([]).tokens_per_forward == 0.0
    assert RowStats().tokens_per_forward == 0.0


def test_a_finished_row_costs_nothing_more() -> None:
    text = {length: reference("llama", length) for length in (7, 11)}
    end = text[7][2]
    late = text[11].index(end) if end in text[11][:20] else 19
    ids = torch.tensor([[0] * 4 + prompt(7), prompt(11)])
    mask = torch.tensor([[0] * 4 + [1] * 7, [1] * 11])
    out = generate(
        shared_model("llama"),
        ids,
        attention_mask=mask,
        max_new_tokens=20,
        eos_token_id=end,
        pad_token_id=0,
        decode=DecodeConfig(decoder="ar"),
        return_dict_in_generate=True,
    )
    assert [row.forwards for row in out.stats.rows] == [text[7].index(end) + 1, late + 1]


# Streams ---------------------------------------------------------------------------------------------------------

TEXT = "Grüße, 世界!\nAn 👩‍🚀 astronaut — naïve?\n\nเป็น 🎉 the end"


def byte_tokenizer(merges: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """One token per byte, so that every character beyond ASCII takes several.

    Each of `merges` becomes one token, byte by byte from its left; part of a character may be one.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary, pairs = {char: index for index, char in enumerate(alphabet)}, []
    for merged in merges:
        for end in range(2, len(merged) + 1):
            pairs.append((merged[: end - 1], merged[end - 1]))
            vocabulary.setdefault(merged[:end], len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def in_bytes(text: str, begin: int = 0, end: int | None = None) -> str:
    """How the tokenizer spells some of the bytes of a text."""
    return "".join(bytes_to_unicode()[byte] for byte in text.encode()[begin:end])


# Whole words, a token that is half an emoji, and one that is the end of a character and the start of the next.
MERGES = (in_bytes("the"), in_bytes("👩", 0, 2), in_bytes("世界", 1, 5), in_bytes(" astro"), in_bytes("🎉"))
TOKENIZERS = {"bytes": (), "merged": MERGES}


class Collected(TextStreamer):
    """Keeps what a `TextStreamer` would print, and the drafts that it is shown."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, **options: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True, **options)
        self.parts: list[str] = []
        self.drafts: list[list[int]] = []
        self.ended = 0

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.parts.append(text)
        self.ended += stream_end

    def put_draft(self, ids: torch.Tensor) -> None:
        self.drafts.append(ids.tolist())


def streamed(
    decoder: str, block_size: int, direct: bool, merges: Sequence[str], text: str, **options: Any
) -> tuple[Collected, PreTrainedTokenizerFast, list[int]]:
    """Stream what a model writes, which goes on behind `text`; returns the streamer and the generated ids."""
    tokenizer = byte_tokenizer(merges)
    ids = torch.tensor([tokenizer("ab:").input_ids])
    model = ScriptedModel(tokenizer(text + "never seen" * 9).input_ids, prompt_length=3, vocab_size=300)
    streamer = Collected(tokenizer, **options.pop("streaming", {}))
    options = {"max_new_tokens": 200, "pad_token_id": 0, "streamer": streamer, "tokenizer": tokenizer, **options}
    options["decode"] = DecodeConfig(decoder=decoder, block_size=block_size)
    out = generate(model, ids, **options) if direct else model.generate(ids, custom_generate=generate, **options)
    return streamer, tokenizer, out[0, 3:].tolist()


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("block_size", [3, 16])
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("merges", TOKENIZERS)
def test_the_joined_stream_equals_the_decoded_ids(decoder: str, block_size: int, direct: bool, merges: str) -> None:
    end = byte_tokenizer(TOKENIZERS[merges]).eos_token_id
    # The script goes on behind its end: an end in the middle of a block.
    streamer, tokenizer, ids = streamed(
        decoder, block_size, direct, TOKENIZERS[merges], TEXT + "<end>", eos_token_id=end
    )
    assert ids == [*tokenizer(TEXT).input_ids, end]
    assert "".join(streamer.parts) == tokenizer.decode(ids) == TEXT + "<end>"
    assert streamer.ended == 1


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("merges", TOKENIZERS)
@pytest.mark.parametrize("stop", ["👩‍🚀 a", "界", "nau", "🎉"])
def test_a_stream_ends_with_its_stop_string(decoder: str, direct: bool, merges: str, stop: str) -> None:
    streamer, tokenizer, ids = streamed(decoder, 16, direct, TOKENIZERS[merges], TEXT, stop_strings=[stop])
    written, joined = tokenizer.decode(ids), "".join(streamer.parts)
    assert joined == written
    assert TEXT.startswith(written)
    # The token that completes it may hold more.
    assert written.rindex(stop) + len(stop) + len("stro") >= len(written)
    assert streamer.ended == 1


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_stream_can_skip_the_end_token(decoder: str) -> None:
    end = byte_tokenizer().eos_token_id
    skip = {"skip_special_tokens": True}
    streamer, _, _ = streamed(decoder, 8, True, (), TEXT + "<end>", eos_token_id=end, streaming=skip)
    assert "".join(streamer.parts) == TEXT


class Runs:
    """Notes everything it is sent."""

    def __init__(self) -> None:
        self.runs: list[list[int]] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.runs.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_stream_gets_the_prompt_then_each_accepted_run(decoder: str) -> None:
    streamer = Runs()
    run_script(decoder, streamer=streamer)
    assert [len(run) for run in streamer.runs] == [3, *TRACES[decoder]["accepted"]]
    assert [token for run in streamer.runs for token in run] == [1, 2, 3, *SCRIPT[:12]]
    assert streamer.ended


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_stream_that_can_is_shown_the_draft_of_the_next_sweep(decoder: str) -> None:
    tokenizer = byte_tokenizer()
    streamer = Collected(tokenizer)
    run_script(decoder, streamer=streamer)
    # A sweep holds the last known token and the draft; nothing is drafted behind the end.
    assert [len(draft) for draft in streamer.drafts] == [slots - 1 for slots in TRACES[decoder]["slots"][1:]] + [0]
    if decoder != "ar":
        drafted = len(streamer.drafts[0])
        assert streamer.drafts[0] == SCRIPT[1 : 1 + drafted]


def test_a_stream_of_several_rows_is_refused() -> None:
    ids = torch.tensor([prompt(7), prompt(7, seed=1)])
    with pytest.raises(ConfigError, match="one text at a time"):
        generate(shared_model("llama"), ids, max_new_tokens=4, streamer=Runs())
