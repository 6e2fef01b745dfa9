"""Canonical fingerprints: full SHA-256 over everything that changes a result, in one fixed order."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def sha256_of_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes, read in chunks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def fingerprint(value: Any) -> str:
    """Hex SHA-256 of a JSON-serialisable value in canonical form."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()
