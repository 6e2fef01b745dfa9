"""The user's own code: `package.module:function`, given as data or as a metric, runs with the user's rights."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trtforge.errors import InputError
from trtforge.hashing import sha256_of_file

# What user code may raise and is told of: its exit must not be taken for the end of a build. Ctrl-C is no error of it.
USER_ERRORS = (Exception, SystemExit, GeneratorExit)


def load_function(name: str, purpose: str) -> Callable[..., Any]:
    """The user's function `package.module:function`; the working directory can be imported from.

    Raises:
        InputError: not of that form, not importable, or no such function.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute.isidentifier():
        raise InputError(f"{purpose} {name!r} cannot be used", "it is not package.module:function", "correct the name")
    try:
        with _importing_from_here():
            function = getattr(importlib.import_module(module_name), attribute)
    except USER_ERRORS as err:
        raise InputError(
            f"{purpose} {name!r} cannot be imported",
            f"{type(err).__name__}: {err}",
            "run from the folder that holds the module, or install its package",
        ) from err
    if not callable(function):
        raise InputError(f"{purpose} {name!r} is no function", f"it is a {type(function).__name__}", "correct the name")
    result: Callable[..., Any] = function
    return result


def source_sha256(name: str) -> str | None:
    """Of the file of `package.module` in `package.module:function`; None where none is found.

    The file itself is not run; the packages that it lies in are imported, because they say where it is.
    What the module imports does not count, so an equal hash does not mean equal results.
    """
    try:
        with _importing_from_here():
            importlib.invalidate_caches()
            spec = importlib.util.find_spec(name.partition(":")[0])
        return None if spec is None or spec.origin is None else sha256_of_file(Path(spec.origin))
    except USER_ERRORS:
        return None


@contextlib.contextmanager
def _importing_from_here() -> Iterator[None]:
    """Let the working directory be imported from."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(here)
