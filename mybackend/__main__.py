"""Command line: `python -m mybackend info` and `python -m mybackend config`."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from typing import Any

import torch

import mybackend
from mybackend import _build, config, torch_module


def _info() -> dict[str, Any]:
    devices = []
    for index in range(torch_module.device_count()):
        properties = torch_module.get_device_properties(index)
        free, total = torch_module.mem_get_info(index)
        devices.append({"index": index, "name": properties.name, "free_bytes": free, "total_bytes": total})
    settings = config.as_dict()
    return {
        "mybackend": mybackend.__version__,
        "torch": torch.__version__,
        "built_for_torch": _build.TORCH_VERSION,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "driver": mybackend._C._driver_name(),
        "devices": devices,
        "settings": {key: {"value": value, "from": config.origin(key)} for key, value in settings.items()},
    }


def _print_info(info: dict[str, Any]) -> None:
    for key in ("mybackend", "torch", "built_for_torch", "python", "system", "driver"):
        print(f"{key:<16} {info[key]}")
    for device in info["devices"]:
        print(
            f"{'device ' + str(device['index']):<16} {device['name']}, {device['free_bytes'] >> 20} MiB free of {device['total_bytes'] >> 20} MiB"
        )
    print("settings in force:")
    for key, entry in info["settings"].items():
        value = "unlimited" if entry["value"] is None else entry["value"]
        if isinstance(value, list):
            value = config._C._config_text(key) or "off"
        print(f"  {key:<36} {value!s:<12} from {entry['from']}")


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m mybackend", description="mybackend: a PyTorch device whose subject is memory"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser(
        "info", help="versions, driver, devices, and the configuration with the origin of each value"
    )
    info.add_argument("--json", action="store_true", help="print it as JSON")
    keys = commands.add_parser("config", help="list the configuration keys, or explain one")
    keys.add_argument("key", nargs="?", help="the key to explain")
    keys.add_argument("--check", metavar="TEXT", help="check a configuration text and print its warnings")
    options = parser.parse_args(arguments)
    try:
        if options.command == "info":
            found = _info()
            print(json.dumps(found, indent=2)) if options.json else _print_info(found)
        elif options.check is not None:
            for warning in config.check(options.check):
                print(f"warning: {warning}")
            print("ok")
        else:
            print(config.explain(options.key) if options.key else config.table())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head` has seen enough
        sys.stdout = None  # type: ignore[assignment]
    return 0


if __name__ == "__main__":
    sys.exit(main())
