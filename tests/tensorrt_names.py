"""Names of TensorRT's Python module that a source uses, and which of them a module lacks.

TensorRT's library installs only with a GPU's driver stack at hand, but its bindings are a plain wheel: with libraries
that define nothing but the symbols that they need, they can be imported. That proves names, never behaviour.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from native_stubs import TENSORRT_LIBRARIES, TENSORRT_SYMBOLS, compile_library, run_python

BINDINGS, RTX = "tensorrt_bindings", "tensorrt_rtx"
_LOOK_UP = """
import importlib, json, sys
module, missing = importlib.import_module(sys.argv[1]), []
for name in json.loads(sys.argv[2]):
    value = module
    for part in name.split("."):
        value = getattr(value, part, missing)
        if value is missing:
            missing.append(name)
            break
print(json.dumps([module.__version__, sorted(missing)]))
"""


def _chain_of(node: ast.AST) -> tuple[str | None, list[str]]:
    """`trt.BuilderFlag.TF32` -> its first name and the others."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return (node.id, parts[::-1]) if isinstance(node, ast.Name) and parts else (None, parts)


def names_in(source: str, classes: Mapping[str, str]) -> set[str]:
    """Names of the module in a source text: those after `trt`, and members of objects by the names of `classes`."""
    used = set()
    for root, parts in map(_chain_of, ast.walk(ast.parse(source))):
        if root == "trt":
            used.add(".".join(parts))
        elif root in classes:
            used.add(f"{classes[root]}.{parts[0]}")
    return used


def stub_tensorrt(folder: Path) -> Path:
    """A folder with the libraries that TensorRT's bindings need to be imported."""
    if importlib.util.find_spec(BINDINGS) is None:
        pytest.skip("the wheel tensorrt-cu13-bindings is not installed (extra dev)")
    source = "".join(f"void *{symbol}(void) {{ return 0; }}\n" for symbol in TENSORRT_SYMBOLS)
    for name in TENSORRT_LIBRARIES:
        compile_library(folder / name, source)
    return folder


def look_up(module: str, names: Iterable[str], libraries: Path | None = None) -> tuple[str, list[str]]:
    """The module's version, and those of the names that it lacks."""
    version, missing = json.loads(run_python(_LOOK_UP, module, json.dumps(sorted(names)), libraries=libraries))
    return version, missing
