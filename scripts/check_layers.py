"""Checks the layers of csrc/: which folder includes which, and what the built libraries need and
export. Prints each violation and exits with 1 if there is one.

usage: check_layers.py [--root DIR] [--no-libraries]
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

# A folder may include the folders named here (and the standard library and the system).
ALLOWED = {
    "base": {"base"},
    "driver": {"base", "driver"},
    "driver/sim": {"base", "driver", "driver/sim"},
    "driver/model": {"base", "driver", "driver/model"},
    "driver/cuda": {"base", "driver", "driver/cuda"},
    "core": {"base", "driver", "core", "core/caching"},
    "core/caching": {"base", "driver", "core", "core/caching"},
    "replay": {"base", "driver", "driver/model", "core", "core/caching", "replay"},
    "capi": {"base", "driver", "driver/sim", "driver/model", "driver/cuda", "core", "core/caching", "replay", "capi"},
}  # fmt: skip
ALLOWED["torch"] = ALLOWED["capi"] | {"torch"}
ALLOWED["python"] = ALLOWED["torch"] | {"python"}
ALLOWED["torch_cuda"] = ALLOWED["capi"] | {"torch_cuda"}

TORCH_FREE = {"base", "driver", "driver/sim", "driver/model", "driver/cuda", "core", "core/caching", "replay", "capi"}
FOREIGN = re.compile(r"((ATen|c10|torch|caffe2|pybind11|hip)/|cuda|Python\.h)")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)

# What the torch-free library may be linked to, and what it may not be.
CORE_NEEDED = re.compile(r"^(libc|libm|libstdc\+\+|libgcc_s|libpthread|libdl|librt|ld-linux.*)\.so")
CORE_EXPORTED = re.compile(
    r"^(mybackend_|mybackend::|vtable for mybackend|typeinfo (name )?for (mybackend|std::)|guard variable|std::|void std::|operator |construction|VTT|non-virtual thunk|virtual thunk|TLS|thread|_init|_fini)"
)


def layer_of(path: Path, csrc: Path) -> str:
    return str(path.parent.relative_to(csrc))


def include_violations(root: Path) -> list[str]:
    csrc = root / "csrc"
    found = []
    for path in sorted([*csrc.rglob("*.h"), *csrc.rglob("*.cpp"), *csrc.rglob("*.inc")]):
        layer = layer_of(path, csrc)
        name = path.relative_to(root)
        if layer not in ALLOWED:
            found.append(f"{name}: the folder {layer} is not a known layer")
            continue
        for bracket, target in INCLUDE.findall(path.read_text()):
            if (csrc / target).is_file():
                if bracket == "<":
                    found.append(f"{name}: includes {target} with <>, project headers take quotes")
                other = layer_of(csrc / target, csrc)
                if other not in ALLOWED[layer]:
                    found.append(f"{name}: {layer} may not include {other} ({target})")
            elif bracket == '"':
                found.append(f"{name}: includes {target}, which does not exist under csrc/")
            elif layer in TORCH_FREE and FOREIGN.match(target):
                found.append(f"{name}: {layer} may not include <{target}>")
    return found


def library_violations(root: Path) -> list[str]:
    library = root / "mybackend" / "libmybackend_core.so"
    if not library.exists():
        return [f"{library.relative_to(root)} is not built"]
    found = []
    dynamic = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    for needed in re.findall(r"NEEDED.*\[(.+)\]", dynamic):
        if not CORE_NEEDED.match(needed):
            found.append(f"libmybackend_core.so needs {needed}")
    symbols = subprocess.run(["nm", "-DC", str(library)], capture_output=True, text=True, check=True).stdout
    for line in symbols.splitlines():
        kind, _, name = line[17:].partition(" ")
        if kind == "U" and re.match(r"(Py[A-Z_]|_Py|c10::|at::|torch::|cu[A-Z]|cuda[A-Z])", name):
            found.append(f"libmybackend_core.so needs the symbol {name}")
        elif kind in "TD" and not CORE_EXPORTED.match(name) and "mybackend" not in name:
            found.append(f"libmybackend_core.so exports the foreign symbol {name}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--root", type=Path, default=Path(__file__).resolve().parent.parent, help="the project's folder"
    )
    parser.add_argument("--no-libraries", action="store_true", help="check the include direction only")
    options = parser.parse_args()
    violations = include_violations(options.root)
    if not options.no_libraries:
        violations += library_violations(options.root)
    for violation in violations:
        print(violation)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
