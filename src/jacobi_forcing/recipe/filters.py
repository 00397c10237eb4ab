"""The filters for answers that settings name: they need graders, which collecting knows nothing of."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from jacobi_forcing.config import CollectConfig, PromptsConfig, Task
from jacobi_forcing.embedded import BUILTIN_TASKS
from jacobi_forcing.errors import ConfigError
from jacobi_forcing.evaluate.quality import loops
from jacobi_forcing.evaluate.tasks import grade
from jacobi_forcing.trajectories.filters import Answer, Filter, is_finished
from jacobi_forcing.trajectories.prompts import Prompt


@dataclasses.dataclass(frozen=True)
class NoRepetition:
    """Whether an answer does not end in a loop, see `evaluate.quality.loops`."""

    eos_ids: Sequence[int]

    def __call__(self, answer: Answer) -> bool:
        """Judge one."""
        return not loops(answer.ids, self.eos_ids)


@dataclasses.dataclass(frozen=True)
class RightAnswer:
    """Whether an answer is right by a task's grader."""

    task: Task
    tokenizer: PreTrainedTokenizerBase

    def __call__(self, answer: Answer) -> bool:
        """Judge one."""
        assert answer.prompt.answer is not None
        text = self.tokenizer.decode(list(answer.ids), skip_special_tokens=True)
        return grade(self.task, str(text), answer.prompt.answer)


def make_filters(
    settings: CollectConfig,
    source: PromptsConfig,
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    eos_ids: Sequence[int],
) -> dict[str, Filter]:
    """The filters of some settings, in their order.

    Raises:
        ConfigError: One needs reference answers and the prompts have none.
    """
    task = settings.filter_task
    if task == "none":
        task = BUILTIN_TASKS.get(source.source, "gsm8k")
    known: dict[str, Filter] = {
        "finished": is_finished,
        "no_repetition": NoRepetition(tuple(eos_ids)),
        "final_answer": RightAnswer(task, tokenizer),
        "unit_tests": RightAnswer("mbpp", tokenizer),
    }
    chosen: dict[str, Filter] = {name: known[name] for name in settings.filters or ()}
    graded = [name for name, judge in chosen.items() if isinstance(judge, RightAnswer)]
    if graded and any(prompt.answer is None for prompt in prompts):
        raise ConfigError(
            f"The filter '{graded[0]}' needs reference answers",
            seen="answer_field: null",
            remedy="set prompts.answer_field (--answer-field) to the key that holds them",
        )
    return chosen
