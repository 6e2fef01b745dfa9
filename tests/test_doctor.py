from __future__ import annotations

from pathlib import Path

from native_stubs import run_python, stub_driver, tensorrt_module

NOT_AVAILABLE = "missing --backend tensorrt is not available here: the Python package 'tensorrt-cu13' is not installed"
EXAMINE = """
import json, sys
if "--without-rtx" in sys.argv:
    import importlib.util
    find = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *rest: None if name == "tensorrt_rtx" else find(name, *rest)
from trtforge.doctor import examine
for check in examine():
    print(check.name, check.state, check.detail, "|", check.fix)
"""


def examine(*arguments: str, libraries: Path | None = None, modules: Path | None = None) -> dict[str, str]:
    lines = run_python(EXAMINE, *arguments, libraries=libraries, modules=modules).splitlines()
    return {name: rest for name, _, rest in (line.partition(" ") for line in lines)}


def test_both_builders_are_shown_with_the_reason_where_one_is_missing() -> None:
    found = examine()
    assert found["tensorrt-rtx"].startswith("ok 1.")
    assert " builds an engine for sm_80, sm_86, sm_89, sm_120 in " in found["tensorrt-rtx"]
    assert found["tensorrt"].startswith(f"{NOT_AVAILABLE}; it builds on a GPU only, and no NVIDIA driver")
    assert "| pip install 'trtforge[tensorrt]' and use a machine with" in found["tensorrt"]
    assert found["gpu"].startswith("missing no NVIDIA driver is installed")


def test_a_gpu_that_only_tensorrt_serves_is_said_to_need_it(tmp_path: Path) -> None:
    found = examine(libraries=stub_driver(tmp_path, 90))
    assert found["gpu"] == "ok NVIDIA Stub, sm_90 | its engines take --backend tensorrt"
    assert found["tensorrt"].startswith(f"{NOT_AVAILABLE} |")


def test_one_builder_is_enough(tmp_path: Path) -> None:
    found = examine("--without-rtx", libraries=stub_driver(tmp_path, 89), modules=tensorrt_module(tmp_path))
    assert found["tensorrt"].startswith("ok 11.4.0 builds an engine for sm_89 in ")
    assert found["tensorrt-rtx"].startswith("missing the Python package 'tensorrt-rtx-cu13' is not installed: ")
    assert found["gpu"] == "ok NVIDIA Stub, sm_89 |"


def test_no_builder_at_all_is_a_failure() -> None:
    found = examine("--without-rtx")
    assert found["tensorrt"].startswith("missing ")
    assert found["tensorrt-rtx"].startswith("failed ")
    assert "pip install 'trtforge[rtx]'" in found["tensorrt-rtx"]
