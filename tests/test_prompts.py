from __future__ import annotations

import builtins
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from jacobi_forcing.config import PromptsConfig, Template
from jacobi_forcing.embedded.problems import problems
from jacobi_forcing.errors import DataError, MissingExtraError
from jacobi_forcing.trajectories.prompts import encode_prompt, load_prompts

CHAT = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
BOS = 0


def tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Splits at blanks, and starts every text with BOS unless told not to, as Llama's does."""
    words = ["<bos>", "<unk>", "one", "two", "three", "[user]", "[assistant]", "[system]"]
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    core.add_special_tokens(["<bos>"])
    made = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", unk_token="<unk>")
    made.chat_template = chat_template
    return made


def jsonl(folder: Path, *records: Any, name: str = "prompts.jsonl") -> str:
    path = folder / name
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in records))
    return str(path)


def test_raw_prompts_are_tokenised_as_they_are(tmp_path: Path) -> None:
    source = jsonl(tmp_path, {"prompt": "one two"}, {"prompt": "three"})
    first, second = load_prompts(PromptsConfig(source, template="raw"), tokenizer(CHAT))
    assert (first.index, first.text, first.ids, first.answer) == (0, "one two", [BOS, 2, 3], None)
    assert (second.index, second.ids) == (1, [BOS, 4])


def test_a_chat_prompt_opens_the_answer_and_starts_with_one_bos(tmp_path: Path) -> None:
    source = jsonl(tmp_path, {"prompt": "one two"})
    for template in ("chat", "auto"):
        (prompt,) = load_prompts(PromptsConfig(source, template=template), tokenizer(CHAT))
        assert prompt.ids == [BOS, 5, 2, 3, 6]
        assert prompt.text == "<bos>[user] one two [assistant]"


@pytest.mark.parametrize(
    ("chat_template", "template", "text", "ids"),
    [
        (CHAT, "auto", "<bos>[user] one two [assistant]", [BOS, 5, 2, 3, 6]),
        (CHAT, "chat", "<bos>[user] one two [assistant]", [BOS, 5, 2, 3, 6]),
        (CHAT, "raw", "one two", [BOS, 2, 3]),
        (None, "auto", "one two", [BOS, 2, 3]),
    ],
)
def test_a_single_prompt_is_encoded_like_one_of_a_file(
    tmp_path: Path, chat_template: str | None, template: Template, text: str, ids: list[int]
) -> None:
    model_tokenizer = tokenizer(chat_template)
    assert encode_prompt("one two", model_tokenizer, template) == (text, ids)
    (prompt,) = load_prompts(PromptsConfig(jsonl(tmp_path, {"prompt": "one two"}), template=template), model_tokenizer)
    assert (prompt.text, prompt.ids) == (text, ids)


def test_a_single_prompt_that_cannot_be_encoded_is_an_error_without_a_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(DataError, match="no chat template"):
        encode_prompt("one", tokenizer(), "chat")
    with pytest.raises(DataError, match="The prompt is empty"):
        encode_prompt("", tokenizer("{% for m in messages %}{{ m['content'] }}{% endfor %}"), "auto")
    with caplog.at_level(logging.INFO, "jacobi_forcing"):
        encode_prompt("one", tokenizer(), "auto")
    assert caplog.messages == ["The tokenizer has no chat template: prompts are used as they are"]


def test_messages_go_through_the_chat_template(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "three"}, {"role": "user", "content": "one"}]
    (prompt,) = load_prompts(PromptsConfig(jsonl(tmp_path, {"prompt": messages})), tokenizer(CHAT))
    assert prompt.ids == [BOS, 7, 4, 5, 2, 6]


def test_turns_of_sharegpt_are_read_like_messages(tmp_path: Path) -> None:
    turns = [
        {"from": "system", "value": "three"},
        {"from": "human", "value": "one", "weight": 1},
        {"from": "gpt", "value": "two"},
        {"from": "user", "value": "two"},
        {"from": "assistant", "value": "one"},
        {"from": "human", "value": "three"},
    ]
    (prompt,) = load_prompts(PromptsConfig(jsonl(tmp_path, {"prompt": turns})), tokenizer(CHAT))
    assert prompt.text == (
        "<bos>[system] three [user] one [assistant] two [user] two [assistant] one [user] three [assistant]"
    )


