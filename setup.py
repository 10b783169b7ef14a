"""Builds libmybackend_core.so (no torch) and mybackend/_C.so (the PyTorch glue on top of it)."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VERSION = "0.1.0"

if not sys.platform.startswith("linux") or platform.machine() not in ("x86_64", "aarch64"):
    sys.exit(f"mybackend builds on Linux (x86-64, aarch64) only, not on {sys.platform} {platform.machine()}")

# The extension must be built against the torch that it will run with. pip's isolated builds hide
# the environment's packages; torch is looked for where they are.
sys.path += [path for path in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")} if path not in sys.path]
try:
    import torch
except ImportError:
    sys.exit("mybackend builds against the installed torch, and there is none: install torch 2.13 or later first")

if tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < (2, 13):
    sys.exit(f"mybackend needs torch 2.13 or later, found {torch.__version__}")

from setuptools import Extension, setup  # noqa: E402
from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths  # noqa: E402

CSRC = ROOT / "csrc"
CORE_FOLDERS = ("base", "driver", "core", "replay", "capi")
GLUE_FOLDERS = ("torch", "python")
# Headers that programs include as <mybackend/NAME.h>.
PUBLIC_HEADERS = (
    "core/aligned_bytes.h",
    "core/tracker.h",
    "core/cpu_pool.h",
    "base/thread_local.h",
    "capi/mybackend.h",
    "capi/cuda_allocator.h",
)

SANITIZE = os.environ.get("MYBACKEND_SANITIZE", "")  # a name that -fsanitize= takes; see scripts/sanitize_storage.sh
IS_DEBUG = os.environ.get("MYBACKEND_DEBUG") == "1"
OPTIMIZE = (
    ["-O0"] if IS_DEBUG else ["-O1", "-fno-omit-frame-pointer", f"-fsanitize={SANITIZE}"] if SANITIZE else ["-O3"]
)
LINK_TIME = [f"-fsanitize={SANITIZE}"] if SANITIZE else [] if IS_DEBUG else ["-flto=auto"]
COMMON_FLAGS = [
    "-std=c++20",
    "-g1",
    "-fPIC",
    "-fvisibility-inlines-hidden",
    "-fno-semantic-interposition",
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",
    *OPTIMIZE,
]


def sources(folders: tuple[str, ...]) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for folder in folders for path in (CSRC / folder).rglob("*.cpp"))


def torch_tag() -> str:
    return torch.__version__.replace("+", "_")


class Build(BuildExtension):
    """Ninja builds in one folder per torch version, so that a rebuild compiles what changed."""

    def finalize_options(self) -> None:
        super().finalize_options()
        # A fixed place: editable installs would otherwise use a new temporary folder each time.
        self.build_temp = str(
            ROOT
            / "build"
            / f"temp{SANITIZE and '-' + SANITIZE}-{torch_tag()}-py{sys.version_info.major}{sys.version_info.minor}"
        )

    def get_ext_filename(self, name: str) -> str:
        # Called with the full name and with its last part.
        if name == "libmybackend_core":
            return "libmybackend_core.so"
        if name == "mybackend.libmybackend_core":
            return os.path.join("mybackend", "libmybackend_core.so")
        return super().get_ext_filename(name)

    def build_extension(self, extension: Extension) -> None:
        if extension.name != "mybackend.libmybackend_core":
            core = Path(self.get_ext_fullpath("mybackend.libmybackend_core"))
            extension.library_dirs.append(str(core.parent))
        if extension.name == "mybackend._C":
            self.precompile_header(extension)
        super().build_extension(extension)

    def precompile_header(self, extension: Extension) -> None:
        """Compiles csrc/torch/pch.h once; every glue file then starts from the result."""
        header = CSRC / "torch" / "pch.h"
        out = Path(self.build_temp) / "pch" / "pch.h"
        gch = out.with_suffix(".h.gch")
        compiler = os.environ.get("CXX", "c++")
        macros = [f"-D{name}={value}" if value is not None else f"-D{name}" for name, value in extension.define_macros]
        macros += ["-DTORCH_API_INCLUDE_EXTENSION_H", "-DTORCH_EXTENSION_NAME=_C"]
        includes = [f"-I{path}" for path in [*extension.include_dirs, *self.include_dirs]]
        flags = [*extension.extra_compile_args["cxx"], *macros]
        stamp = out.parent / "flags"
        if (
            not gch.exists()
            or gch.stat().st_mtime < header.stat().st_mtime
            or not stamp.exists()
            or stamp.read_text() != " ".join(flags)
        ):
            out.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(header, out)
            command = [compiler, "-x", "c++-header", *flags, *includes, "-c", str(out), "-o", str(gch)]
            if subprocess.run(command, cwd=ROOT).returncode != 0:
                return  # only speed is lost
            stamp.write_text(" ".join(flags))
        extension.extra_compile_args["cxx"] = ["-include", str(out), *extension.extra_compile_args["cxx"]]


def copy_public_headers() -> None:
    target = ROOT / "mybackend" / "include" / "mybackend"
    target.mkdir(parents=True, exist_ok=True)
    for name in PUBLIC_HEADERS:
        text = (CSRC / name).read_text()
        for other in PUBLIC_HEADERS:
            text = text.replace(f'#include "{other}"', f'#include "{Path(other).name}"')
        path = target / Path(name).name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def write_build_info() -> None:
    text = f'"""Written by setup.py."""\n\nVERSION = "{VERSION}"\nTORCH_VERSION = "{torch.__version__}"\n'
    path = ROOT / "mybackend" / "_build.py"
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


copy_public_headers()
write_build_info()
common = dict(include_dirs=[str(CSRC)], language="c++")
core = Extension(
    "mybackend.libmybackend_core",
    sources(CORE_FOLDERS),
    define_macros=[("MYBACKEND_VERSION", f'"{VERSION}"')],
    # The allocator's small functions live in several files and are called in each operator.
    extra_compile_args={"cxx": [*COMMON_FLAGS, *LINK_TIME]},
    extra_link_args=[*LINK_TIME, *OPTIMIZE, "-Wl,-soname,libmybackend_core.so", "-Wl,--as-needed", "-pthread"],
    **common,
)
glue = CppExtension(
    "mybackend._C",
    sources(GLUE_FOLDERS),
    define_macros=[("MYBACKEND_TORCH_VERSION", f'"{torch.__version__}"')],
    libraries=["mybackend_core"],
    extra_compile_args={"cxx": COMMON_FLAGS},
    extra_link_args=["-Wl,-rpath,$ORIGIN", "-Wl,-rpath,$ORIGIN/../torch/lib"],
    **common,
)
glue.include_dirs = [str(CSRC), *include_paths()]
glue.include_dirs += [str(Path(path) / "kineto") for path in include_paths() if (Path(path) / "kineto").is_dir()]

extensions = [core, glue]


def cuda_include_folders() -> list[str]:
    """Where CUDA's headers are: the toolkit's folder, or those of the wheels beside torch, which
    have the runtime's and the compiler's headers in two places. Empty when there are none."""
    site = Path(torch.__file__).resolve().parent.parent
    candidates = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [Path(folder) / "include" for folder in candidates if folder]
    folders += [*sorted((site / "nvidia").glob("cu*/include")), site / "nvidia" / "cuda_runtime" / "include"]
    compiler = [site / "triton" / "backends" / "nvidia" / "include"]
    for folder in folders:
        if (folder / "cuda_runtime_api.h").exists():
            for other in [folder, *compiler]:
                if (other / "crt" / "host_defines.h").exists():
                    return [str(path) for path in dict.fromkeys([folder, other])]
    return []


# The complete swap-in: only for a CUDA build of torch. It needs CUDA's headers, but no compiler or
# library of CUDA: torch's own libraries bring the runtime.
if torch.version.cuda is not None:
    cuda_include = cuda_include_folders()
    if not cuda_include:
        print(
            "mybackend: no CUDA headers found (CUDA_HOME): building without mybackend.cuda.install()", file=sys.stderr
        )
    else:
        swap_in = CppExtension(
            "mybackend._cuda",
            sources(("torch_cuda",)),
            libraries=["mybackend_core", "c10_cuda", "torch_cuda"],
            extra_compile_args={"cxx": COMMON_FLAGS},
            extra_link_args=["-Wl,-rpath,$ORIGIN", "-Wl,-rpath,$ORIGIN/../torch/lib"],
            **common,
        )
        swap_in.include_dirs = [str(CSRC), *cuda_include, *include_paths()]
        extensions.append(swap_in)

setup(
    version=VERSION,
    ext_modules=extensions,
    cmdclass={"build_ext": Build},
    packages=["mybackend"],
    py_modules=["mybackend_autoload"],
    package_data={"mybackend": ["*.so", "include/mybackend/*.h", "py.typed", "*.pyi"]},
    install_requires=["torch>=2.13"],
)
