"""Decoding with an adapter that is on the model for the length of one call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from huggingface_hub import try_to_load_from_cache
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import cached_file

from jacobi_forcing.adapter import GatedAdapter
from jacobi_forcing.adapter_file import SETTINGS, WEIGHTS, read_adapter
from jacobi_forcing.config import DecodeConfig
from jacobi_forcing.decode.conventions import from_caller
from jacobi_forcing.decode.generate import GenerateOutput, generate
from jacobi_forcing.entry import DECODE, FOLDER
from jacobi_forcing.errors import ArtefactError, ConfigError
from jacobi_forcing.files import read_json
from jacobi_forcing.gated import GatedLinear
from jacobi_forcing.loading import hub_options

_known: WeakKeyDictionary[PreTrainedModel, tuple[tuple[str, int, int], dict[str, GatedLinear]]] = WeakKeyDictionary()
"""Where the adapter that was last on each model came from, and its layers, kept for the next call."""


def generate_with_adapter(
    model: PreTrainedModel,
    input_ids: Tensor | None = None,
    *,
    adapter: str | Path | None = None,
    decode: DecodeConfig | Mapping[str, Any] | None = None,
    **settings: Any,
) -> Tensor | GenerateOutput:
    """`generate` with a gated adapter on the model while it runs; afterwards the model is what it was.

    This is what an adapter's folder does as a `custom_generate`::

        base.generate(**inputs, custom_generate="runs/my-adapter/model", trust_remote_code=True, max_new_tokens=64)

    The weights are read in the first call and kept for later ones as long as the model lives. Where the model has a
    gated adapter already, put there by `GatedAdapter`, that one drafts and stays.

    Args:
        model: The base.
        input_ids: See `generate`.
        adapter: The folder, or a name on the hub; by default what the library's `generate` was given as
            `custom_generate`.
        decode: See `generate`; where None, the settings saved with the adapter.
        **settings: See `generate`.

    Raises:
        ArtefactError, ModelError: There is no adapter of this model.
        ConfigError: No folder is named.
        JForceError: Anything else that `generate` refuses.
    """
    place = adapter if adapter is not None else from_caller("custom_generate")
    if not isinstance(place, str | Path) or not str(place):
        raise ConfigError(
            "It is not known where the adapter is",
            seen="an empty name" if place == "" else type(place).__name__,
            expected="its folder as custom_generate=, on the base model",
            remedy="load the base alone, not the adapter's folder",
        )
    name = str(Path(place).expanduser())
    if decode is None:
        decode = _saved(name)
    with _attached(model, name):
        return generate(model, input_ids, decode=decode, **settings)


@contextlib.contextmanager
def _attached(model: PreTrainedModel, place: str) -> Iterator[None]:
    if GatedAdapter.of(model) is not None:
        yield
        return
    weights = _file(place, WEIGHTS)
    if weights is None or _file(place, SETTINGS) is None:
        if Path(place).is_dir():
            read_adapter(place)  # says what it lacks
        raise ArtefactError(f"'{place}' holds no adapter", expected=f"{SETTINGS} and {WEIGHTS}")
    state = weights.stat()
    key = (str(weights), state.st_mtime_ns, state.st_size)
    known, layers = _known.get(model, (None, {}))
    adapter = GatedAdapter.reattach(model, layers) if known == key else None
    if adapter is None:
        adapter = GatedAdapter.load(model, weights.parent)
        _known[model] = (key, adapter.layers)
    try:
        yield
    finally:
        adapter.detach()


def _saved(place: str) -> DecodeConfig | None:
    path = _file(place, f"{FOLDER}/{DECODE}")
    return None if path is None else DecodeConfig.from_dict(read_json(path), f"{DECODE}: ")


def _file(place: str, name: str) -> Path | None:
    """A file of a folder or, by the library's own cache, of a repository on the hub."""
    if Path(place).is_dir():
        path = Path(place) / name
        return path if path.is_file() else None
    known = try_to_load_from_cache(place, name) if place.count("/") == 1 else None
    if isinstance(known, str):
        return Path(known)
    options = hub_options(place, "adapter", SETTINGS)
    try:
        found = cached_file(place, name, **options)
    except OSError:
        return None
    return None if found is None else Path(found)
