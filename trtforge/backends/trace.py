"""Where a build is: followed through the builder's own messages, live in the child or afterwards in its log.

The parser announces every node (`Parsing node: n4 [Conv]`) and what it reads and makes (`n4 [Conv] inputs: [t1 -> (-1,
8)[FLOAT]], ...`). After that the builder works on groups of nodes, whose names appear in what it says. All names are
short ones (graph/names.py); the worker's log begins with the way back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from trtforge.graph.names import NameMap

# A short name; the builder appends words and numbers to those of nodes: `n3_OutputLayer`, `n0_0`.
SHORT_NAME = re.compile(r"(?<![A-Za-z0-9_])([nt]\d+)(?![A-Za-z0-9])")
_NODE = re.compile(r"(?:Static check for parsing|Parsing) node: (\S+) \[([^\]]*)\]")
_TENSOR = re.compile(r"\[(?P<tensor>[^\[\]]*) -> \((?P<dims>[^()]*)\)\[(?P<dtype>\w*)\]\]")
_PARSED = "Marking "
# What the parser logs of a refusal; its checks of later nodes go on after that.
_REFUSED = re.compile(r"ModelImporter\.cpp:\d+: (?:While parsing node|ERROR: )")
_DTYPES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "DOUBLE": "float64"}
# Characters of one message, and bytes of one log line, that are looked at.
_MAX_LINE = 65_536
# Inputs of a node that are told; a Concat may have thousands.
_MAX_SHAPES = 16
_NAME_TABLES = {"[N] node names in this log:": "nodes", "[N] tensor names in this log:": "tensors"}


class BuildTrace:
    """The last node that the builder was on.

    Attributes:
        node: short name of the node that the parser was on last; None before the first.
        op: its operator.
        parsed: the parser has gone through all nodes.
        mentioned: short name of the last node that any message named after parsing.
    """

    def __init__(self) -> None:
        self.node: str | None = None
        self.op = ""
        self.parsed = False
        self.mentioned: str | None = None
        self._refused = False
        self._seen: dict[str, tuple[str, tuple[str, ...]]] = {}
        self._made_by: dict[str, str] = {}

    def feed(self, message: str) -> None:
        """Take in one message of the builder."""
        if self.parsed and len(message) > _MAX_LINE:
            return  # the layer table of a large model: it comes when the build is done
        if self.parsed:
            found = [name for name in SHORT_NAME.findall(message) if name[0] == "n"]
            self.mentioned = found[-1] if found else self.mentioned
        elif _REFUSED.match(message):
            self._refused = True
        elif match := _NODE.match(message):
            self._seen[match[1]] = (match[2], ())
            if not self._refused:
                self.node, self.op = match[1], match[2]
        elif self.node is not None and message.startswith(f"{self.node} [{self.op}] inputs: "):
            self._seen[self.node] = (self.op, tuple(_shape(match) for match in _TENSOR.finditer(message)))
        elif self.node is not None and message.startswith(f"{self.node} [{self.op}] outputs: "):
            self._made_by |= {match["tensor"]: self.node for match in _TENSOR.finditer(message)}
        elif self.node is not None and message.startswith(_PARSED):
            self.parsed = True

    def nodes(self) -> Iterator[tuple[str, str]]:
        """Every node that the parser came to, with its operator."""
        return ((node, op) for node, (op, _) in self._seen.items())

    def maker_of(self, tensor: str) -> str | None:
        """The node that makes a tensor; None for inputs and constants."""
        return self._made_by.get(tensor)

    def reader_of(self, tensor: str) -> str | None:
        """The first node that reads a tensor."""
        wanted = f"{tensor} "
        return next((node for node, (_, reads) in self._seen.items() if any(r.startswith(wanted) for r in reads)), None)

    def op_of(self, node: str | None) -> str:
        """A node's operator; empty where the parser did not get there."""
        return self._seen.get(node or "", ("", ()))[0]

    def shapes_of(self, node: str | None) -> tuple[str, ...]:
        """What a node reads first, as the parser saw it: "t1 float32[-1, 8]"; empty where it did not get there."""
        return self._seen.get(node or "", ("", ()))[1][:_MAX_SHAPES]


def _shape(match: re.Match[str]) -> str:
    dtype = _DTYPES.get(match["dtype"], match["dtype"].lower())
    return f"{match['tensor']} {dtype}[{match['dims'].rstrip(', ')}]"


def read_log(path: Path) -> tuple[BuildTrace, NameMap]:
    """The trace of the last build in a worker's log, with the way back from its short names.

    A log that cannot be read, or that a child which was taken over wrote, gives an empty trace.
    """
    trace, names = BuildTrace(), NameMap({}, {})
    table: dict[str, str] | None = None
    for line in _lines(path):
        text = line.rstrip("\n")
        if text in _NAME_TABLES:
            if _NAME_TABLES[text] == "nodes":
                trace, names = BuildTrace(), NameMap({}, {})
            table = getattr(names, _NAME_TABLES[text])
        elif table is not None and text.startswith("    "):
            short, _, original = text.strip().partition(" = ")
            try:
                table[short] = str(json.loads(original))
            except ValueError:
                continue
        else:
            table = None
            trace.feed(text[4:] if text.startswith("[") else text.strip())
    return trace, names


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            while line := file.readline(_MAX_LINE):
                yield line
    except OSError:
        return
