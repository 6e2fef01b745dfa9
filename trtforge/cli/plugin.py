"""`trtforge plugin build|info`: compile the CUDA plugin, and what a compiled one holds."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtforge.cli import options
from trtforge.cli.render import plain, print_json, print_table, progress_reporter

if TYPE_CHECKING:
    from trtforge.plugins.record import LibraryRecord

NAME = "plugin"

app = typer.Typer(no_args_is_help=True, help="The CUDA plugin of transformer blocks: compile it, or look at one.")


@app.command("build")
def build(
    arch: Annotated[
        str | None, typer.Option("--arch", metavar="LIST", help="Compute capabilities, e.g. sm_86,sm_90. Default: all.")
    ] = None,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="The kernels behind a C interface, without TensorRT's headers.")
    ] = False,
    cuda: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A CUDA toolkit. Default: nvcc on PATH, /usr/local/cuda, or NVIDIA's wheels."),
    ] = None,
    tensorrt_include: Annotated[
        Path | None,
        typer.Option(
            "--tensorrt-include",
            metavar="DIR",
            envvar="TRTFORGE_TENSORRT_INCLUDE_DIR",
            help="The folder with NvInferRuntime.h. Default: $TensorRT_ROOT/include, else the system's.",
        ),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Where the library goes.")] = Path(
        "build/plugin"
    ),
    jobs: Annotated[int | None, typer.Option(metavar="N", min=1, help="Compilers that run at once.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Build although nothing changed.")] = False,
    as_json: options.AsJson = False,
) -> int:
    """Compile the plugin library for TensorRT; one that was built from the same sources and tools is left as it is."""
    from trtforge.plugins.compile import LibraryRequest, architectures_from_option, build_library

    root = os.environ.get("TensorRT_ROOT")  # noqa: SIM112 - CMake's own spelling
    request = LibraryRequest(
        folder=output,
        architectures=architectures_from_option(arch),
        kernels_only=kernels,
        cuda=cuda,
        tensorrt_include=tensorrt_include,
        tensorrt_root=Path(root) if root else None,
        force=force,
        jobs=jobs,
    )
    with progress_reporter() as report:
        built = build_library(request, report)
    if as_json:
        print_json(_as_json(built.path, built.record) | {"reused": built.is_reused, "seconds": built.seconds})
    else:
        done = "is up to date" if built.is_reused else f"built in {built.seconds:.1f} s"
        sys.stdout.write(f"{plain(str(built.path))}: {done}\n")
        _print_record(built.record)
    return 0


@app.command("info")
def info(
    library: Annotated[Path, typer.Argument(metavar="LIB", help="The library.", show_default=False)],
    as_json: options.AsJson = False,
) -> int:
    """Show what a plugin library was built for, and the registers, spills and shared memory of each kernel."""
    from trtforge.plugins.record import read_record

    record = read_record(library)
    if as_json:
        print_json(_as_json(library, record))
        return 0
    sys.stdout.write(f"{plain(str(library))}\n")
    _print_record(record)
    _print_kernels(record)
    return 0


def _as_json(library: Path, record: LibraryRecord) -> dict[str, Any]:
    dtypes = {f"sm_{architecture}": record.dtypes(architecture) for architecture in record.architectures}
    kernels = [kernel.to_dict() for kernel in record.kernels]
    return {"library": str(library), **record.model_dump(mode="json"), "kernels": kernels, "dtypes": dtypes}


def _print_record(record: LibraryRecord) -> None:
    made_for = f"TensorRT {record.tensorrt}" if record.tensorrt else "no TensorRT (kernels alone)"
    print_table([("CUDA", record.cuda), ("for", made_for), ("sources", record.sources_sha256[:12])])
    rows = [("architecture", "types", "kernels", "most registers", "spilled bytes", "most shared bytes")]
    for architecture in record.architectures:
        kernels = [kernel for kernel in record.kernels if kernel.architecture == architecture]
        spilled = sum(kernel.spilled_bytes for kernel in kernels)
        rows.append(
            (
                f"sm_{architecture}",
                " ".join(record.dtypes(architecture)),
                str(len(kernels)),
                str(max((kernel.registers for kernel in kernels), default=0)),
                str(spilled),
                str(max((kernel.shared_bytes for kernel in kernels), default=0)),
            )
        )
    print_table(rows)


def _print_kernels(record: LibraryRecord) -> None:
    """Registers by kernel and architecture, `+n` for n bytes that are spilled; and a block's shared memory."""
    cells = {
        (kernel.name, kernel.architecture): f"{kernel.registers}"
        + (f"+{kernel.spilled_bytes}" if kernel.spilled_bytes else "")
        for kernel in record.kernels
    }
    rows = [
        (
            "registers (+ spilled bytes)",
            *(f"sm_{architecture}" for architecture in record.architectures),
            "shared bytes",
        )
    ]
    shared = {kernel.name: kernel.shared_bytes for kernel in record.kernels}
    for name in sorted(shared):
        registers = (cells.get((name, architecture), "-") for architecture in record.architectures)
        rows.append((name, *registers, str(shared[name])))
    print_table(rows)
