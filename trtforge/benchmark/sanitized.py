"""Launch blocks and do nothing else: what compute-sanitizer watches.

    compute-sanitizer --tool racecheck python -m trtforge.benchmark.sanitized LIBRARY KEY...

Every strategy that takes the block is run. Each array is an allocation of its own, so that memcheck sees one element
too far.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from trtforge.benchmark.arrays import HostArrays
from trtforge.benchmark.case import BlockCase
from trtforge.benchmark.device import Device
from trtforge.benchmark.implementations import PluginBlock
from trtforge.benchmark.kernels import STRATEGIES, BlockKernels
from trtforge.benchmark.operands import make_operands
from trtforge.benchmark.reference import calibrated
from trtforge.errors import UnavailableError

_KEY = re.compile(r"b(\d+)-s(\d+)-h(\d+)-n(\d+)-f(\d+)-(\w+)-(\w+)-(\w+)-(\w+)")


def case_from_key(key: str) -> BlockCase:
    """The case of `BlockCase.key`."""
    found = _KEY.fullmatch(key)
    if found is None:
        raise ValueError(f"{key!r} is no key of a case")
    numbers, names = found.groups()[:5], found.groups()[5:]
    return BlockCase(*map(int, numbers), *names)  # type: ignore[arg-type]


def main(arguments: Sequence[str]) -> int:
    """Run every case; returns 0 where each was launched at least once."""
    device = Device()
    device.cupy.cuda.set_allocator(None)
    kernels = BlockKernels(Path(arguments[0]), device.size)
    for key in arguments[1:]:
        case = case_from_key(key)
        operands = calibrated(case, make_operands(case), HostArrays())
        num_launched = 0
        for strategy in STRATEGIES:
            block = PluginBlock(kernels, device, case, operands, strategy)
            try:
                block.prepare("call")()
                num_launched += 1
            except UnavailableError as err:
                sys.stdout.write(f"{key}, {strategy}: {err.why}\n")
            device.synchronize()
        if num_launched == 0:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
