from __future__ import annotations

from collections.abc import Iterator

import pytest

from trtforge.graph.native import OnnxNative


@pytest.fixture(scope="session")
def native() -> Iterator[OnnxNative]:
    with OnnxNative() as child:
        yield child
