"""Without a GPU: are the kernels right (on the emulator), and what do they take of a multiprocessor. No time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from trtforge.benchmark.case import BlockCase
from trtforge.benchmark.compilers import build_for_host
from trtforge.benchmark.reference import Verdict
from trtforge.isolation import Child
from trtforge.progress import Stopwatch

# An emulated thread is a fiber of one core: sizes are cut to what still has odd ends and more than a tile of rows.
_MAX_BATCH = 2
_MAX_SEQUENCE = 70
_MAX_HEADS = 2
_MAX_INNER = 112


@dataclasses.dataclass(frozen=True, slots=True)
class HostCheck:
    """One case on the emulator."""

    case: BlockCase
    verdict: Verdict


def sample_for_host(cases: Sequence[BlockCase]) -> tuple[BlockCase, ...]:
    """The cases with their sizes cut down and head sizes kept, each once."""
    cut = (
        dataclasses.replace(
            case,
            batch=min(case.batch, _MAX_BATCH),
            sequence=min(case.sequence, _MAX_SEQUENCE),
            num_heads=min(case.num_heads, _MAX_HEADS),
            width=min(case.num_heads, _MAX_HEADS) * case.head_size,
            inner_width=min(case.inner_width, _MAX_INNER),
        )
        for case in cases
    )
    return tuple(dict.fromkeys(cut))


def check_on_host(cases: Sequence[BlockCase], strategy: str, folder: Path, watch: Stopwatch) -> tuple[HostCheck, ...]:
    """Run cases on the emulator, each against float64.

    Args:
        cases: small ones, see `sample_for_host`.
        strategy: see `kernels.STRATEGIES`.
        folder: keeps the emulator's library for the next time.
        watch: times the stages.

    Raises:
        UnavailableError: g++ or CUDA's headers are missing, or the kernels refuse a case.
        BuildError: the kernels did not compile.
        ChildDiedError: the emulator found a mistake in a kernel and ended; why says which.
    """
    with watch.stage("compile for the emulator"):
        library = build_for_host(folder)
    checks = []
    log = folder / "emulator.log"
    log.unlink(missing_ok=True)
    with (
        watch.stage("check on the emulator") as note,
        Child("trtforge.benchmark.host_worker:HANDLERS", purpose="kernel emulator", log=log) as child,
    ):
        for index, case in enumerate(cases):
            note(case.key, index, len(cases))
            answer, _ = child.call("check", {"library": str(library), "case": case.to_dict(), "strategy": strategy})
            checks.append(HostCheck(case, Verdict(answer["rms_ratio"], answer["max_ratio"], answer["is_right"])))
    return tuple(checks)
