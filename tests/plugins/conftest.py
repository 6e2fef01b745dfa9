from __future__ import annotations

from pathlib import Path

import pytest
from case_count import PROPERTY, count_for
from tool_stand_ins import make_program

from trtforge.plugins import toolkit


@pytest.fixture(autouse=True)
def count_kernel_cases(request: pytest.FixtureRequest) -> None:
    count_for(request.node.user_properties)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with stand-ins for nvcc, cmake and g++ and nothing else; tests take one away or change it."""
    folder = tmp_path / "tools"
    make_program(folder, "nvcc", "echo 'Cuda compilation tools, release 13.0, V13.0.88'")
    make_program(folder, "cmake", "echo 'cmake version 3.25.1'")
    make_program(folder, "g++", "true")
    make_program(folder, "make", "true")
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(toolkit, "_SYSTEM_CUDA", tmp_path / "nothing")
    monkeypatch.setattr(toolkit, "_PYTHON_PROGRAMS", tmp_path / "nothing")
    monkeypatch.setattr(toolkit, "_SYSTEM_INCLUDES", (str(tmp_path / "nothing"),))
    monkeypatch.setattr(toolkit.importlib.util, "find_spec", lambda name: None)
    return folder


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    passed = terminalreporter.stats.get("passed", [])
    total = sum(value for report in passed for name, value in report.user_properties if name == PROPERTY)
    if total:
        terminalreporter.write_line(f"{total} cases of kernels passed on the emulated GPU")
