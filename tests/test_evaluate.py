from __future__ import annotations

from decimal import Decimal

import pytest
import torch

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.config import DecodeConfig
from jacobi_forcing.errors import DataError
from jacobi_forcing.evaluate import Wilson, answers, final_number, grade, loops, quality_of
from jacobi_forcing.evaluate.quality import budget
from jacobi_forcing.trajectories.prompts import Prompt
from tiny_folder import EOS, byte_tokenizer
from tiny_models import tiny_model


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She makes 9 * 2 = $18 every day.\n#### 18", "18"),
        ("#### 1,234,567", "1234567"),
        ("The answer is 42.", "42"),
        ("The answer is **70,000** dollars. She had 5 before.", "70000"),
        ("the final answer is: $-5", "-5"),
        ("The answer is 12 + 6 = 18 eggs. 3 are left", "18"),
        (r"so $x=3$ and \boxed{\$42}.", "42"),
        ("That makes $1,234.50.", "1234.50"),
        ("12 apples and 3 pears, so 15", "15"),
        ("it costs \\$18.00", "18"),
        ("10 minus 13 leaves −3", "-3"),
        ("of the range 3-4", "4"),
        ("12.5%", "12.5"),
        ("The answer is unknown, perhaps 7", "7"),
        ("48/2=24 in May. 48+24 = 72", "72"),
        ("it is .5", "0.5"),
        ("version v2 of x3", None),
        ("none at all", None),
        ("", None),
    ],
)
def test_the_final_number_is_found_however_it_is_written(text: str, number: str | None) -> None:
    assert final_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("so 72 clips", True),
        ("The answer is 72.0", True),
        ("#### 72", True),
        ("72, no, 73", False),
        ("seventy-two", False),
    ],
)
def test_gsm8k_answers_are_graded_against_the_number_behind_the_hashes(text: str, right: bool) -> None:
    assert grade("gsm8k", text, "Natalia sold 48+24 = <<48+24=72>>72 clips.\n#### 72") is right


def test_word_problems_need_the_sentence_that_states_the_answer() -> None:
    assert grade("word_problems", " First … The answer is 17.", "17")
    assert grade("word_problems", "The answer is 17.", "In the end, Mia has 17 apples. The answer is 17.")
    assert not grade("word_problems", "17", "17")
    assert not grade("word_problems", "The answer is 17. The answer is 18.", "17")


def test_a_reference_without_a_number_and_a_task_without_answers_are_errors() -> None:
    with pytest.raises(DataError, match="holds no number"):
        grade("gsm8k", "7", "seven")
    with pytest.raises(DataError, match="Nothing can be graded"):
        grade("none", "7", "7")


@pytest.mark.parametrize(
    ("ids", "looping"),
    [
        ([7] * 16, True),
        ([7] * 15, False),
        ([1, 2, 3, *[8, 9] * 8], True),
        ([1, 2, 3, *[8, 9] * 8, 4], False),
        ([*[1, 2, 3, 4, 5, 6] * 3, 1, 2], True),
        ([1, 2, 3, 4, 5, 6] * 2, False),
        ([*range(100, 164)] * 3, True),
        ([*range(100, 165)] * 3, False),
        ([*range(200)], False),
        ([5, *[7] * 16, EOS], True),
        ([], False),
    ],
)
def test_a_loop_is_a_stretch_that_fills_the_end_three_times_over(ids: list[int], looping: bool) -> None:
    assert loops(ids, [EOS]) is looping


def test_the_interval_is_wilsons() -> None:
    # 15 of 20 at 95 %, as calculators of this interval give it.
    interval = Wilson.of_counts(15, 20)
    assert (round(interval.low, 3), round(interval.high, 3)) == (0.531, 0.888)
    assert Wilson.of_counts(0, 10).low == 0
    assert Wilson.of_counts(10, 10).high == pytest.approx(1)
    assert Wilson.of_counts(0, 0).share == 0


def prompts_of(*texts: str, answer: str | None = None) -> list[Prompt]:
    tokenizer = byte_tokenizer()
    return [Prompt(index, text, tokenizer(text)["input_ids"], answer) for index, text in enumerate(texts)]


def test_quality_counts_solved_finished_and_looping_answers() -> None:
    tokenizer = byte_tokenizer()
    prompts = prompts_of("a", "b", "c", answer="#### 12")
    responses = [[*tokenizer("It is 12")["input_ids"], EOS], tokenizer("1" * 20)["input_ids"], [EOS]]
    quality = quality_of(responses, prompts, tokenizer, [EOS], "gsm8k")
    assert (quality.answers, quality.finished, quality.repeating, quality.tokens) == (3, 2, 1, 30)
    assert quality.solved is not None and quality.solved.count == 1
    assert quality.to_dict()["solve_rate"] == pytest.approx(1 / 3)


def test_without_a_task_nothing_is_said_about_solving() -> None:
    quality = quality_of([[5, EOS]], prompts_of("a"), byte_tokenizer(), [EOS])
    assert quality.to_dict()["solve_rate"] is None


def test_a_task_without_reference_answers_names_the_prompt() -> None:
    with pytest.raises(DataError, match="Prompt 0 has no reference answer"):
        quality_of([[5]], prompts_of("a"), byte_tokenizer(), [EOS], "gsm8k")


@pytest.mark.parametrize("decode", [None, DecodeConfig(decoder="window", block_size=4)])
def test_answers_of_unequal_prompts_keep_their_order_and_equal_the_librarys(decode: DecodeConfig | None) -> None:
    model = tiny_model("llama", vocab_size=258, eos_token_id=EOS, pad_token_id=0)
    prompts = prompts_of("a long prompt, the first", "b", "middling", "two", "x" * 31)
    found, stats = answers(Backbone(model), prompts, max_new_tokens=12, batch_size=2, decode=decode)
    for prompt, ids, count in zip(prompts, found, stats.rows, strict=True):
        given = torch.tensor([prompt.ids])
        expected = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=12, do_sample=False)
        assert ids == expected[0, len(prompt.ids) :].tolist()
        assert count.tokens == len(ids)


def test_the_budget_ends_where_the_context_ends() -> None:
    backbone = Backbone(tiny_model("llama", max_position_embeddings=32))
    assert budget(backbone, 10, 100) == 22
    assert budget(backbone, 10, 5) == 5
    assert budget(backbone, 40, 5) == 1
