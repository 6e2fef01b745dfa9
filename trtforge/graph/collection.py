"""Keep Python's garbage collector out of the making of graphs.

Nodes and tensors of a graph refer to each other, and each pass makes tens of thousands that all live on. The collector
looks through all of them again and again and finds nothing: 35 to 45 % of the time of an import or a copy of 20,000
nodes.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """No automatic collection for the time of a `with`, or of a function that it decorates; may be nested."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
