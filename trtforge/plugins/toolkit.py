"""The tools that a plugin library is compiled with: the CUDA toolkit or its wheels, CMake, and TensorRT's headers."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from trtforge.errors import InputError, UnavailableError

# What compiles CUDA 13 code without a system-wide toolkit. They are of one release: ptxas refuses the code of a newer
# compiler.
WHEELS = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-runtime", "nvidia-cuda-cccl")
INSTALL_WHEELS = "pip install " + " ".join(f"'{name}==13.0.*'" for name in WHEELS)
_INSTALL_CUDA = f"install the CUDA toolkit 13 and put its bin folder on PATH, give --cuda DIR, or {INSTALL_WHEELS}"
_MIN_CUDA = (13, 0)
_MIN_CMAKE = (3, 24)
_SYSTEM_CUDA = Path("/usr/local/cuda")
# Of an environment that is used without being activated: what pip installed is here and not on PATH.
_PYTHON_PROGRAMS = Path(sys.executable).parent
# Where packages and archives put TensorRT's headers.
_SYSTEM_INCLUDES = (
    "/usr/include/x86_64-linux-gnu",
    "/usr/include/aarch64-linux-gnu",
    "/usr/include",
    "/usr/local/include",
    "/usr/local/tensorrt/include",
)
_HEADER = "NvInferRuntime.h"
_VERSION_HEADER = "NvInferVersion.h"
_MIN_TENSORRT = (10, 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Toolkit:
    """A CUDA compiler.

    Attributes:
        nvcc: the program.
        version: e.g. "13.0.88".
        library_dir: of the CUDA runtime, where nvcc does not know it itself.
    """

    nvcc: Path
    version: str
    library_dir: Path | None


@dataclasses.dataclass(frozen=True, slots=True)
class BuildTools:
    """CMake, the generator that it is told, and the program that runs what it generates."""

    cmake: Path
    generator: Literal["Ninja", "Unix Makefiles"]
    program: Path


@dataclasses.dataclass(frozen=True, slots=True)
class Headers:
    """TensorRT's headers.

    Attributes:
        include_dir: the folder.
        version: e.g. "11.1.0".
    """

    include_dir: Path
    version: str


def find_toolkit(root: Path | None = None) -> Toolkit:
    """The CUDA compiler: the one in `root`, else on PATH, in /usr/local/cuda, or in the Python packages of NVIDIA.

    Raises:
        InputError: `root` holds none.
        UnavailableError: there is none, it does not run, or it is too old.
    """
    if root is not None and not (root / "bin" / "nvcc").is_file():
        raise InputError(f"{root} is no CUDA toolkit", "it holds no bin/nvcc", "give the folder that does")
    for nvcc in [root / "bin" / "nvcc"] if root else _nvcc_candidates():
        version = _version_of(nvcc, r"\bV(\d+\.\d+\.\d+)")
        if _numbers(version) < _MIN_CUDA:
            raise UnavailableError(
                f"{nvcc} is CUDA {version}", f"the kernels need CUDA {_dotted(_MIN_CUDA)} or newer", _INSTALL_CUDA
            )
        return Toolkit(nvcc, version, _library_dir(nvcc))
    raise UnavailableError("nvcc was not found", "the plugin is CUDA code, which nvcc compiles", _INSTALL_CUDA)


def find_beside(nvcc: Path, name: str) -> Path | None:
    """A file of a compiler's toolkit, by its place in there; nvcc may be a script elsewhere that calls the real one."""
    places = (root / name for root in (nvcc.resolve().parent.parent, _SYSTEM_CUDA))
    return next(filter(Path.is_file, places), None)


def find_build_tools() -> BuildTools:
    """CMake and what it drives, after a look that a C++ compiler is there too.

    Raises:
        UnavailableError: one of them is missing, or CMake is too old.
    """
    cmake = _which("cmake")
    if cmake is None:
        raise UnavailableError("cmake was not found", "it runs the compilers", "pip install cmake")
    version = _version_of(cmake, r"version (\d+\.\d+\.\d+)")
    if _numbers(version) < _MIN_CMAKE:
        why = f"the plugin's CMakeLists.txt needs {_dotted(_MIN_CMAKE)} or newer"
        raise UnavailableError(f"{cmake} is CMake {version}", why, "pip install cmake")
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        raise UnavailableError(
            "no C++ compiler was found", "nvcc compiles host code with it", "install g++ (apt install g++)"
        )
    if ninja := _which("ninja"):
        return BuildTools(cmake, "Ninja", ninja)
    if make := _which("make"):
        return BuildTools(cmake, "Unix Makefiles", make)
    raise UnavailableError("neither ninja nor make was found", "CMake runs the compilers with one", "pip install ninja")


