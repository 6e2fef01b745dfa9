"""Compile the plugin library with CMake. A library that was built from the same inputs is left as it is."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from trtforge.errors import InputError, TrtForgeError
from trtforge.hashing import fingerprint, sha256_of_file
from trtforge.plugins.build_errors import build_error
from trtforge.plugins.record import LibraryRecord, read_record, record_path
from trtforge.plugins.resources import resources_from_ptxas
from trtforge.plugins.sources import SourceTree, find_sources
from trtforge.plugins.toolkit import (
    BuildTools,
    Headers,
    Toolkit,
    find_build_tools,
    find_headers,
    find_toolkit,
)
from trtforge.processes import run_with_children
from trtforge.progress import Reporter, Stopwatch, ignore
from trtforge.staging import check_free, locked, open_staging, replace_file

# As CMakeLists.txt has them; what the kernels are tested for.
ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)


@dataclasses.dataclass(frozen=True, slots=True)
class LibraryRequest:
    """What to build.

    Attributes:
        folder: where the library and its record are put.
        architectures: compute capabilities.
        kernels_only: the kernels behind a C interface, without TensorRT.
        cuda: folder of a CUDA toolkit; None finds one.
        tensorrt_include: folder of TensorRT's headers; None finds them.
        tensorrt_root: folder of an unpacked TensorRT, looked at where no headers are named.
        force: build although nothing changed, and replace a library without a record.
        jobs: compilers that run at once; None lets the build tool choose.
    """

    folder: Path
    architectures: tuple[int, ...] = ARCHITECTURES
    kernels_only: bool = False
    cuda: Path | None = None
    tensorrt_include: Path | None = None
    tensorrt_root: Path | None = None
    force: bool = False
    jobs: int | None = None

    @property
    def target(self) -> str:
        """In CMakeLists.txt."""
        return "trtforge_kernels" if self.kernels_only else "trtforge_plugin"

    @property
    def library(self) -> Path:
        """The file that comes out."""
        return self.folder / f"lib{self.target}.so"


@dataclasses.dataclass(frozen=True, slots=True)
class BuiltLibrary:
    """The library that is there now; `is_reused` where it was before."""

    path: Path
    record: LibraryRecord
    is_reused: bool
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class _Tools:
    build: BuildTools
    toolkit: Toolkit
    headers: Headers | None
    sources: SourceTree


def architectures_from_option(text: str | None) -> tuple[int, ...]:
    """The architectures of `--arch`, e.g. `"86,sm_90"`; None gives all.

    Raises:
        InputError: one of them is unknown.
    """
    if text is None:
        return ARCHITECTURES
    names = [name.strip().removeprefix("sm_") for name in text.split(",")]
    for name in names:
        if name not in map(str, ARCHITECTURES):
            allowed = ", ".join(f"sm_{known}" for known in ARCHITECTURES)
            raise InputError(
                f"--arch {text!r}: {name!r} is not known", f"the kernels are for {allowed}", "--arch sm_86"
            )
    return tuple(sorted({int(name) for name in names}))


def build_library(request: LibraryRequest, report: Reporter = ignore) -> BuiltLibrary:
    """Build a library, unless the one in its place was built from the same inputs.

    Raises:
        InputError: a named folder holds no toolkit or headers, or another file is in the library's place.
        UnavailableError: a tool is missing or too old, or the place cannot be written.
        BuildError: CMake or a compiler refused.
    """
    watch = Stopwatch(report)
    tools = _find_tools(request)
    inputs = _fingerprint_inputs(request, tools)
    known = _known_record(request.library)
    if known is not None and known.inputs_sha256 == inputs and not request.force:
        return BuiltLibrary(request.library, known, True, 0.0)
    for path in (request.library, record_path(request.library)):
        check_free(path, request.force or known is not None)
    with open_staging(request.library) as staging:
        built, log = _compile(request, tools, inputs, staging.work, watch)
        record = LibraryRecord(
            kind="kernels" if request.kernels_only else "plugin",
            library_sha256=sha256_of_file(built),
            inputs_sha256=inputs,
            sources_sha256=tools.sources.sha256,
            architectures=request.architectures,
            cuda=tools.toolkit.version,
            tensorrt=tools.headers.version if tools.headers else None,
            kernels=resources_from_ptxas(log),
        )
        # Of two builds into one folder, the library and the record of one stay.
        with locked(request.folder):
            replace_file(request.library, built.read_bytes())
            replace_file(record_path(request.library), record.model_dump_json(indent=1) + "\n")
    return BuiltLibrary(request.library, record, False, round(sum(watch.seconds.values()), 1))


def _find_tools(request: LibraryRequest) -> _Tools:
    headers = None if request.kernels_only else find_headers(request.tensorrt_include, request.tensorrt_root)
    return _Tools(find_build_tools(), find_toolkit(request.cuda), headers, find_sources())


def _fingerprint_inputs(request: LibraryRequest, tools: _Tools) -> str:
    return fingerprint(
        {
            "target": request.target,
            "sources": tools.sources.sha256,
            "architectures": request.architectures,
            "cuda": tools.toolkit.version,
            "tensorrt": tools.headers.version if tools.headers else None,
        }
    )


def _known_record(library: Path) -> LibraryRecord | None:
    """The record of a library that is already there, where it is whole."""
    try:
        return read_record(library)
    except TrtForgeError:
        return None


def _compile(request: LibraryRequest, tools: _Tools, inputs: str, scratch: Path, watch: Stopwatch) -> tuple[Path, str]:
    """The library in `scratch`, and what the compilers said."""
    build = scratch / "build"
    cmake, generator = str(tools.build.cmake), tools.build.generator
    configure = [
        *(cmake, "-S", str(tools.sources.root), "-B", str(build), "-G", generator),
        f"-DCMAKE_MAKE_PROGRAM={tools.build.program}",
        f"-DCMAKE_CUDA_COMPILER={tools.toolkit.nvcc}",
        f"-DCMAKE_CUDA_ARCHITECTURES={';'.join(map(str, request.architectures))}",
        f"-DTRTFORGE_SOURCE_FINGERPRINT={inputs}",
        f"-DTRTFORGE_PLUGIN={'OFF' if tools.headers is None else 'ON'}",
        *([f"-DTRTFORGE_TENSORRT_INCLUDE_DIR={tools.headers.include_dir.absolute()}"] if tools.headers else []),
    ]
    # Lines of two compilers that run at once must not mix: ninja keeps each one's together, make when told to.
    keep_together = ["--", "--output-sync=target"] if generator == "Unix Makefiles" else []
    jobs = [] if request.jobs is None else [str(request.jobs)]
    compile_ = [cmake, "--build", str(build), "--target", request.target, "--parallel", *jobs, *keep_together]
    environment = dict(os.environ)
    if tools.toolkit.library_dir is not None:
        paths = [str(tools.toolkit.library_dir), *filter(None, [environment.get("LIBRARY_PATH")])]
        environment["LIBRARY_PATH"] = os.pathsep.join(paths)
    with watch.stage("configure"):
        _run(configure, environment, scratch / "configure.log")
    with watch.stage("compile") as note:
        note(", ".join(f"sm_{architecture}" for architecture in request.architectures))
        log = _run(compile_, environment, scratch / "compile.log")
    return build / request.library.name, log


def _run(command: list[str], environment: dict[str, str], log: Path) -> str:
    """What a command printed. Its children end with it, whatever happens here.

    Raises:
        BuildError: it failed.
        UnavailableError: it failed for want of space, or because the toolkit's parts do not fit together.
    """
    with log.open("wb") as output:
        status = run_with_children(command, environment, output)
    text = log.read_text(encoding="utf-8", errors="replace")
    if status != 0:
        raise build_error("the plugin was not built", text)
    return text
