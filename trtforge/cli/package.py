"""`trtforge package`: artifacts as models of a Triton repository."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtforge.cli import options
from trtforge.cli.render import plain, print_json, print_table, progress_reporter

if TYPE_CHECKING:
    from trtforge.packaging import ModelResult, PackageResult
    from trtforge.serving.check import LoadCheck, ModelCheck
    from trtforge.serving.text.plan import TextOptions

NAME = "package"
_TEXT, _DEPLOYMENT = "Text models", "Deployment files"


def command(
    artifacts: Annotated[
        list[Path],
        typer.Argument(metavar="ARTIFACT...", help="Folders that `trtforge build` wrote.", show_default=False),
    ],
    triton: Annotated[
        Path, typer.Option("--triton", metavar="REPO", help="The model repository; made where it is missing.")
    ],
    cpu: Annotated[bool, typer.Option("--cpu", help="Serve the built graph with ONNX Runtime, without a GPU.")] = False,
    from_onnx: Annotated[
        bool,
        typer.Option("--from-onnx", help="TensorRT-RTX: write the graph and the script that builds the engine there."),
    ] = False,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Of the model. Default: the source's.")] = None,
    instances: Annotated[int, typer.Option(metavar="N", min=1, help="Copies of a model, on each GPU.")] = 1,
    threads: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="With --cpu: of one copy. Default: every core.")
    ] = None,
    gpus: Annotated[str | None, typer.Option(metavar="LIST", help="E.g. 0,1. Default: every GPU there is.")] = None,
    max_batch: Annotated[
        int | None, typer.Option("--max-batch", metavar="N", min=1, help="Default: what every profile takes.")
    ] = None,
    queue_delay: Annotated[
        int, typer.Option("--queue-delay", metavar="US", min=0, help="How long a request may wait for others, in us.")
    ] = 100,
    preferred: Annotated[
        str | None,
        typer.Option("--preferred", metavar="LIST", help="Batch sizes sent at once. Default: the profiles' opt."),
    ] = None,
    priority_levels: Annotated[
        int, typer.Option("--priority-levels", metavar="N", min=0, help="Requests of level 1 are served first.")
    ] = 0,
    queue_timeout: Annotated[
        int, typer.Option("--queue-timeout", metavar="US", min=0, help="Refuse what waited so long, in us; 0 is never.")
    ] = 0,
    queue_size: Annotated[
        int, typer.Option("--queue-size", metavar="N", min=0, help="Refuse what finds so many waiting; 0 is never.")
    ] = 0,
    response_cache: Annotated[
        bool, typer.Option("--response-cache", help="TensorRT: answer equal requests from the server's cache.")
    ] = False,
    no_warmup: Annotated[bool, typer.Option("--no-warmup", help="Leave out the warm-up requests.")] = False,
    version: Annotated[
        int,
        typer.Option("--version-number", metavar="N", min=1, help="Of the model; earlier versions stay in its folder."),
    ] = 1,
    versions: Annotated[
        int, typer.Option("--versions", metavar="N", min=1, help="The newest versions that are served.")
    ] = 1,
    triton_version: Annotated[
        str | None,
        typer.Option(
            "--triton-version",
            metavar="YY.MM",
            help="TensorRT: the server's release; YY.MM=VERSION states its TensorRT version.",
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Serve strings: tokenizer.json or its folder, and one model per length bucket.",
            rich_help_panel=_TEXT,
        ),
    ] = None,
    buckets: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Lengths to pad to, e.g. 32,64,128.", rich_help_panel=_TEXT),
    ] = None,
    lengths: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Texts, one a line, to choose the lengths for.", rich_help_panel=_TEXT),
    ] = None,
    max_padding: Annotated[
        float | None,
        typer.Option(
            "--max-padding",
            metavar="SHARE",
            help="Of padding among the tokens of --lengths. Default: 0.25.",
            rich_help_panel=_TEXT,
        ),
    ] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut texts that are too long.", rich_help_panel=_TEXT)
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Prove the models with the real server on this machine; exit 1 if it fails.")
    ] = False,
    triton_env: options.TritonEnv = None,
    k8s: Annotated[
        Path | None,
        typer.Option("--k8s", metavar="DIR", help="Write files for Kubernetes.", rich_help_panel=_DEPLOYMENT),
    ] = None,
    compose: Annotated[
        Path | None,
        typer.Option("--compose", metavar="DIR", help="Write a compose file.", rich_help_panel=_DEPLOYMENT),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(
            metavar="IMAGE", help="Default: NVIDIA's, or what the Dockerfile builds.", rich_help_panel=_DEPLOYMENT
        ),
    ] = None,
    base_image: Annotated[
        str | None,
        typer.Option(
            "--base-image",
            metavar="IMAGE",
            help="That the Dockerfile builds from. Default: NVIDIA's of the fitting release.",
            rich_help_panel=_DEPLOYMENT,
        ),
    ] = None,
    models_in_image: Annotated[
        bool,
        typer.Option(
            "--models-in-image", help="Copy the models into the image, not a volume.", rich_help_panel=_DEPLOYMENT
        ),
    ] = False,
    claim: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="An existing volume claim with REPO.", rich_help_panel=_DEPLOYMENT),
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of the objects.", rich_help_panel=_DEPLOYMENT)
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Leave out engines for others, e.g. sm_86.", rich_help_panel=_DEPLOYMENT),
    ] = None,
    max_replicas: Annotated[
        int,
        typer.Option("--max-replicas", metavar="N", min=1, help="Of the autoscaler.", rich_help_panel=_DEPLOYMENT),
    ] = 4,
    target_rps: Annotated[
        int,
        typer.Option(
            "--target-rps",
            metavar="N",
            min=1,
            help="Requests per second that one server answers in time; `trtforge loadtest` measures it.",
            rich_help_panel=_DEPLOYMENT,
        ),
    ] = 100,
    target_queue: Annotated[
        int,
        typer.Option(
            "--target-queue",
            metavar="MS",
            min=1,
            help="A mean wait that is too long.",
            rich_help_panel=_DEPLOYMENT,
        ),
    ] = 20,
    force: Annotated[
        bool,
        typer.Option("--force", help="Replace what trtforge wrote, and package artifacts that miss their budget."),
    ] = False,
    limit: options.LimitOption = None,
    as_json: options.AsJson = False,
) -> int:
    """Package artifacts for Triton Inference Server, with a configuration that fits their profiles."""
    from trtforge.limits import DEFAULT_LIMITS
    from trtforge.packaging import PackageSpec, package
    from trtforge.serving.deploy import DeploymentOptions, Form, Scaling
    from trtforge.serving.model_folder import ServingOptions
    from trtforge.serving.triton.environment import places_from_option

    serving = ServingOptions(
        instances=instances,
        gpus=_numbers("--gpus", gpus) or (),
        queue_delay_us=queue_delay,
        preferred_sizes=_numbers("--preferred", preferred),
        priority_levels=priority_levels,
        queue_timeout_us=queue_timeout,
        queue_size=queue_size,
        version=version,
        num_versions=versions,
        response_cache=response_cache,
        warmup=not no_warmup,
        threads=threads,
    )
    forms: tuple[tuple[Form, Path | None], ...] = (("kubernetes", k8s), ("compose", compose))
    spec = PackageSpec(
        artifacts=tuple(artifacts),
        repository=triton,
        cpu=cpu,
        from_onnx=from_onnx,
        name=name,
        max_batch=max_batch,
        triton_version=triton_version,
        options=serving,
        text=_text_options(tokenizer, buckets, lengths, max_padding, truncate),
        check_with=places_from_option(triton_env) if check else None,
        deployments=tuple((form, folder) for form, folder in forms if folder is not None),
        deployment=DeploymentOptions(
            image=image,
            base_image=base_image,
            models_in_image=models_in_image,
            claim=claim,
            namespace=namespace,
            gpu=gpu,
            scaling=Scaling(max_replicas=max_replicas, requests_per_second=target_rps, queue_ms=target_queue),
        ),
        force=force,
        limits=DEFAULT_LIMITS.override(limit or ()),
    )
    with progress_reporter() as report:
        result = package(spec, report)
    if as_json:
        print_json(_as_json(result))
    else:
        _print(result)
    return 0 if result.passed else 1


def _text_options(
    tokenizer: Path | None, buckets: str | None, lengths: Path | None, max_padding: float | None, truncate: bool
) -> TextOptions | None:
    from trtforge.errors import InputError
    from trtforge.serving.text.plan import TextOptions

    if tokenizer is not None:
        return TextOptions(tokenizer, _numbers("--buckets", buckets) or (), lengths, max_padding, truncate)
    others = {"--buckets": buckets, "--lengths": lengths, "--max-padding": max_padding, "--truncate": truncate or None}
    given = [option for option, value in others.items() if value is not None]
    if given:
        raise InputError(f"{given[0]} needs --tokenizer", "it is for models that take text", "give --tokenizer PATH")
    return None


def _numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    """`0,1` as numbers.

    Raises:
        InputError: it is something else.
    """
    from trtforge.errors import InputError

    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    numbers = tuple(int(part) if re.fullmatch(r"\d{1,10}", part, re.ASCII) else -1 for part in parts)
    if -1 in numbers or len(set(numbers)) < len(numbers):
        raise InputError(f"{option} {text!r} cannot be used", "it takes whole numbers, each once", f"{option} 0,1")
    return numbers


def _as_json(result: PackageResult) -> dict[str, Any]:
    from dataclasses import asdict

    check = result.check
    return {
        "repository": str(result.repository),
        "passed": result.passed,
        "models": [
            {**model.entry.model_dump(mode="json"), "written": model.is_new, "max_batch_reason": model.reason}
            for model in result.models
        ],
        "notes": list(result.notes),
        "check": None
        if check is None
        else {
            "triton": check.triton,
            "passed": check.passed,
            "models": [{**asdict(model), "passed": model.passed} for model in check.models],
        },
        "deployments": [{**asdict(entry), "folder": str(entry.folder)} for entry in result.deployments],
    }


def _print(result: PackageResult) -> None:
    checks = {} if result.check is None else {check.name: check for check in result.check.models}
    for model in result.models:
        state = "" if model.is_new else "  (already there)"
        sys.stdout.write(f"{plain(str(result.repository / model.entry.name))}{state}\n")
        print_table([*_rows(model), *_check_rows(checks.get(model.entry.name))])
    if result.check is not None:
        verdict = "passed" if result.check.passed else "FAILED"
        sys.stdout.write(f"check with Triton {plain(result.check.triton)}: {verdict}\n")
    for note in result.notes:
        sys.stdout.write(f"note: {plain(note)}\n")
    for entry in result.deployments:
        sys.stdout.write(f"{plain(str(entry.folder))}: {len(entry.files)} files\n")
        for line in entry.commands:
            sys.stdout.write(f"  {plain(line)}\n")
    sys.stdout.write(f"serve it: trtforge triton serve {plain(str(result.repository))}\n")


def _rows(model: ModelResult) -> list[tuple[str, str]]:
    entry, config = model.entry, model.config
    batching = config.dynamic_batching
    rows = [
        ("runs on", f"{entry.kind} {entry.backend_version}".strip()),
        ("batch", f"max_batch_size {entry.max_batch_size}: {model.reason}"),
    ]
    if batching is not None and entry.max_batch_size > 1:
        preferred = ", ".join(map(str, batching.preferred_sizes)) or "any"
        rows.append(("batching", f"sizes {preferred}; a request waits {batching.queue_delay_us} us at most"))
    rows += [("input", f"{port.name} {port.dtype} {list(port.dims)}") for port in config.inputs]
    rows += [("output", f"{port.name} {port.dtype} {list(port.dims)}") for port in config.outputs]
    rows.append(("warm-up", f"{len(config.warmup)} requests"))
    return rows


def _check_rows(check: ModelCheck | None) -> list[tuple[str, str]]:
    """What the server did, in a line or two; each request that went wrong in a line of its own."""
    if check is None:
        return []
    rows = [("check", f"FAILED: {check.failure}")] if check.failure else []
    inside = [request for request in check.requests if request.place != "outside"]
    if check.requests:
        worst = max((request.error for request in inside if request.error is not None), default=None)
        error = "" if worst is None else f", at most {worst:.2g} from ONNX Runtime"
        outside = len(check.requests) - len(inside)
        rows.append(("check", f"{len(inside)} requests inside the profiles{error}; {outside} outside refused"))
    rows += [
        ("FAILED", f"{request.profile} {request.place} ({request.shapes}): {request.detail}")
        for request in check.requests
        if not request.passed
    ]
    if check.load is not None:
        rows.append(("check", _load_text(check.load)))
    if check.note:
        rows.append(("check", check.note))
    return rows


def _load_text(load: LoadCheck) -> str:
    """What became of many requests at once."""
    verdict = "" if load.passed else "FAILED: "
    others = f", {load.wrong} wrong" if load.wrong else ""
    others += f", {load.turned_away} turned away by the queue's limits" if load.turned_away else ""
    failure = f"; {load.first_failure}" if load.first_failure else ""
    batches = f"in batches of up to {load.largest_batch}"
    return f"{verdict}{load.answered} of {load.sent} answered at once{others}, {batches}{failure}"
