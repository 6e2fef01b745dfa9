"""`trtforge triton install|info|serve`: the server that packages are proved with."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtforge.cli import options
from trtforge.cli.render import plain, print_json, print_table, progress_reporter
from trtforge.errors import ChildDiedError, InputError

if TYPE_CHECKING:
    from trtforge.serving.triton.environment import TritonInstall
    from trtforge.serving.triton.server import TritonServer

NAME = "triton"
# Seconds between two looks at a server that serves.
_WATCH_S = 0.5

app = typer.Typer(no_args_is_help=True, help="The Triton Inference Server of this machine: install it, run it.")


@app.command("install")
def install(
    folder: Annotated[
        Path | None,
        typer.Option("--dir", metavar="DIR", help="Where it goes. Default: ~/.cache/trtforge/triton."),
    ] = None,
    python: Annotated[
        Path | None,
        typer.Option(metavar="PROGRAM", help="The Python of its environment. Default: this one, if 3.11 or 3.12."),
    ] = None,
    as_json: options.AsJson = False,
) -> int:
    """Install the server with ONNX Runtime in an environment of its own; one that is there already is left as it is."""
    from trtforge.serving.triton.environment import cache_folder
    from trtforge.serving.triton.install import install_triton

    with progress_reporter() as report:
        found = install_triton(folder or cache_folder(), report, python)
    _show(found, as_json)
    return 0


@app.command("info")
def info(triton_env: options.TritonEnv = None, as_json: options.AsJson = False) -> int:
    """Show which server the other commands use, its backends, response caches and Python packages."""
    from trtforge.serving.triton.environment import find_triton, places_from_option

    _show(find_triton(places_from_option(triton_env)), as_json)
    return 0


@app.command("serve", context_settings={"allow_extra_args": True, "ignore_unknown_options": False})
def serve(
    context: typer.Context,
    repository: Annotated[
        Path, typer.Argument(metavar="REPO", help="A model repository, as `trtforge package` writes.")
    ],
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="The address to listen on.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option("--http-port", metavar="N", min=1, max=65535)] = 8000,
    grpc_port: Annotated[int, typer.Option("--grpc-port", metavar="N", min=1, max=65535)] = 8001,
    metrics_port: Annotated[int, typer.Option("--metrics-port", metavar="N", min=1, max=65535)] = 8002,
    cache_size: Annotated[
        int, typer.Option("--cache-size", metavar="BYTES", min=0, help="Size of the response cache; 0 means none.")
    ] = 0,
    cpus: Annotated[
        str | None, typer.Option(metavar="LIST", help="Cores for the server and its models, e.g. 0,1. Default: all.")
    ] = None,
    log: Annotated[Path | None, typer.Option(metavar="FILE", help="Keep the server's log in this file.")] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=1, help="For the models to load.")
    ] = 600.0,
    triton_env: options.TritonEnv = None,
) -> int:
    """Run the server on a repository until Ctrl-C. What follows `--` goes to `tritonserver` as it is."""
    from trtforge.serving.triton.environment import find_triton, places_from_option
    from trtforge.serving.triton.server import TritonServer

    found = find_triton(places_from_option(triton_env))
    with tempfile.TemporaryDirectory(prefix="trtforge-triton-") as scratch:
        server = TritonServer(
            found,
            repository,
            log=log or Path(scratch) / "triton.log",
            host=host,
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
            cpus=None if cpus is None else _numbers(cpus),
            cache_bytes=cache_size,
            arguments=context.args,
        )
        with server:
            server.wait_ready(timeout_s)
            _print_served(server)
            while server.is_alive():
                time.sleep(_WATCH_S)
        why = server.failure() or server.ending() or ""
        raise ChildDiedError("the Triton server ended", why, "start it again, with --log FILE to keep its log")


def _print_served(server: TritonServer) -> None:
    from trtforge.serving.triton.client import TritonClient

    with TritonClient(server.http) as client:
        models = client.models()
    sys.stdout.write("the Triton server is ready; Ctrl-C stops it\n")
    print_table([("HTTP", f"http://{server.http}"), ("gRPC", server.grpc), ("metrics", server.metrics)])
    print_table([("model", "version", "state"), *((model.name, model.version, model.state) for model in models)])
    sys.stdout.flush()


def _show(found: TritonInstall, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "root": str(found.root),
                "version": found.version,
                "binary": str(found.binary),
                "backends": found.backend_names(),
                "caches": found.cache_names(),
                "python": None if found.python is None else str(found.python),
                "packages": found.packages(),
            }
        )
        return
    sys.stdout.write(f"Triton Inference Server {found.version or '(version not known)'} in {plain(str(found.root))}\n")
    shown = {
        name: version for name, version in found.packages().items() if name in ("numpy", "onnxruntime", "tokenizers")
    }
    packages = ", ".join(f"{name} {version}" for name, version in shown.items())
    print_table(
        [
            ("program", str(found.binary)),
            ("backends", ", ".join(found.backend_names()) or "none"),
            ("response caches", ", ".join(found.cache_names()) or "none"),
            ("Python packages", packages or "those of the system"),
        ]
    )


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as err:
        raise InputError(f"--cpus {text!r} cannot be used", "it takes numbers of cores", "--cpus 0,1") from err
