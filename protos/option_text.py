"""Options as people write them: in environment variables and on the command line."""

from __future__ import annotations

from collections.abc import Callable

from gradpilot.errors import ConfigError
from gradpilot.protos.messages import Option, Setting, check_option


def parse_option(text: str) -> Option:
    """Return the option that ``topk ratio=0.01 collective=allgather`` means.

    The first word names the compressor; the rest are fields of ``messages.Option`` and, under any
    other name, settings of the compressor. Words are separated by blanks or commas.

    Raises:
        ConfigError: A word is not ``name=value``, or a value is out of bounds.
    """
    compressor, *words = text.replace(",", " ").split() or [""]
    values: dict[str, object] = {}
    settings = []
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals and value):
            raise ConfigError(f"expected name=value after the compressor, got {word!r} in {text!r}")
        if name not in _OPTION_FIELDS:
            settings.append(Setting(name, value))
            continue
        try:
            values[name] = _OPTION_FIELDS[name](value)
        except ValueError:
            raise ConfigError(f"cannot read {word!r} in option {text!r}") from None
    if not compressor or "=" in compressor:
        raise ConfigError(f"an option begins with the name of a compressor, got {text!r}")
    settings.sort(key=lambda setting: setting.name)
    option = Option(compressor, settings=tuple(settings), **values)  # type: ignore[arg-type]
    check_option(option, world_size=1 << 20)
    return option


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


_OPTION_FIELDS: dict[str, Callable[[str], object]] = {
    "ratio": float,
    "collective": str,
    "skip": int,
    "rotation": str,
    "divisor": str,
    "skip_feedback": _boolean,
    "shrink": float,
}
