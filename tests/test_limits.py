from __future__ import annotations

import dataclasses

import pytest

from trtforge.errors import InputError
from trtforge.limits import DEFAULT_LIMITS


def test_override_changes_only_the_named_limits() -> None:
    changed = DEFAULT_LIMITS.override(["model_nodes=500000", "text_depth=64"])
    assert changed == dataclasses.replace(DEFAULT_LIMITS, model_nodes=500_000, text_depth=64)


def test_the_last_of_two_overrides_wins() -> None:
    assert DEFAULT_LIMITS.override(["text_depth=1", "text_depth=2"]).text_depth == 2


@pytest.mark.parametrize(
    "setting",
    [
        "model_nodes=0",
        "model_nodes=-1",
        "model_nodes=1e9",
        "model_nodes=1_000",
        "model_nodes=\N{ARABIC-INDIC DIGIT THREE}",
        f"model_nodes={'9' * 5000}",
        "model_nodes=",
        "model_nodes",
        "nodes=1",
        "__class__=1",
        "=1",
        "",
    ],
)
def test_what_is_no_limit_is_refused_with_the_names(setting: str) -> None:
    with pytest.raises(InputError, match="cannot be used") as caught:
        DEFAULT_LIMITS.override([setting])
    assert repr(setting) in caught.value.what
    assert "model_bytes, model_nodes, tensor_dims, data_bytes, text_bytes, text_depth" in caught.value.why
    assert "--limit model_nodes=400000" in caught.value.fix
