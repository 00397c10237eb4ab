"""Where a round with `peft` starts and what it leaves: a base with an adapter of peft's, merged or a folder of its own.

Needs the extra `train`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jacobi_forcing.config import ModelConfig, PeftSettings
from jacobi_forcing.errors import ConfigError
from jacobi_forcing.files import new_folder, remove, write_json
from jacobi_forcing.loading import Loaded, load, locate
from jacobi_forcing.peft_models import attach, base_name, is_peft_folder, load_onto, merged, plain, save

if TYPE_CHECKING:
    from peft import PeftModel


def begin(model: ModelConfig, settings: PeftSettings | None, seed: int) -> tuple[Loaded, PeftModel | None]:
    """The model that is trained, and the adapter on it; without settings all weights are trained, in fp32.

    The base stays in `model.dtype`, for it is never written to; the adapter's weights are float32. A round that starts
    from a peft folder and leaves one again trains that adapter further: an adapter has one base. One that is merged
    gets a fresh adapter.

    Raises:
        ConfigError: The adapter to go on from is of another kind than the settings say.
        JForceError: See `load`, `attach` and `load_onto`.
    """
    if settings is None:
        return load(dataclasses.replace(model, dtype="float32")), None
    location = locate(model.name)
    if is_peft_folder(location) and (not settings.merge or model.quantization != "none"):
        loaded = load(dataclasses.replace(model, name=base_name(location)))
        adapted = load_onto(loaded.model, location, trainable=True)
        _check_kind(adapted, settings, location)
        return loaded, adapted
    loaded = load(model)
    return loaded, attach(loaded.model, settings, seed)


def finish(
    loaded: Loaded, adapted: PeftModel | None, settings: PeftSettings | None, folder: Path, record: dict[str, Any]
) -> Loaded | None:
    """Write the adapter into `folder`, or merge it; a model without one is left as it is.

    Args:
        loaded: From `begin`.
        adapted: From `begin`, trained.
        settings: Of the adapter.
        folder: Where a peft folder goes.
        record: Provenance, to lie beside it; the settings of the adapter are put in.

    Returns:
        The plain model that is still to be saved; None where the adapter's folder is written.
    """
    if adapted is None or settings is None:
        return loaded
    record["peft"] = settings.to_dict()
    if settings.merge:
        if not getattr(plain(adapted), "is_quantized", False):
            return dataclasses.replace(loaded, model=merged(adapted))
        # Weights in 4 bits take no sum: the base is read again as it was, and gets the adapter there.
        aside = folder.with_name("unmerged")
        _write(loaded, adapted, aside, {})
        whole = load(dataclasses.replace(loaded.config, quantization="none", device="cpu"))
        whole = dataclasses.replace(whole, model=merged(load_onto(whole.model, aside)))
        remove(aside)
        return whole
    _write(loaded, adapted, folder, record)
    return None


def _write(loaded: Loaded, adapted: PeftModel, folder: Path, record: dict[str, Any]) -> None:
    with new_folder(folder) as temporary:
        save(adapted, temporary, loaded.config.name)
        loaded.tokenizer.save_pretrained(temporary)
        write_json(temporary / "provenance.json", record)


def _check_kind(adapted: PeftModel, settings: PeftSettings, folder: str) -> None:
    """The adapter of the round before is trained further as it is, so its kind cannot change."""
    own: Any = next(iter(adapted.peft_config.values()))
    seen = f"{'dora' if own.use_dora else 'lora'} of rank {own.r}"
    wanted = f"{settings.method} of rank {settings.rank}"
    if seen != wanted:
        raise ConfigError(
            f"The adapter in '{folder}' is of another kind than the settings name",
            seen=seen,
            expected=wanted,
            remedy="set peft.method and peft.rank to its own, or peft.merge to true for a fresh one on top",
        )
