"""What new draft slots are filled with, by name."""

from __future__ import annotations

import pytest

from jacobi_forcing import DecodeConfig
from jacobi_forcing.decode.drafts import DraftFill
from jacobi_forcing.decode.ngrams import NgramPool
from jacobi_forcing.errors import ConfigError


def fill(init: str, seed: int = 0, pool: NgramPool | None = None, vocabulary: object = None) -> DraftFill:
    config = DecodeConfig(draft_init=init, draft_seed=seed)  # type: ignore[arg-type]  # a name
    return DraftFill(config, [3, 4, 5], vocabulary, pool)  # type: ignore[arg-type]  # a list or None


def test_the_prompts_tokens_are_drawn_at_random() -> None:
    drawn = fill("prompt").draw(200, [9])
    assert set(drawn) == {3, 4, 5}
    assert drawn == fill("prompt").draw(200, [9])
    assert drawn != fill("prompt", seed=1).draw(200, [9])


def test_only_ids_that_the_tokenizer_has_are_drawn_from_the_vocabulary() -> None:
    assert set(fill("vocabulary", vocabulary=[7, 8, 50]).draw(200, [9])) == {7, 8, 50}
    with pytest.raises(ConfigError, match="which ids the tokenizer has"):
        fill("vocabulary")


def test_the_last_prediction_is_repeated() -> None:
    assert fill("last").draw(3, [9, 2]) == [2, 2, 2]


def test_the_pool_continues_what_stands_before_and_the_prompt_serves_where_it_cannot() -> None:
    pool = NgramPool()
    pool.add([2, 10, 11])
    pool.add([11, 12])
    assert fill("pool", pool=pool).draw(3, [9, 2]) == [10, 11, 12]
    drawn = fill("pool", pool=pool).draw(6, [9, 2])
    assert drawn[:3] == [10, 11, 12]
    assert set(drawn[3:]) <= {3, 4, 5}
    assert set(fill("pool", pool=pool).draw(5, [40])) <= {3, 4, 5}


@pytest.mark.parametrize("init", ["prompt", "last", "pool"])
def test_nothing_is_drawn_when_nothing_is_wanted(init: str) -> None:
    assert fill(init, pool=NgramPool()).draw(0, [9]) == []
