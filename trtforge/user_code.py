"""The user's own code: `package.module:function`, given as data or as a metric, runs with the user's rights."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trtforge.errors import InputError

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
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except USER_ERRORS as err:
        raise InputError(
            f"{purpose} {name!r} cannot be imported",
            f"{type(err).__name__}: {err}",
            "run from the folder that holds the module, or install its package",
        ) from err
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(here)
    if not callable(function):
        raise InputError(f"{purpose} {name!r} is no function", f"it is a {type(function).__name__}", "correct the name")
    result: Callable[..., Any] = function
    return result
