"""The configuration: read, check, set, list and explain keys.

The text form is `key:value,key:value`; it is read from MYBACKEND_ALLOC_CONF, else
PYTORCH_ALLOC_CONF, else PYTORCH_CUDA_ALLOC_CONF. A bad text changes nothing and raises
ValueError with the key, its position, the value and the allowed form.
"""

from __future__ import annotations

import json
import warnings
from typing import Any

from mybackend import _C

__all__ = ["as_dict", "check", "explain", "get", "keys", "origin", "reset", "set", "table"]

# The package's own words for values that the text form cannot write.
_TEXT = {True: "True", False: "False"}


def keys() -> list[str]:
    """The names of all keys."""
    return [key["name"] for key in _C._config_keys()]


def _known(key: str) -> str:
    name = _C._config_find(key)
    if name is None:
        near = _C._config_suggest(key)
        raise ValueError(f"unknown key '{key}'" + (f"; did you mean '{near}'?" if near else ""))
    return name


def as_dict() -> dict[str, Any]:
    """All settings in force. Sizes in MB; None is unlimited."""
    return json.loads(_C._config_json())


def get(key: str) -> Any:
    """The value in force of one key. Raises ValueError for an unknown one."""
    return as_dict()[_known(key)]


def origin(key: str) -> str:
    """Where the value came from: `default`, the name of a variable, or `config.set`."""
    return _C._config_origin(_known(key))


def names_a_device() -> bool:
    """Whether `driver` says which devices `mybackend` has: sim or cuda."""
    return get("driver") in ("sim", "cuda")


def _as_text(text: str | None, values: dict[str, Any]) -> str:
    parts = [text] if text else []
    for key, value in values.items():
        parts.append(f"{key}:{_TEXT[value] if isinstance(value, bool) else value}")
    return ",".join(parts)


def check(text: str) -> list[str]:
    """Checks a text without applying it; returns warnings about keys that defeat each other.
    Raises ValueError for a malformed one."""
    return _C._config_check(text)


def set(text: str | None = None, /, **values: Any) -> None:
    """Applies `text`, or keys given by name: `config.set(max_split_size_mb=64)`. All or nothing.

    Keys that are read once, at first use of the device, raise RuntimeError afterwards."""
    full = _as_text(text, values)
    if _C._is_initialized():
        before = as_dict()
        once = [key for key in ("driver", "device_count", "device_memory_mb") if f"{key}:" in full.replace(" ", "")]
        if once:
            check(full)
            raise RuntimeError(
                f"{once[0]} is read once, when the devices start, and they have started (value in force: {before[once[0]]}); "
                "set it before the first use, or in MYBACKEND_ALLOC_CONF"
            )
    for warning in _C._config_set(full, "config.set"):
        warnings.warn(f"mybackend: {warning}", stacklevel=2)
    if names_a_device():
        from mybackend._register import register

        register()  # where the import did not (a GPU is there)


def reset() -> None:
    """Sets every key to its default."""
    _C._config_reset()


def explain(key: str) -> str:
    """What a key means, its allowed form, its default, its value and where that came from."""
    name = _known(key)
    entry = next(k for k in _C._config_keys() if k["name"] == name)
    value = _C._config_text(name)
    return (
        f"{name}: {entry['meaning']}\n"
        f"  allowed: {entry['range']}\n"
        f"  default: {entry['default'] or 'off or unlimited'}\n"
        f"  in force: {value or 'off or unlimited'} (from {origin(name)})"
    )


def table() -> str:
    """All keys as a Markdown table: name, default, allowed form, meaning."""
    rows = ["| key | default | allowed | meaning |", "|---|---|---|---|"]
    for key in _C._config_keys():
        allowed = key["range"].replace("|", "\\|")
        rows.append(f"| `{key['name']}` | {key['default'] or '-'} | {allowed} | {key['meaning']} |")
    return "\n".join(rows)