def find_headers(include_dir: Path | None = None, tensorrt_root: Path | None = None) -> Headers:
    """TensorRT's headers. A place that is named is the only one that is looked at.

    Args:
        include_dir: the folder that holds them.
        tensorrt_root: an unpacked TensorRT, with the folder `include`.

    Raises:
        InputError: the named place holds none, or those of a release without IPluginV3.
        UnavailableError: none was named, and none is installed.
    """
    named = include_dir or (tensorrt_root / "include" if tensorrt_root else None)
    for folder in [named] if named else [Path(name) for name in _SYSTEM_INCLUDES]:
        if (folder / _HEADER).is_file() and (folder / _VERSION_HEADER).is_file():
            return Headers(folder, _headers_version(folder))
    if named is not None:
        raise InputError(f"{named} holds no TensorRT headers", f"no {_HEADER} there", "give the folder that has it")
    raise UnavailableError(
        "TensorRT's headers were not found",
        f"no {_HEADER} in {', '.join(_SYSTEM_INCLUDES)}",
        "give --tensorrt-include DIR or set TensorRT_ROOT; they are the folder include of a TensorRT archive and of "
        "github.com/NVIDIA/TensorRT, and Debian's libnvinfer-headers-dev. --kernels builds without them",
    )


def _which(name: str) -> Path | None:
    """A program on PATH, else one that pip installed beside this Python."""
    found = shutil.which(name) or shutil.which(name, path=str(_PYTHON_PROGRAMS))
    return Path(found) if found else None


def _nvcc_candidates() -> Iterator[Path]:
    on_path = shutil.which("nvcc")
    if on_path:
        yield Path(on_path)
    yield from filter(Path.is_file, [_SYSTEM_CUDA / "bin" / "nvcc"])
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        yield from sorted(Path(folder).glob("cu1[3-9]/bin/nvcc"), reverse=True)


def _library_dir(nvcc: Path) -> Path | None:
    """The wheels keep libraries in `lib`, where their nvcc looks in `lib64`."""
    root = nvcc.resolve().parent.parent
    return root / "lib" if not (root / "lib64").is_dir() and (root / "lib" / "libcudart_static.a").is_file() else None


def _version_of(program: Path, pattern: str) -> str:
    try:
        printed = subprocess.run([program, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as err:
        raise UnavailableError(f"{program} does not run", str(err), "install it again") from err
    found = re.search(pattern, printed)
    if found is None:
        raise UnavailableError(f"{program} does not tell its version", printed[:200].strip(), "install it again")
    return found[1]


def _headers_version(folder: Path) -> str:
    """The version in NvInferVersion.h, which names the numbers by one more macro since TensorRT 10.14.

    Raises:
        InputError: it has none that is known, or is too old.
    """
    text = (folder / _VERSION_HEADER).read_text(encoding="utf-8", errors="replace")
    defined = dict(re.findall(r"^#define\s+(\w+)\s+(\w+)", text, re.MULTILINE))
    values = [defined.get(f"NV_TENSORRT_{part}", "") for part in ("MAJOR", "MINOR", "PATCH")]
    values = [defined.get(value, value) for value in values]
    if not all(value.isdecimal() for value in values):
        raise InputError(f"{folder / _VERSION_HEADER} names no version", "is it TensorRT's?", "check the folder")
    version = ".".join(values)
    if _numbers(version) < _MIN_TENSORRT:
        why = f"the plugin is an IPluginV3, which TensorRT has since {_dotted(_MIN_TENSORRT)}"
        raise InputError(f"{folder} holds the headers of TensorRT {version}", why, "give those of a newer TensorRT")
    return version


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
