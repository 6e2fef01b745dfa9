"""Compile the kernels without CMake: with nvcc for the card that is here, or with g++ for the emulator.

`trtforge plugin build` is the way to a library that is kept. This one serves a machine that has nvcc and nothing else,
and the host runs.
"""

from __future__ import annotations

import concurrent.futures
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from trtforge.errors import BuildError, UnavailableError
from trtforge.hashing import fingerprint, sha256_of_file
from trtforge.plugins.build_errors import build_error
from trtforge.plugins.sources import SourceTree, find_sources
from trtforge.plugins.toolkit import find_beside, find_toolkit
from trtforge.staging import translate_write_errors

_COMMON = ("-std=c++17", "-O2")
_TOO_LONG_S = 300
_HEADER = "include/cuda_fp16.h"


def build_for_device(folder: Path, architecture: int) -> tuple[Path, str]:
    """`libtrtforge_kernels.so` for one compute capability; a library of the same sources and compiler is used again.

    Args:
        folder: where it goes.
        architecture: as in 90; the code is native, so that nothing is compiled at the launch.

    Returns:
        The library, and the log of `ptxas -v`.

    Raises:
        UnavailableError: nvcc is missing, or it does not know the architecture.
        BuildError: it refused the sources.
    """
    toolkit, tree = find_toolkit(), find_sources()
    csrc = tree.root / "plugins" / "csrc"
    sources = [*sorted((csrc / "launch").glob("*.cu")), csrc / "c_interface.cpp"]
    flags = [*_COMMON, f"-gencode=arch=compute_{architecture},code=sm_{architecture}", "-Xcompiler=-fPIC"]
    flags += ["-Xptxas=-v", f"-I{csrc}"]
    name = _fingerprint(tree, [*flags, toolkit.version])
    library = folder / f"libtrtforge_kernels-sm{architecture}-{name}.so"
    log = library.with_suffix(".log")
    if not (library.is_file() and log.is_file()):
        _make_folder(folder)
        link = ["-shared", "-cudart=static", *([f"-L{toolkit.library_dir}"] if toolkit.library_dir else [])]
        log.write_text(_compile([str(toolkit.nvcc)], flags, sources, link, library), encoding="utf-8")
    return library, log.read_text(encoding="utf-8")


def build_for_host(folder: Path) -> Path:
    """The same launchers and kernels on the emulator, as a library that takes numpy arrays.

    Raises:
        UnavailableError: g++, CUDA's headers or the emulator's sources are missing.
        BuildError: g++ refused the sources.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        raise UnavailableError("g++ was not found", "the emulated kernels are compiled with it", "apt install g++")
    tree = find_sources()
    csrc = tree.root / "plugins" / "csrc"
    emulator = sorted((csrc / "emulation").glob("*.cpp"))
    if not emulator:
        why = f"the installed package does not carry them: {csrc / 'emulation'} holds none"
        raise UnavailableError("the emulator's sources are not here", why, "run this in a checkout of trtforge")
    sources = [*sorted((csrc / "launch").glob("*.cu")), csrc / "c_interface.cpp", *emulator]
    include = cuda_include()
    flags = [*_COMMON, "-DTRTFORGE_EMULATION", "-fPIC", "-w", f"-I{csrc}", "-isystem", str(include)]
    own = [sha256_of_file(path) for path in sorted((csrc / "emulation").iterdir())]
    library = folder / f"libtrtforge_emulated-{_fingerprint(tree, [*flags, *own])}.so"
    if not library.is_file():
        _make_folder(folder)
        _compile([compiler], [*flags, "-x", "c++"], sources, ["-shared"], library)
    return library


def cuda_include() -> Path:
    """The folder of cuda_fp16.h.

    Raises:
        UnavailableError: there is none.
    """
    home = os.environ.get("CUDA_HOME")
    if home and (Path(home) / _HEADER).is_file():
        return Path(home) / "include"
    nvcc = find_toolkit().nvcc
    found = find_beside(nvcc, _HEADER)
    if found is None:
        raise UnavailableError("CUDA's headers were not found", f"no cuda_fp16.h beside {nvcc}", "set CUDA_HOME")
    return found.parent


def _make_folder(folder: Path) -> None:
    with translate_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)


def _compile(
    compiler: Sequence[str], flags: Sequence[str], sources: Sequence[Path], link: Sequence[str], library: Path
) -> str:
    """Compile sources side by side and link them; returns what the compiler said."""
    scratch = library.with_suffix(f".{os.getpid()}.objects")
    scratch.mkdir(parents=True, exist_ok=True)
    try:
        objects = [scratch / f"{index}.o" for index in range(len(sources))]
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            commands = [
                [*compiler, *flags, "-c", str(source), "-o", str(target)]
                for source, target in zip(sources, objects, strict=True)
            ]
            logs = list(pool.map(_run, commands))
        linked = scratch / library.name
        _run([*compiler, *link, *map(str, objects), "-o", str(linked)])
        linked.replace(library)  # in one step: another process may be looking for it
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return "\n".join(logs)


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TOO_LONG_S)
    except (OSError, subprocess.TimeoutExpired) as err:
        raise BuildError("the kernels were not built", str(err), "check the compiler") from err
    if done.returncode != 0:
        raise build_error("the kernels were not built", done.stderr + done.stdout)
    return done.stderr + done.stdout


def _fingerprint(tree: SourceTree, others: Sequence[str]) -> str:
    """Of the sources and what else decides; enough of it for a file name."""
    return fingerprint([tree.sha256, *others])[:16]
