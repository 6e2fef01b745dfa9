"""Names and amounts as Kubernetes and Docker take them, checked before any file is written."""

from __future__ import annotations

import re

from trtforge.errors import InputError

# As Kubernetes asks of names: RFC 1123 labels, which may be joined by dots, and RFC 1035 labels for services.
_LABEL = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_SERVICE = r"[a-z](?:[-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = rf"{_LABEL}(?:\.{_LABEL})*"
_VERSION = r"[0-9]+(?:\.[0-9]+)*"
_TARGET = r"sm_[1-9][0-9]{1,2}"
_LABEL_LENGTH = 63
_SUBDOMAIN_LENGTH = 253
# Of the ConfigMap of checksums; nothing longer is appended to a deployment's name.
CHECKSUMS_SUFFIX = "-model-checksums"
_LONGEST_NAME = _LABEL_LENGTH - len(CHECKSUMS_SUFFIX)
_CPU = r"[1-9][0-9]{0,5}m?|(?!0+\.0+$)[0-9]{1,6}\.[0-9]{1,3}"
_BYTES = r"([1-9][0-9]{0,14})(Ki|Mi|Gi|Ti|k|M|G|T)?"
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
# registry/name:tag@digest, after the distribution specification's grammar.
_IMAGE = (
    r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?(?::[0-9]+)?/)?"
    r"[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*)*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?(?:@sha256:[0-9a-f]{64})?"
)


def deployment_name(text: str) -> str:
    """An RFC 1035 label from a model's name, e.g. "minilm-l6" from "MiniLM_L6"."""
    label = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    named = label if re.match("[a-z]", label) else f"triton-{label}"
    return named[:_LONGEST_NAME].strip("-")


def check_deployment_name(name: str) -> None:
    """Refuse a name that some object of the deployment could not have.

    Raises:
        InputError: as for all of these checks, with what is allowed.
    """
    _check_name(name, _SERVICE, _LONGEST_NAME, "the deployment's name", "minilm")


def check_namespace(name: str, what: str = "the namespace") -> None:
    """Refuse what no namespace can be called."""
    _check_name(name, _LABEL, _LABEL_LENGTH, what, "inference")


def check_subdomain(name: str, what: str, example: str) -> None:
    """Refuse what is no RFC 1123 subdomain: the name of a volume claim, or of a host."""
    _check_name(name, _SUBDOMAIN, _SUBDOMAIN_LENGTH, what, example)


def check_target(target: str, name: str) -> None:
    """Refuse what is no compute capability: nodes are chosen by it."""
    if not re.fullmatch(_TARGET, target):
        raise InputError(
            f"the model {name!r} has the target {target!r}",
            "it takes a compute capability, such as sm_86",
            "package the artifact again with --force",
        )


def check_backend_version(version: str, name: str) -> None:
    """Refuse what is no version number: it becomes part of the lines that pip reads."""
    if not re.fullmatch(_VERSION, version):
        raise InputError(
            f"the model {name!r} has the backend version {version!r}",
            "it takes a version number, such as 1.7.1.116",
            "package the artifact again with --force",
        )


def check_image(image: str, what: str) -> None:
    """Refuse what is no reference to a container image."""
    if not re.fullmatch(_IMAGE, image) or len(image) > _SUBDOMAIN_LENGTH:
        raise InputError(
            f"{what} {image!r} cannot be used",
            "it is a name with an optional registry, tag and digest, in lower case up to the tag",
            "write it as registry.local/minilm-triton:1",
        )


def check_cpu(cpu: str) -> None:
    """Refuse what is no number of cores."""
    if not re.fullmatch(_CPU, cpu):
        raise InputError(f"{cpu!r} is no number of cores", "it is a number above 0", "write it as 2, 0.5 or 500m")


def bytes_of_quantity(quantity: str) -> int:
    """Bytes of a Kubernetes quantity, e.g. 1073741824 for "1Gi".

    Raises:
        InputError: it is none.
    """
    match = re.fullmatch(_BYTES, quantity)
    if match is None:
        raise InputError(f"{quantity!r} is no amount of memory", "it is a number with a unit", "write it as 8Gi")
    return int(match[1]) * _UNITS[match[2] or ""]


def _check_name(value: str, pattern: str, longest: int, what: str, example: str) -> None:
    if not re.fullmatch(pattern, value):
        first = "a letter" if pattern == _SERVICE else "a letter or digit"
        more = " in parts that '.' joins" if pattern == _SUBDOMAIN else ""
        raise InputError(
            f"{what} {value!r} cannot be used",
            f"it takes lower-case letters, digits and '-'{more}, from {first} to a letter or digit",
            f"write it as {example}",
        )
    if len(value) > longest:
        raise InputError(f"{what} {value!r} is too long", f"it may have {longest} characters", "take a shorter one")
