"""Host programs that run CUDA kernels on the emulator of plugins/csrc/emulation, compiled with g++."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
KERNELS = REPOSITORY / "plugins" / "csrc"
EMULATOR = sorted((KERNELS / "emulation").glob("*.cpp"))
BUILD = REPOSITORY / "build" / "emulation"

# The element types of the kernels, in the order of ElementType.
TYPES = {"half": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}

ERROR_STATUS = 70  # kErrorStatus of emulation/errors.h
SANITIZER_STATUS = {"thread": 66, "address": 77}
_SANITIZER_FLAGS = {
    None: ("-O2",),
    "thread": ("-O1", "-fsanitize=thread"),
    "address": ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
}
_FLAGS = ("-std=c++17", "-g1", "-DTRTFORGE_EMULATION", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")
_TOO_LONG_S = 600


def build_host_program(sources: Sequence[Path], *, sanitizer: str | None = None, defines: Sequence[str] = ()) -> Path:
    """Compile C++ sources (a .cu file too) with the emulator; objects and programs of the same text are used again.

    Includes are found from plugins/csrc and tests/csrc. Skips the test where g++ or CUDA's headers are missing.

    Args:
        sources: The files that make the program, without the emulator's own.
        sanitizer: None, "thread", or "address" (with undefined behaviour).
        defines: Macros, as NAME or NAME=VALUE.

    Raises:
        AssertionError: The compiler refused them; its messages are in the text.
    """
    return _build(tuple(sources), sanitizer, tuple(defines))


@functools.cache  # sources stay as they are while the tests run
def _build(sources: tuple[Path, ...], sanitizer: str | None, defines: tuple[str, ...]) -> Path:
    flags = [*_FLAGS, *_SANITIZER_FLAGS[sanitizer], *(f"-D{name}" for name in defines)]
    flags += [f"-I{KERNELS}", f"-I{REPOSITORY / 'tests' / 'csrc'}", "-isystem", str(cuda_include())]
    files = [*(path.resolve() for path in sources), *EMULATOR]
    objects = [
        _make(BUILD / "objects" / f"{fingerprint}.o", [*flags, "-x", "c++", "-c", str(file)])
        for file, fingerprint in zip(files, source_fingerprints(files, flags), strict=True)
    ]
    together = hashlib.sha256("\0".join(map(str, objects)).encode()).hexdigest()
    return _make(BUILD / together / sources[0].stem, [*flags, *map(str, objects)])


def sanitizer_environment() -> dict[str, str]:
    """The environment of a run in which a sanitizer ends the program at its first report, with SANITIZER_STATUS."""
    address = SANITIZER_STATUS["address"]
    return {
        **os.environ,
        "TSAN_OPTIONS": f"halt_on_error=1 exitcode={SANITIZER_STATUS['thread']}",
        "ASAN_OPTIONS": f"exitcode={address}",
        "UBSAN_OPTIONS": f"halt_on_error=1 print_stacktrace=1 exitcode={address}",
    }


def cuda_include() -> Path:
    """The folder of cuda_fp16.h: beside nvcc, or /usr/local/cuda, or CUDA_HOME."""
    nvcc = shutil.which("nvcc")
    roots = [Path(os.environ["CUDA_HOME"])] if "CUDA_HOME" in os.environ else []
    roots += [Path(nvcc).resolve().parents[1]] if nvcc else []
    roots += [Path("/usr/local/cuda")]
    for root in roots:
        if (root / "include" / "cuda_fp16.h").exists():
            return root / "include"
    pytest.skip("CUDA's headers are not here: install the CUDA toolkit, or set CUDA_HOME")


def source_fingerprints(files: Sequence[Path], flags: Sequence[str]) -> list[str]:
    """For each file a sha256 of it, the headers that it includes, the flags and the compiler."""
    # One rule for each file, in order: its object, then what it is made of.
    rules = re.split(r"^(?! ).*?\.o: ", _compile([*flags, "-MM", "-x", "c++", *map(str, files)]), flags=re.MULTILINE)[
        1:
    ]
    common = "\0".join([_compiler_version(), *flags]).encode()
    fingerprints = []
    for rule in rules:
        digest = hashlib.sha256(common)
        for word in re.split(r"(?<!\\)\s+", rule.replace("\\\n", " ").strip()):
            path = Path(word.replace("\\ ", " "))
            digest.update(f"\0{path}\0".encode() + path.read_bytes())
        fingerprints.append(digest.hexdigest())
    return fingerprints


def _make(output: Path, arguments: Sequence[str]) -> Path:
    if not output.exists():
        output.parent.mkdir(parents=True, exist_ok=True)
        beside = output.with_name(f"{os.getpid()}-{output.name}")  # renamed into place: another test may be using it
        _compile([*arguments, "-o", str(beside)])
        beside.replace(output)
    return output


def _compile(arguments: Sequence[str]) -> str:
    command = [_compiler(), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TOO_LONG_S)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stderr}"
    return result.stdout


@functools.cache
def _compiler_version() -> str:
    return _compile(["--version"])


def _compiler() -> str:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not here: the emulated kernels are compiled with it")
    return compiler
