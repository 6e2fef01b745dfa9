"""Assembly of the commands, and the one place where errors become messages and exit codes.

Exit codes: 0 ok; 1 a check failed; 2 bad input or not possible here; 3 an internal error; 130 interrupted.
"""

from __future__ import annotations

import dataclasses
import gc
import io
import json
import os
import sys
import tempfile
import traceback
from typing import Annotated, Any, TextIO

import typer

from trtforge import __version__
from trtforge.cli import (
    bench,
    build,
    cache,
    calibrate,
    doctor,
    export,
    fuse,
    inspect,
    lint,
    loadtest,
    package,
    plugin,
    profile,
    quantize,
    reduce,
    signals,
    triton,
    verify,
)
from trtforge.errors import InternalError, TrtForgeError, UnavailableError

_INTERRUPTED = 130

app = typer.Typer(
    name="trtforge",
    help="Compile ONNX models into TensorRT engines that are small, fast and proven accurate.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

for module in (build, export, inspect, lint, fuse, profile, calibrate, quantize, verify, reduce, doctor, package):
    app.command(module.NAME)(module.command)
app.add_typer(cache.app, name=cache.NAME)
app.add_typer(plugin.app, name=plugin.NAME)
app.add_typer(bench.app, name=bench.NAME)
app.add_typer(loadtest.app, name=loadtest.NAME)
app.add_typer(triton.app, name=triton.NAME)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"trtforge {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    del version, debug


# typer 0.29 carries its own click; the base of its usage errors is reached through a public name in every version.
_UsageError: type[Exception] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def main() -> None:
    """Run the command line and exit with its code."""
    signals.install()
    _mend_streams()
    # A graph of 20,000 nodes is half a million objects that live to the end: looking for garbage among them every 700
    # allocations took a third of the time.
    gc.set_threshold(100_000, 10, 10)
    sys.exit(run(sys.argv[1:]))


def _mend_streams() -> None:
    """Give a closed standard stream the null device, and let output hold names that its encoding lacks."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), fd)
            setattr(sys, name, os.fdopen(fd, "r" if name == "stdin" else "w"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def run(arguments: list[str]) -> int:
    """Run one command line; returns the exit code."""
    debug = "--debug" in arguments
    as_json = "--json" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        result = typer.main.get_command(app).main(arguments, prog_name="trtforge", standalone_mode=False)
        sys.stdout.flush()
    except _UsageError as err:
        return _report_usage(err, as_json)
    except InternalError as err:
        return _report_internal(err.what, err.detail, debug, as_json)
    except TrtForgeError as err:
        if debug:
            traceback.print_exc()
        return _report(err, as_json)
    except (KeyboardInterrupt, typer.Abort):
        result = _INTERRUPTED
    except signals.Terminated as err:
        return 128 + err.number
    except OSError as err:
        if err.filename is not None:
            return _report_internal(f"{type(err).__name__}: {err}", traceback.format_exc(), debug, as_json)
        # A reader that went away, or a full disk behind stdout: there is nobody left to tell on stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        broken = isinstance(err, BrokenPipeError)
        return 1 if broken else _report(UnavailableError("stdout cannot be written", err.strerror or str(err)), False)
    except Exception as err:
        return _report_internal(f"{type(err).__name__}: {err}", traceback.format_exc(), debug, as_json)
    if result == _INTERRUPTED:
        _write(sys.stderr, "interrupted; nothing was left behind\n")
    return result if isinstance(result, int) else 0


def _report_usage(error: Any, as_json: bool) -> int:
    """A command line that typer does not accept; without any command it is the help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        _write(sys.stderr, f"{error.format_message()}\n")
        return 2
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "trtforge"
    why = "the command does not take these arguments"
    return _report(TrtForgeError(error.format_message(), why, f"see {command} --help"), as_json)


def _report(error: TrtForgeError, as_json: bool) -> int:
    """Render an error on stderr and, for `--json`, as the one document on stdout."""
    lines = [f"error: {error.what}"]
    lines += [f"  why: {error.why}"] if error.why else []
    lines += [f"  fix: {error.fix}"] if error.fix else []
    _write(sys.stderr, "\n".join(lines) + "\n")
    if as_json:
        content: dict[str, Any] = {"what": error.what, "why": error.why, "fix": error.fix}
        if error.diagnosis is not None:
            content["diagnosis"] = dataclasses.asdict(error.diagnosis)
        _print_json_error(content, error.exit_code)
    return error.exit_code


def _report_internal(what: str, detail: str, debug: bool, as_json: bool) -> int:
    """One line, and the path of a log that holds the traceback."""
    with tempfile.NamedTemporaryFile("w", prefix="trtforge-error-", suffix=".log", delete=False) as log:
        log.write(f"trtforge {__version__}\n{detail}")
    if debug:
        _write(sys.stderr, detail)
    _write(sys.stderr, f"error: internal error ({' '.join(what.split())}); details in {log.name}\n")
    if as_json:
        _print_json_error({"what": what, "why": "internal error", "fix": f"report it with {log.name}"}, 3)
    return 3


def _print_json_error(error: dict[str, Any], exit_code: int) -> None:
    _write(sys.stdout, json.dumps({"error": {**error, "exit_code": exit_code}}) + "\n")


def _write(stream: TextIO, text: str) -> None:
    """Write to a stream that may be gone: the exit code still tells."""
    try:
        stream.write(text)
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    main()
