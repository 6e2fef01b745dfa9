"""What the log of a failed build says: a known cause with its remedy, else the compilers' own words."""

from __future__ import annotations

import re

from trtforge.errors import BuildError, TrtForgeError, UnavailableError
from trtforge.plugins.toolkit import INSTALL_WHEELS

# Lines of a log that an error shows.
_SHOWN_LINES = 12


def build_error(what: str, log: str) -> TrtForgeError:
    """The error of a failed build: the lines from the first complaint on."""
    if re.search(r"no space left on device", log, re.IGNORECASE):
        return UnavailableError(what, "no space left on device", "free some where the library goes and in TMPDIR")
    if "Unsupported .version" in log:
        why = "the parts of the CUDA toolkit are of different releases: ptxas refuses what a newer compiler wrote"
        return UnavailableError(what, why, INSTALL_WHEELS)
    lines = [line for line in log.splitlines() if line.strip() and "ptxas info" not in line]
    first = next((i for i, line in enumerate(lines) if re.search(r"error|fatal", line, re.IGNORECASE)), 0)
    shown = lines[first : first + _SHOWN_LINES] or ["the compiler printed nothing"]
    return BuildError(what, "\n".join(shown), "check the compilers; they said the lines above")
