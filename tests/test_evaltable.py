"""The table and the sentences of an evaluation, from figures by hand."""

from __future__ import annotations

import copy
from typing import Any

from jacobi_forcing.bench.evaltable import COLUMNS, notes, rows
from jacobi_forcing.evaluate import Isolation

QUALITY = {
    "answers": 40,
    "mean_tokens": 100.0,
    "finished_rate": 0.95,
    "repetition_rate": 0.05,
    "solved": 10,
    "solve_rate": 0.25,
    "solve_rate_interval": [0.1419, 0.4019],
}
AR: dict[str, Any] = {
    "decoder": "ar",
    "block_size": None,
    "label": "",
    "quality": QUALITY,
    "tokens_per_forward": 1.0,
    "tokens_per_second": 20.0,
    "median_seconds": 5.0,
    "speedup": 1.0,
    "median_slots": 1,
    "cost_ratio": None,
    "failures": {},
    "paired": None,
}
PAIRED = {
    "exact": 38,
    "of": 40,
    "near_ties": 2,
    "faults": 0,
    "differ": [3, 17],
    "only_this": 1,
    "only_ar": 3,
    "mcnemar_p": 0.625,
    "difference": -0.05,
    "difference_interval": [-0.15, 0.05],
}
MULTIBLOCK = {
    **AR,
    "decoder": "multiblock",
    "block_size": 16,
    "label": "num_blocks=3",
    "tokens_per_forward": 1.9,
    "tokens_per_second": 8.25,
    "speedup": 0.41,
    "median_slots": 60,
    "cost_ratio": 4.5,
    "failures": {"failed": 20, "timeout": 2, "network": 1},
    "paired": PAIRED,
}


def report(**changes: Any) -> dict[str, Any]:
    task = {"task": "mbpp", "decoders": [AR, {**copy.deepcopy(MULTIBLOCK), **changes}], "isolation": None}
    return {"tasks": [task]}


def test_a_row_has_quality_interval_and_pairs_beside_speed() -> None:
    ar, multiblock = (dict(zip(COLUMNS, row, strict=True)) for row in rows(report()))
    assert ar["right"] == "25.0 % of 40" and ar["95 % interval"] == "14.2–40.2 %"
    assert (ar["n"], ar["exact"], ar["TPF"], ar["TPS"], ar["speed-up"]) == ("–", "–", "1.00", "20", "1.00×")
    assert multiblock["decoder"] == "multiblock (num_blocks=3)"
    assert (multiblock["exact"], multiblock["cut off"], multiblock["TPS"]) == ("38/40", "5.0 %", "8.2")
    assert multiblock["cost(n)/cost(1)"] == "4.50 (n=60)"


def test_without_ar_there_is_neither_speed_up_nor_pair() -> None:
    alone = dict(zip(COLUMNS, rows(report(speedup=None, paired=None))[1], strict=True))
    assert (alone["exact"], alone["speed-up"]) == ("–", "–")


def test_what_differs_and_what_not_to_expect_is_said() -> None:
    said = notes(report())
    assert all(text.startswith("mbpp, multiblock num_blocks=3: ") for text in said)
    assert (
        "1 items right that ar has wrong, 3 the other way round (exact McNemar p = 0.625; difference -5.0 " in said[0]
    )
    assert "ids differ from ar's on items 3, 17: near ties 2, faults 0." in said[1]
    assert "no speed-up is to be expected: a forward costs 4.50 and gives 1.90 tokens." in said[2]
    assert said[3].endswith("code was stopped: timeout 2, network 1.")


def test_equal_answers_and_a_cheap_forward_need_few_words() -> None:
    same = {**PAIRED, "only_this": 0, "only_ar": 0, "differ": [], "exact": 40}
    (text,) = notes(report(paired=same, cost_ratio=1.5, failures={}))
    assert text.endswith("right and wrong on the same items as ar.")


def test_the_walls_around_generated_code_are_stated() -> None:
    value = report(failures={}, paired=None)
    value["tasks"][0]["isolation"] = {"sentence": Isolation(rlimits=True).sentence()}
    (text,) = notes(value)
    assert text.startswith("mbpp: Generated code ran") and "shutting off the network" in text
