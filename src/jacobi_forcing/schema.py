"""What every settings class shares: checks on construction, unknown keys refused, dict and YAML there and back."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import yaml

from jacobi_forcing.errors import ConfigError


def option(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
) -> Any:
    """A dataclass field with its help text, unit and range."""
    metadata = {"help": help, "at_least": at_least, "above": above, "at_most": at_most}
    if isinstance(default, (list, tuple)):
        return dataclasses.field(default=tuple(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def _matches(value: Any, kind: Any) -> bool:
    origin = typing.get_origin(kind)
    if origin is Literal:
        return value in typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return any(_matches(value, arm) for arm in typing.get_args(kind))
    if origin is tuple:
        inner = typing.get_args(kind)[0]
        return isinstance(value, tuple) and all(_matches(item, inner) for item in value)
    if origin is dict:
        return isinstance(value, dict)
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def _describe(kind: Any) -> str:
    origin = typing.get_origin(kind)
    if origin is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(kind)))
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_describe(arm) for arm in typing.get_args(kind))
    if origin is dict:
        return "a mapping"
    if origin is tuple:
        return f"a list of {_describe(typing.get_args(kind)[0])}"
    return {type(None): "null", str: "text", int: "a whole number", float: "a number", bool: "true or false"}.get(
        kind, getattr(kind, "__name__", str(kind))
    )


@dataclasses.dataclass(frozen=True)
class Config:
    """What every settings class shares: checks on construction, dict and YAML round trip."""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), hints[field.name]
            if not _matches(value, kind):
                raise ConfigError(f"'{field.name}' has a wrong value", seen=repr(value), expected=_describe(kind))
            if value == ():
                raise ConfigError(f"'{field.name}' is empty", expected="one or more")
            values = value if isinstance(value, tuple) else (value,)
            low, above, high = (field.metadata.get(bound) for bound in ("at_least", "above", "at_most"))
            for item in values:
                if isinstance(item, float) and not math.isfinite(item):
                    raise ConfigError(f"'{field.name}' has a wrong value", seen=item, expected="a finite number")
                if low is not None and item is not None and item < low:
                    between = f"at least {low}" if high is None else f"from {low} to {high}"
                    raise ConfigError(f"'{field.name}' is too small", seen=item, expected=between)
                if above is not None and item is not None and item <= above:
                    raise ConfigError(f"'{field.name}' is too small", seen=item, expected=f"more than {above}")
                if high is not None and item is not None and item > high:
                    between = f"at most {high}" if low is None else f"from {low} to {high}"
                    raise ConfigError(f"'{field.name}' is too large", seen=item, expected=between)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "") -> Self:
        """Build from a mapping; nested mappings become nested settings.

        Raises:
            ConfigError: A key is unknown (the nearest known one is named), missing, or its value is wrong.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"'{where.rstrip('.') or cls.__name__}' is not a mapping",
                seen=repr(values),
                expected="key: value lines",
            )
        hints = typing.get_type_hints(cls)
        known = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                hint = f"did you mean '{near[0]}'?" if near else "remove it"
                raise ConfigError(f"Unknown key '{where}{key}'", expected="one of " + ", ".join(known), remedy=hint)
        arguments = {key: _build(hints[key], value, f"{where}{key}") for key, value in values.items()}
        missing = [
            f.name
            for f in dataclasses.fields(cls)
            if f.name not in arguments and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        ]
        if missing:
            raise ConfigError(f"'{where}{missing[0]}' is missing", expected=dataclasses_help(cls, missing[0]))
        try:
            return cls(**arguments)
        except ConfigError as error:
            if not where:
                raise
            raise ConfigError(f"In '{where.rstrip('.')}': {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """A plain dict (tuples become lists) that `from_dict` turns back into an equal object."""
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}

    @classmethod
    def load_yaml(cls, path: str | Path) -> Self:
        """Read a YAML file.

        Raises:
            ConfigError: The file is missing, is not YAML, or holds wrong settings.
        """
        values = read_yaml(path)
        return cls.from_dict(values if values is not None else {})

    def to_yaml(self) -> str:
        """The settings as YAML text."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False)


def read_yaml(path: str | Path) -> Any:
    """What stands in a YAML file, unchecked.

    Raises:
        ConfigError: The file cannot be read, is not UTF-8 text, or is not YAML.
    """
    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"Cannot read '{path}'", seen=error.strerror, remedy="check the path") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"Cannot read '{path}'", seen=str(error)) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"'{path}' is not valid YAML", seen=" ".join(str(error).split())) from error


def read_mapping(path: str | Path, kind: str) -> dict[str, Any]:
    """The keys and values of a YAML file, unchecked.

    Args:
        path: The file.
        kind: What it is to be, for the error.

    Raises:
        ConfigError: See `read_yaml`, or the file holds no mapping.
    """
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise ConfigError(f"'{path}' holds no {kind}", seen=type(values).__name__, expected="key: value lines")
    return values


def dataclasses_help(cls: type[Config], name: str) -> str:
    """The help text of one field."""
    return next(str(f.metadata.get("help", "a value")) for f in dataclasses.fields(cls) if f.name == name)


def _build(kind: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(kind)
    if isinstance(kind, type) and issubclass(kind, Config):
        return value if isinstance(value, kind) else kind.from_dict(value, where + ".")
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        return _build(next(arm for arm in typing.get_args(kind) if arm is not type(None)), value, where)
    if origin is tuple and isinstance(value, (list, tuple)):
        inner = typing.get_args(kind)[0]
        return tuple(_build(inner, item, f"{where}[{index}]") for index, item in enumerate(value))
    if kind is float and isinstance(value, str):
        # YAML 1.1 reads "1e-6" as text; a person means the number.
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, Config):
        return value.to_dict()
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value
