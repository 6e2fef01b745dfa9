"""Where a server is: host and port from what the user typed, and its metrics beside it."""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from typing import Literal
from urllib.parse import urlsplit

from trtforge.errors import InputError

# Triton's default ports.
_HTTP, _GRPC, _METRICS = 8000, 8001, 8002
_LAST_PORT = 65535
_ADDRESS = re.compile(
    r"(?P<host>\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]|[\w.-]+)(?::(?P<port>[0-9]{1,5}))?(?P<path>(?:/[^/?#\s]+)*)/?"
)
_EXAMPLES = "e.g. 127.0.0.1:8000, http://host:8000 or grpc://host:8001"


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    """Of a server.

    Attributes:
        url: host and port, and for HTTP a path before /v2.
        protocol: of that port.
        metrics: URL of the Prometheus metrics; None where it is not known.
    """

    url: str
    protocol: Literal["http", "grpc"]
    metrics: str | None

    @property
    def is_local(self) -> bool:
        """It is on this machine, by its name or address."""
        host = urlsplit(f"//{self.url}").hostname or ""
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"


def parse_address(text: str, protocol: Literal["http", "grpc"] | None, metrics: str | None) -> Address:
    """An address as typed.

    Args:
        text: host and port, with http:// or grpc:// before it or not.
        protocol: what the scheme must agree with; by default the scheme's, else HTTP.
        metrics: URL as typed; by default Triton's own port where `text` has Triton's own as well.

    Raises:
        InputError: not an address, an unknown scheme, or one that contradicts the protocol.
    """
    scheme, found, rest = text.partition("://")
    if not found:
        scheme, rest = "", text
    if scheme not in ("", "http", "grpc"):
        why = f"{scheme}:// is not spoken; known: http://, grpc://"
        raise InputError(f"{text!r} cannot be used", why, f"{_EXAMPLES}; behind TLS use a port forward")
    if scheme and protocol is not None and scheme != protocol:
        raise InputError(f"{text!r} contradicts --protocol {protocol}", f"it begins with {scheme}://", _EXAMPLES)
    chosen: Literal["http", "grpc"] = "grpc" if "grpc" in (scheme, protocol) else "http"
    parts = _ADDRESS.fullmatch(rest)
    if parts is None or (chosen == "grpc" and parts["path"]):
        raise InputError(f"{text!r} is no address", "it takes a host and a port, an IPv6 one in [ ]", _EXAMPLES)
    host = parts["host"]
    port = int(parts["port"] or (_GRPC if chosen == "grpc" else _HTTP))
    if not 1 <= port <= _LAST_PORT:
        raise InputError(f"{text!r} is no address", f"a port is a number from 1 to {_LAST_PORT}", _EXAMPLES)
    if metrics is None and port in (_HTTP, _GRPC):
        metrics = f"http://{host}:{_METRICS}/metrics"
    elif metrics is not None and not metrics.startswith(("http://", "https://")):
        metrics = f"http://{metrics}" + ("" if "/" in metrics else "/metrics")
    return Address(f"{host}:{port}{parts['path']}", chosen, metrics)
