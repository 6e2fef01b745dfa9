"""How many cases the kernel tests run on the emulated GPU; conftest.py prints the sum of those that passed."""

from __future__ import annotations

import os

RUNS_ALL = os.environ.get("TRTFORGE_ALL_KERNEL_TESTS") == "1"
PROPERTY = "kernel_cases"
_properties: list[tuple[str, object]] = []


def count_for(properties: list[tuple[str, object]]) -> None:
    """Give the counts from here on to a test's properties."""
    global _properties  # noqa: PLW0603 - the test that runs
    _properties = properties


def count_cases(number: int) -> None:
    """`number` launches (of a block: whole blocks) with operands of their own, whose results the test compares."""
    _properties.append((PROPERTY, number))
