from __future__ import annotations

import pytest

from trtforge.errors import (
    BuildError,
    ChildDiedError,
    InputError,
    InternalError,
    TrtForgeError,
    UnavailableError,
    missing_extra,
)


def test_text_is_what_then_why_then_fix() -> None:
    assert str(InputError("it broke", "it was dry", "water it")) == "it broke\nwhy: it was dry\nfix: water it"


def test_text_leaves_out_what_is_not_known() -> None:
    assert str(InputError("it broke", fix="water it")) == "it broke\nfix: water it"
    assert str(InputError("it broke")) == "it broke"


@pytest.mark.parametrize("kind", [InputError, UnavailableError, BuildError, ChildDiedError, TrtForgeError])
def test_errors_that_a_user_can_act_on_exit_with_2(kind: type[TrtForgeError]) -> None:
    assert kind("x").exit_code == 2


def test_a_defect_exits_with_3_and_keeps_its_traceback() -> None:
    error = InternalError("x", detail="Traceback ...")
    assert (error.exit_code, error.detail) == (3, "Traceback ...")
    assert "Traceback" not in str(error)


def test_build_error_names_the_node() -> None:
    assert BuildError("x", node="/conv").node == "/conv"
    assert BuildError("x").node is None


def test_missing_extra_gives_the_install_line() -> None:
    error = missing_extra("tensorrt_rtx", "rtx")
    assert isinstance(error, UnavailableError)
    assert "'tensorrt_rtx' is not installed" in error.what
    assert error.fix == "pip install 'trtforge[rtx]'"
