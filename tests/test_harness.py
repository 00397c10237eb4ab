"""The model class and the tasks that lm-evaluation-harness is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

from benching import load_tiny
from jacobi_forcing.config import DecodeConfig
from jacobi_forcing.errors import ConfigError, DataError
from jacobi_forcing.evaluate import Grade, benchmark
from jacobi_forcing.evaluate.harness import Contender, JForceLM
from jacobi_forcing.evaluate.harness_tasks import harness_grades, make_task
from jacobi_forcing.loading import Loaded
from jacobi_forcing.trajectories.prompts import encode_prompt

AR, WINDOW = Contender(DecodeConfig(decoder="ar")), Contender(DecodeConfig(decoder="window", block_size=4))
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
RECORDS = [{"question": f"{n}?", "answer": f"#### {n}"} for n in range(4)]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load_tiny(tmp_path_factory.mktemp("model"))


def request(text: str, item: int = 0, **wishes: Any) -> Instance:
    settings = {"until": [], "max_gen_toks": 12, **wishes}
    return Instance("generate_until", {}, (text, settings), 0, metadata=("free", item, 1))


def test_the_harness_knows_it_by_name_with_any_decoder(tmp_path: Path) -> None:
    folder = load_tiny(tmp_path).config.name
    arguments = f"pretrained={folder},device=cpu,decoder=multiblock,block_size=4,num_blocks=2"
    lm = get_model("jforce").create_from_arg_string(arguments, {"batch_size": 2, "max_batch_size": None})
    assert isinstance(lm, JForceLM)
    assert lm.contenders == [Contender(DecodeConfig(decoder="multiblock", block_size=4))]
    texts = lm.generate_until([request("abc"), request("de", 1), request("f", 2)])
    expected = JForceLM(lm.loaded, [AR]).generate_until([request("abc"), request("de", 1), request("f", 2)])
    assert texts == expected and len(set(texts)) == 3


def test_all_contenders_answer_and_the_used_one_is_given(loaded: Loaded) -> None:
    lm = JForceLM(loaded, [AR, WINDOW])
    (text,) = lm.generate_until([request("abc")])
    answers = {key: answer for (_, _, key), answer in lm.journal.answers.items()}
    assert answers.keys() == {AR.key, WINDOW.key}
    assert answers[AR.key].ids == answers[WINDOW.key].ids and answers[AR.key].text == text
    assert answers[AR.key].forwards == answers[AR.key].tokens == 12 >= answers[WINDOW.key].forwards
    assert sum(answers[WINDOW.key].slots.values()) == answers[WINDOW.key].forwards - 1
    lm.use(WINDOW)
    assert lm.generate_until([request("abc")]) == [text]


def test_the_first_answer_of_every_decoder_is_thrown_away(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []
    real = JForceLM._decode

    def decode(self: JForceLM, contender: Contender, batch: Any) -> Any:
        calls.append((contender.key, batch[0].item))
        return real(self, contender, batch)

    monkeypatch.setattr(JForceLM, "_decode", decode)
    lm = JForceLM(loaded, [AR, WINDOW])
    lm.generate_until([request("abc"), request("de", 1)])
    assert sorted(calls) == sorted([(c.key, item) for c in (AR, WINDOW) for item in (0, 0, 1)])
    assert len(lm.journal.answers) == 4


def test_stop_strings_end_an_answer_and_are_not_part_of_it(loaded: Loaded) -> None:
    (text,) = JForceLM(loaded, [AR]).generate_until([request("abc")])
    stop = next(letter for letter in text if letter.isascii() and letter.isprintable())
    lm = JForceLM(loaded, [AR, WINDOW])
    (cut,) = lm.generate_until([request("abc", until=[stop])])
    assert cut == text[: text.index(stop)]
    ids = {tuple(answer.ids) for answer in lm.journal.answers.values()}
    assert len(ids) == 1 and len(ids.pop()) < 12
    assert all(answer.finished for answer in lm.journal.answers.values())


def test_requests_that_cannot_be_answered_are_refused(loaded: Loaded) -> None:
    lm = JForceLM(loaded, [AR])
    with pytest.raises(ConfigError, match="do_sample"):
        lm.generate_until([request("abc", do_sample=True)])
    with pytest.raises(DataError, match="item 3 of 'free' does not fit"):
        lm.generate_until([request("x" * 300, 3)])


def test_a_chat_template_gives_the_ids_that_are_collected_from(tmp_path: Path) -> None:
    loaded = load_tiny(tmp_path)
    loaded.tokenizer.chat_template = TEMPLATE
    lm = JForceLM(loaded, [AR])
    task = make_task(benchmark("gsm8k"), records=RECORDS, chat=lm.chat, max_new_tokens=4)
    harness_grades(lm, task, 2, AR)
    question = benchmark("gsm8k").ask(RECORDS[1], True)
    assert lm.prompts["gsm8k", 1] == encode_prompt(question, loaded.tokenizer, "chat")[1]
    assert loaded.tokenizer.decode(lm.prompts["gsm8k", 1]).startswith("<user>1?")
    assert lm.prompts.keys() == {("gsm8k", 0), ("gsm8k", 1)}


def test_a_raw_prompt_gives_the_tokenizers_ids(loaded: Loaded) -> None:
    lm = JForceLM(loaded, [AR])
    task = make_task(benchmark("gsm8k"), records=RECORDS, chat=lm.chat, max_new_tokens=4)
    harness_grades(lm, task, 1, AR)
    assert lm.prompts["gsm8k", 0] == encode_prompt("Question: 0?\nAnswer:", loaded.tokenizer, "raw")[1]


def test_examples_are_others_of_the_same_data_with_their_answers(loaded: Loaded) -> None:
    lm = JForceLM(loaded, [AR])
    task = make_task(benchmark("gsm8k"), records=RECORDS, chat=False, max_new_tokens=4, fewshot=3)
    harness_grades(lm, task, None, AR)
    for item in range(4):
        text = loaded.tokenizer.decode(lm.prompts["gsm8k", item])
        assert text.endswith(f"Question: {item}?\nAnswer:")
        assert [f"#### {n}" in text for n in range(4)] == [n != item for n in range(4)]


def test_the_harness_score_is_the_share_of_right_grades(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    grades: list[Grade] = []
    lm = JForceLM(loaded, [AR, WINDOW])
    task = make_task(benchmark("gsm8k"), records=RECORDS, chat=False, max_new_tokens=4, grades=grades)
    answers = iter(["#### 0", "It is 1.", "2, or 3", "3.0"])
    monkeypatch.setattr(JForceLM, "generate_until", lambda self, requests: [next(answers) for _ in requests])
    found = harness_grades(lm, task, None, AR)
    assert found["right"] == 0.75
    assert [grade.right for grade in grades] == [sample["right"] == 1.0 for sample in found["samples"]]
    assert [grade.answer for grade in grades] == ["0", "1", "3", "3.0"]


def test_a_record_that_lacks_a_field_is_named() -> None:
    with pytest.raises(DataError, match="Item 1 of 'gsm8k' lacks 'answer'"):
        make_task(benchmark("gsm8k"), records=[RECORDS[0], {"question": "?"}], chat=False)