def test_turns_of_a_speaker_nobody_knows_and_turns_without_a_template_are_refused(tmp_path: Path) -> None:
    source = jsonl(tmp_path, {"prompt": [{"from": "tool", "value": "one"}]})
    with pytest.raises(DataError, match=r"Prompt 0 .*unknown speaker; seen: tool; expected: human, user, gpt"):
        load_prompts(PromptsConfig(source), tokenizer(CHAT))
    source = jsonl(tmp_path, {"prompt": [{"from": "human", "value": "one"}]})
    with pytest.raises(DataError, match="list of messages"):
        load_prompts(PromptsConfig(source), tokenizer())


def test_messages_without_a_chat_template_are_refused(tmp_path: Path) -> None:
    source = jsonl(tmp_path, {"prompt": [{"role": "user", "content": "one"}]})
    with pytest.raises(DataError, match="list of messages"):
        load_prompts(PromptsConfig(source), tokenizer())


def test_auto_without_a_chat_template_is_raw_and_one_line_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = jsonl(tmp_path, {"prompt": "one"}, {"prompt": "two"})
    with caplog.at_level(logging.INFO, "jacobi_forcing"):
        prompts = load_prompts(PromptsConfig(source), tokenizer())
    assert [prompt.ids for prompt in prompts] == [[BOS, 2], [BOS, 3]]
    assert [record.message for record in caplog.records] == [
        "The tokenizer has no chat template: prompts are used as they are"
    ]


def test_chat_without_a_chat_template_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no chat template.*set template to raw"):
        load_prompts(PromptsConfig(jsonl(tmp_path, {"prompt": "one"}), template="chat"), tokenizer())


def test_a_template_that_rejects_a_prompt_is_an_error_of_that_prompt(tmp_path: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match=r"Prompt 0 .*does not fit the chat template.*roles must alternate"):
        load_prompts(PromptsConfig(jsonl(tmp_path, {"prompt": "one"})), tokenizer(template))


def test_offset_and_limit_keep_the_index_of_the_source(tmp_path: Path) -> None:
    source = jsonl(tmp_path, *({"prompt": word} for word in ("one", "two", "three")))
    prompts = load_prompts(PromptsConfig(source, offset=1, limit=1), tokenizer())
    assert [(prompt.index, prompt.text) for prompt in prompts] == [(1, "two")]
    with pytest.raises(DataError, match="no prompts in the range"):
        load_prompts(PromptsConfig(source, offset=3), tokenizer())


def test_field_and_answer_field_are_read(tmp_path: Path) -> None:
    source = jsonl(tmp_path, {"question": "one", "answer": 42})
    (prompt,) = load_prompts(PromptsConfig(source, field="question", answer_field="answer"), tokenizer())
    assert (prompt.text, prompt.answer) == ("one", "42")


def test_a_broken_line_is_named_by_its_number(tmp_path: Path) -> None:
    source = jsonl(tmp_path, {"prompt": "one"}, "\n", '{"prompt": \n', {"prompt": "two"})
    with pytest.raises(DataError, match=r"prompts\.jsonl' line 3 is not valid JSON"):
        load_prompts(PromptsConfig(source), tokenizer())


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"question": "one", "id": 1}, r"line 2 lacks 'prompt'.*one of: question, id.*set field"),
        ({}, r"line 2 lacks 'prompt'.*one of: none"),
        (["one"], r"line 2 is not an object.*list"),
        ({"prompt": 3}, r"Prompt 1 .*is not text.*int"),
        ({"prompt": None}, r"Prompt 1 .*is not text"),
        ({"prompt": ["one"]}, r"Prompt 1 .*is not text"),
        ({"prompt": [{"role": "user", "content": "one"}, {"from": "gpt", "value": "two"}]}, r"Prompt 1 .*is not text"),
    ],
)
def test_a_wrong_record_is_named(tmp_path: Path, record: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_prompts(PromptsConfig(jsonl(tmp_path, {"prompt": "one"}, record)), tokenizer())


def test_a_missing_answer_field_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"lacks 'gold'.*set answer_field"):
        load_prompts(PromptsConfig(jsonl(tmp_path, {"prompt": "one"}), answer_field="gold"), tokenizer())


