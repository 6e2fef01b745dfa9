"""What a benchmark ran on."""

import os
import platform
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any


def describe_machine(packages: Iterable[str]) -> dict[str, Any]:
    """Return the date, the processor, the load average and the versions of Python and of `packages`."""
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "cpu": cpu.partition(":")[2].strip() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average_at_start": round(os.getloadavg()[0], 2),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
    }
