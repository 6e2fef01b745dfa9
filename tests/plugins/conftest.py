from __future__ import annotations

import pytest
from case_count import PROPERTY, count_for


@pytest.fixture(autouse=True)
def count_kernel_cases(request: pytest.FixtureRequest) -> None:
    count_for(request.node.user_properties)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    passed = terminalreporter.stats.get("passed", [])
    total = sum(value for report in passed for name, value in report.user_properties if name == PROPERTY)
    if total:
        terminalreporter.write_line(f"{total} cases of kernels passed on the emulated GPU")