def test_an_empty_file_a_missing_file_and_bytes_that_are_no_text_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is empty"):
        load_prompts(PromptsConfig(jsonl(tmp_path, "\n")), tokenizer())
    with pytest.raises(DataError, match=r"Cannot read '.*none\.jsonl'.*check the path"):
        load_prompts(PromptsConfig(str(tmp_path / "none.jsonl")), tokenizer())
    (tmp_path / "bytes.jsonl").write_bytes(b'{"prompt": "\xff\xfe"}\n')
    with pytest.raises(DataError, match="not UTF-8"):
        load_prompts(PromptsConfig(str(tmp_path / "bytes.jsonl")), tokenizer())


def test_a_prompt_must_leave_room_in_the_context(tmp_path: Path) -> None:
    source = jsonl(tmp_path, {"prompt": "one"}, {"prompt": "one two three"})
    assert len(load_prompts(PromptsConfig(source), tokenizer(), context_length=5)) == 2
    with pytest.raises(DataError, match=r"Prompt 1 of .* is longer than the model's context.*4 tokens.*at most 3"):
        load_prompts(PromptsConfig(source), tokenizer(), context_length=4)


def test_a_prompt_without_tokens_is_an_error(tmp_path: Path) -> None:
    bare = tokenizer("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    with pytest.raises(DataError, match=r"Prompt 0 of '.*prompts\.jsonl' is empty"):
        load_prompts(PromptsConfig(jsonl(tmp_path, {"prompt": ""})), bare)


def test_the_builtin_source_gives_word_problems_with_their_results() -> None:
    config = PromptsConfig("builtin:word-problems", split="heldout", limit=3, offset=1, seed=5)
    expected = list(problems("heldout", 5, 4))[1:]
    prompts = load_prompts(config, tokenizer())
    assert [(p.index, p.text, p.answer) for p in prompts] == [
        (index, problem.prompt, str(problem.result)) for index, problem in enumerate(expected, start=1)
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"limit": None}, "never ends.*set limit"),
        ({"split": "test"}, "no such split.*train or heldout"),
        ({"source": "builtin:riddles"}, "Unknown builtin source"),
    ],
)
def test_the_builtin_source_checks_its_settings(changes: dict[str, Any], message: str) -> None:
    values: dict[str, Any] = {"source": "builtin:word-problems", "limit": 1, **changes}
    with pytest.raises(DataError, match=message):
        load_prompts(PromptsConfig(**values), tokenizer())


def test_a_hub_data_set_is_read_with_its_subset_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list([{"question": "one", "answer": "1"}, {"question": "two", "answer": "2"}])
    asked = []

    def load_dataset(*args: Any, **kwargs: Any) -> Any:
        asked.append((args, kwargs))
        return made

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    config = PromptsConfig("owner/set", subset="main", split="test", field="question", answer_field="answer")
    prompts = load_prompts(config, tokenizer())
    assert [(p.text, p.answer) for p in prompts] == [("one", "1"), ("two", "2")]
    assert asked == [(("owner/set", "main"), {"split": "test"})]


def test_a_hub_data_set_that_cannot_be_loaded_is_one_clear_error(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    # A folder without data fails as a name unknown to the hub does, without a network.
    with pytest.raises(DataError, match=r"Cannot load the data set.*a path that ends in \.jsonl"):
        load_prompts(PromptsConfig(str(tmp_path)), tokenizer())


def test_without_datasets_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def blocked(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "datasets":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", blocked)
    with pytest.raises(MissingExtraError, match=r"datasets.*jacobi-forcing\[train\]"):
        load_prompts(PromptsConfig("owner/set"), tokenizer())
