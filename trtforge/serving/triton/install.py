"""Install Triton Inference Server in an environment of its own.

The wheel of NVIDIA's pytriton ships the server's binary; nothing else of it is used, so its dependencies stay out. The
binary's Python backend needs numpy 1 (with numpy 2 its process dies on a tensor of strings), so it gets a virtual
environment of its own, and the models run with that environment's packages. The file `triton.json` marks it: it is
written first, as incomplete, and completed last, so that an install that was killed is not taken for one, and no folder
that trtforge did not make is ever changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trtforge.errors import InputError, UnavailableError
from trtforge.processes import run_with_children
from trtforge.progress import Event, Reporter, ignore
from trtforge.serving.triton.environment import (
    INSTALL_COMMAND,
    RECORD_NAME,
    TRITON_VERSION,
    InstallRecord,
    TritonInstall,
    find_triton,
    library_folder,
    read_install,
    read_record,
    server_folder,
)
from trtforge.staging import locked, make_parents, replace_file, translate_write_errors

# Python versions that trtforge runs on, the wheel has a stub for, and numpy 1 has wheels for.
PYTHONS = ("3.11", "3.12")
_SERVER = "nvidia-pytriton==0.7.0"


def install_triton(folder: Path, report: Reporter = ignore, python: Path | None = None) -> TritonInstall:
    """Make an environment with the server; one that is whole and has the same packages is left as it is.

    Args:
        folder: the environment. Nothing else may be in it.
        report: takes progress.
        python: the interpreter to make it with; None takes this one, or one on PATH where this one does not fit.

    Raises:
        InputError: the folder holds other files.
        UnavailableError: the interpreter does not fit, the place cannot be written, or pip failed.
    """
    folder = folder.absolute()
    interpreter = _look_at(_default_python() if python is None else python)
    record = InstallRecord(triton=TRITON_VERSION, python=interpreter.version, packages=_requirements(), complete=True)
    with contextlib.ExitStack() as stack, translate_write_errors(folder, "--dir"):
        make_parents(folder, stack)
        with locked(folder) as lock:
            known = read_record(folder)
            installed = read_install(folder)
            if installed is not None and known == record:
                return installed
            if known is None and any(folder.iterdir()):
                raise InputError(
                    f"{folder} cannot become Triton's environment",
                    "it holds files that trtforge did not write",
                    "choose another folder with --dir",
                )
            with _emptied_on_failure(folder):
                _install(folder, interpreter, record, lock, report)
    return find_triton([folder])


def _requirements() -> tuple[str, ...]:
    """What pip installs; ONNX Runtime in the release that trtforge's reference uses, so that answers are comparable."""
    runtime = importlib.metadata.version("onnxruntime")
    return (
        _SERVER,
        f"onnxruntime=={runtime}",
        "numpy>=1.26,<2",
        "ml_dtypes>=0.5",
        "tokenizers>=0.21,<1",
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Interpreter:
    """A Python.

    Attributes:
        program: to run it.
        version: e.g. "3.11".
        library: its shared library, which the Python backend loads; None where it has none of its own.
    """

    program: Path
    version: str
    library: Path | None


def _default_python() -> Path:
    own = Path(sys.executable)
    if f"{sys.version_info[0]}.{sys.version_info[1]}" in PYTHONS:
        return own
    found = filter(None, (shutil.which(f"python{version}") for version in reversed(PYTHONS)))
    return Path(next(found, own))


def _look_at(program: Path) -> _Interpreter:
    code = (
        "import json, sys, sysconfig; names = ('LIBDIR', 'INSTSONAME');"
        "print(json.dumps(['%d.%d' % sys.version_info[:2], *map(sysconfig.get_config_var, names)]))"
    )
    # A name that is no file here is looked for on PATH.
    program = program.absolute() if program.is_file() else program
    try:
        answer = subprocess.run([program, "-I", "-c", code], capture_output=True, text=True, check=True)
        version, folder, name = json.loads(answer.stdout)
    except (OSError, subprocess.CalledProcessError, ValueError) as err:
        why = (err.strerror or str(err)) if isinstance(err, OSError) else "it does not answer as Python does"
        raise InputError(f"{program} cannot be run", why, "--python takes a Python interpreter") from err
    if version not in PYTHONS:
        raise UnavailableError(
            f"Triton's environment cannot be made with Python {version}",
            f"its packages are there for Python {' and '.join(PYTHONS)}",
            f"`{INSTALL_COMMAND} --python python{PYTHONS[0]}`",
        )
    library = Path(folder or "", name or "")
    return _Interpreter(program, version, library if ".so" in library.name and library.is_file() else None)


@contextlib.contextmanager
def _emptied_on_failure(folder: Path) -> Iterator[None]:
    """Remove what an install left, unless it came to its end."""
    try:
        yield
    except BaseException:
        _empty(folder)
        raise


def _empty(folder: Path) -> None:
    """Remove everything, the record last: without it the rest would be a stranger's files."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name == RECORD_NAME):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _install(folder: Path, python: _Interpreter, record: InstallRecord, lock: int, report: Reporter) -> None:
    _empty(folder)
    _write_record(folder, record.model_copy(update={"complete": False}))
    report(Event("install", f"a virtual environment in {folder}", "notice"))
    _run([str(python.program), "-m", "venv", str(folder)], "the virtual environment cannot be made", lock)
    report(Event("install", f"{', '.join(record.packages)} (about 400 MB on disk)", "notice"))
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    _run([*pip, "--no-deps", _SERVER], "Triton cannot be installed", lock)
    others = [name for name in record.packages if name != _SERVER]
    _run([*pip, *others], "Triton's packages cannot be installed", lock)
    _prepare_backends(folder, python)
    _write_record(folder, record)


def _prepare_backends(folder: Path, python: _Interpreter) -> None:
    """The Python backend with the stub of this Python beside its library, where it looks for one.

    Raises:
        UnavailableError: the stub does not start.
    """
    server, libraries = server_folder(folder), library_folder(folder)
    stub = folder / "backends/python/triton_python_backend_stub"
    shutil.copytree(server / "backends", folder / "backends")
    shutil.copy2(server / f"python_backend_stubs/{python.version}" / stub.name, stub)
    if python.library is not None:
        (libraries / python.library.name).symlink_to(python.library)
    # Without arguments it ends at once; where it cannot be loaded, the server would wait for it without an end.
    environment = {**os.environ, "LD_LIBRARY_PATH": str(libraries)}
    started = subprocess.run([stub], env=environment, capture_output=True, text=True, check=False)
    if "error while loading shared libraries" in started.stderr:
        raise UnavailableError(
            f"Triton's Python backend cannot run with {python.program}",
            " ".join(started.stderr.split()),
            f"install libpython{python.version}, or give a Python that has its shared library with --python",
        )


def _run(command: list[str], what: str, lock: int) -> None:
    """Run a step of the install; its children end with it.

    Where this process is killed they live on, and hold the folder's lock until they end.

    Raises:
        UnavailableError: it failed; carries its own words.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with tempfile.TemporaryFile() as output:
        status = run_with_children(command, environment, output, keep=[lock])
        output.seek(0)
        lines = output.read().decode("utf-8", "replace").splitlines()
    if status != 0:
        errors = [line for line in lines if line.lower().startswith(("error", "fatal"))]
        words = " | ".join(line.strip() for line in (errors or [line for line in lines if line.strip()])[-3:])
        raise UnavailableError(
            what, words[:600] or f"exit code {status}", f"mend that and run `{INSTALL_COMMAND}` again"
        )


def _write_record(folder: Path, record: InstallRecord) -> None:
    replace_file(folder / RECORD_NAME, json.dumps(record.model_dump(mode="json"), indent=1) + "\n")
