"""The library's conventions: what it keeps from a callable `custom_generate`, how it pads, and what is refused here."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, StoppingCriteria
from transformers.generation.configuration_utils import GenerationMode

from jacobi_forcing.decode.stopping import UNSUPPORTED
from jacobi_forcing.errors import ConfigError, DataError

_PLAIN = {
    "num_beams": 1,
    "output_scores": False,
    "output_logits": False,
    "output_attentions": False,
    "output_hidden_states": False,
}
"""Settings of the library, with the only value that is supported here; None means the same."""
_INPUTS = ("attention_mask", "position_ids", "cache", "use_cache", "logits_to_keep", "assistant_model", *_PLAIN)
"""What the library prepares for the model and is looked at here, or changes no text."""
_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


def refuse(
    generation_config: GenerationConfig, stopping_criteria: Sequence[StoppingCriteria], inputs: Mapping[str, Any]
) -> None:
    """Name what would change the text or the output and is not supported, instead of ignoring it.

    Raises:
        ConfigError: There is any.
    """
    asked = [
        f"{name}={getattr(generation_config, name)}"
        for name, plain in _PLAIN.items()
        if getattr(generation_config, name, None) not in (None, plain)
    ]
    mode = generation_config.get_generation_mode(inputs.get("assistant_model"))
    if not asked and mode not in _MODES:
        asked.append(mode.value)
    samples = generation_config.num_return_sequences or 1
    if samples > 1 and not generation_config.do_sample:
        asked.append(f"num_return_sequences={samples} without do_sample")
    asked += [type(criterion).__name__ for criterion in stopping_criteria if isinstance(criterion, UNSUPPORTED)]
    asked += [name for name, value in inputs.items() if not _empty(value) and name not in _INPUTS]
    if getattr(inputs.get("cache"), "_is_user_defined", False):
        asked.append("a cache of the caller")
    if not _plain_positions(inputs.get("position_ids"), inputs.get("attention_mask")):
        asked.append("position_ids of the caller")
    if asked:
        raise ConfigError(
            "Parallel decoding here starts from token ids and follows one text a row",
            seen=", ".join(asked),
            expected="no beams, assistant, cache, embeddings or other inputs, and no outputs beyond the usual",
            remedy="leave these out, or use the library's own generate",
        )


def _empty(value: Any) -> bool:
    """Whether an input says nothing; the library prepares such ones of its own for models that also take images."""
    if isinstance(value, Mapping):
        return all(_empty(part) for part in value.values())
    return value is None or (isinstance(value, (list, tuple)) and all(_empty(part) for part in value))


def _plain_positions(positions: Tensor | None, attention_mask: Tensor | None) -> bool:
    """Whether every token stands one position behind the one before it."""
    if positions is None:
        return True
    if attention_mask is None:
        return bool((positions.diff(dim=-1) == 1).all() and (positions[..., 0] == 0).all())
    if positions.shape != attention_mask.shape:
        return False
    seen = attention_mask != 0
    return bool((positions == seen.cumsum(dim=-1) - 1)[seen].all())


class Prompt(NamedTuple):
    """One row of the caller's batch: the ids that are seen, and how many are not, tokens."""

    ids: list[int]
    padding: int


def check_mask(input_ids: Tensor | None, attention_mask: Tensor | None) -> None:
    """Refuse a mask of another shape than the prompts; one without a 0 the library takes away before we see it.

    Raises:
        DataError: The shapes differ.
    """
    if input_ids is None or attention_mask is None or attention_mask.shape == input_ids.shape:
        return
    seen, expected = list(attention_mask.shape), list(input_ids.shape)
    raise DataError("The attention mask does not fit the prompts", seen=seen, expected=expected)


def split_prompts(input_ids: Tensor, attention_mask: Tensor | None, *, windowed: bool) -> list[Prompt]:
    """Each row without what is masked. A hole is as good as not there: positions count what is seen, as in the library.

    Args:
        input_ids: [rows, length].
        attention_mask: [rows, length], 0 where a token is not to be seen; None where all are.
        windowed: Whether the model has layers with a sliding window. The library counts a hole in it, which cannot be
            done here.

    Raises:
        DataError: A row is padded on the right, where its text is to go on, or has a hole and the model windows.
    """
    check_mask(input_ids, attention_mask)
    if attention_mask is None:
        return [Prompt(ids, 0) for ids in input_ids.tolist()]
    seen = attention_mask.bool()
    unseen = (~seen).sum(dim=1)
    if bool((seen.any(dim=1) & ~seen[:, -1]).any()):
        raise DataError(
            "A prompt is padded on the right",
            expected="padding on the left",
            remedy='set tokenizer.padding_side="left"',
        )
    if windowed and bool((unseen > seen.int().argmax(dim=1)).logical_and(seen.any(dim=1)).any()):
        raise DataError(
            "A prompt is masked in its middle, and the model has a sliding window",
            expected="padding on the left only",
            remedy="leave the masked tokens out",
        )
    return [Prompt(row[mask].tolist(), int(count)) for row, mask, count in zip(input_ids, seen, unseen, strict=True)]


def from_caller(name: str) -> Any:
    """What the library's `generate`, if it is calling us, was given under this name; None where nothing was.

    The library does not hand `streamer`, `tokenizer` and `assistant_model` to a callable `custom_generate`. The
    streamer has been sent the prompt by then, and would stay open without a token. Reading the library's local
    variables, or those of the wrappers around its `generate`, is the one way to get at them.
    """
    layers: list[Any] = [GenerationMixin.generate]
    while hasattr(layers[-1], "__wrapped__"):
        layers.append(layers[-1].__wrapped__)
    codes = [layer.__code__ for layer in layers]
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not codes[-1]:
        frame = frame.f_back
    while frame is not None and frame.f_code in codes:
        known = frame.f_locals
        value = known.get(name, (known.get("kwargs") or {}).get(name))
        if value is not None:
            return value
        frame = frame.f_back
    return None


def in_force(
    name: str, model: PreTrainedModel, generation_config: GenerationConfig | None, kwargs: dict[str, Any]
) -> Any:
    """The value of a setting that the library's `generate` would go by, its own default aside."""
    given = (
        kwargs.get(name),
        *(getattr(config, name, None) for config in (generation_config, model.generation_config)),
    )
    return next((value for value in given if value is not None), None)


def override(
    model: PreTrainedModel, generation_config: GenerationConfig | None, kwargs: dict[str, Any], **settings: Any
) -> tuple[GenerationConfig | None, dict[str, Any]]:
    """Generation config and keywords with some settings replaced; the given ones are left as they are."""
    if generation_config is None:
        return None, {**kwargs, **settings}
    changed = copy.deepcopy(generation_config)
    for name, value in settings.items():
        setattr(changed, name, value)
    # Where a generation config says None, the library takes the model's own value: only a keyword forbids that.
    own = {name: None for name in settings if getattr(changed, name) is None and in_force(name, model, None, {})}
    return changed, {name: value for name, value in kwargs.items() if name not in settings} | own
