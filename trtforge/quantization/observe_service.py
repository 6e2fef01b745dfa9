"""The child process of a calibration: runs the model and observes it where it runs, so that no activation crosses.

It knows the executor's own calls, and `start` (what to observe, and the state to go on from), `observe` (one batch of
inputs) and `state`. Like the executor, it imports nothing that it does not need.
"""

from __future__ import annotations

from collections.abc import Callable

from trtforge import reference
from trtforge.frames import Arrays, Meta
from trtforge.isolation import Handler
from trtforge.quantization.observation import Observation

_observation = Observation({})


def _handle_start(meta: Meta, arrays: Arrays, _: Callable[[Meta], None]) -> tuple[Meta, Arrays]:
    global _observation  # noqa: PLW0603 - the child's one observation lives from call to call
    _observation = Observation(dict(meta["channel_axes"]), mask=meta["mask"], keep_rows=meta["keep_rows"])
    _observation.restore(arrays)
    return {}, {}


def _handle_observe(meta: Meta, arrays: Arrays, progress: Callable[[Meta], None]) -> tuple[Meta, Arrays]:
    names = list(_observation.channel_axes)
    taps = reference.SERVICE["run"]({"outputs": names}, arrays, progress)[1]
    _observation.update(arrays, taps, meta["samples"])
    return {}, {}


def _handle_state(_: Meta, __: Arrays, ___: Callable[[Meta], None]) -> tuple[Meta, Arrays]:
    return {}, _observation.state()


SERVICE: dict[str, Handler] = {
    **reference.SERVICE,
    "start": _handle_start,
    "observe": _handle_observe,
    "state": _handle_state,
}
