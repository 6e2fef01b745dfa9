"""What breaks real models, one generated model per pattern: one command builds it, or says why not and what to do."""

from __future__ import annotations

import json

import pytest
from command_checks import Watch
from pattern_models import Pattern, write_pattern
from pattern_operators import CONTROL, OPERATORS
from pattern_shapes import ATTENTION, OPSETS, SHAPES
from pattern_values import FLOAT16, KERNELS, QUANTIZED

PATTERNS = (*KERNELS, *FLOAT16, *QUANTIZED, *OPERATORS, *CONTROL, *SHAPES, *OPSETS, *ATTENTION)


def cases(*codes: int) -> pytest.MarkDecorator:
    chosen = [pattern for pattern in PATTERNS if pattern.code in codes]
    return pytest.mark.parametrize("pattern", chosen, ids=[pattern.name for pattern in chosen])


def test_patterns_have_names_of_their_own() -> None:
    assert len({pattern.name for pattern in PATTERNS}) == len(PATTERNS)
    assert all(pattern.says for pattern in PATTERNS if pattern.code), "a refusal is for a reason"


@cases(0, 1)
def test_it_builds_and_gives_the_outputs_of_the_source(pattern: Pattern, watch: Watch) -> None:
    command = write_pattern(pattern, watch.folder)
    before = watch.entries()
    code, out, err = watch.run([*command, "--json"])
    assert code == pattern.code, err
    manifest = json.loads(out)
    parity = manifest["parity"]
    assert (parity["verified"], parity["passed"]) == (True, pattern.code == 0)
    assert (watch.folder / "out" / "model.engine").stat().st_size > 0
    for text in pattern.says:
        assert text in out + err
    assert watch.entries() - before == {"out"}


@cases(2)
def test_it_is_refused_with_its_reason_and_leaves_nothing(pattern: Pattern, watch: Watch) -> None:
    error = watch.refusal(write_pattern(pattern, watch.folder))
    for text in pattern.says:
        assert text in error
