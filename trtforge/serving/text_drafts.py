"""An artifact as a text model: one model for each length bucket, and the front that clients ask."""

from __future__ import annotations

from collections.abc import Callable

from trtforge.limits import DEFAULT_LIMITS, Limits
from trtforge.serving.artifact import Artifact
from trtforge.serving.draft import Draft, DraftOptions, draft_model, observe
from trtforge.serving.text.models import (
    BucketModel,
    bucket_artifact,
    bucket_name,
    front_folder,
    note_forgotten,
    profile_numbers,
)
from trtforge.serving.text.plan import TextOptions, plan_text
from trtforge.serving.versions import add_earlier_versions


def draft_text_models(
    artifact: Artifact,
    name: str,
    text: TextOptions,
    options: DraftOptions,
    warn: Callable[[str], None],
    limits: Limits = DEFAULT_LIMITS,
) -> tuple[list[Draft], tuple[str, ...]]:
    """The models, those first that the front asks, and what the user has to know of the buckets.

    Args:
        artifact: the artifact.
        name: of the front.
        text: tokenizer and length buckets.
        options: what the artifact is made into.
        warn: takes what the user has to know.
        limits: bounds on untrusted input.

    Raises:
        InputError: the artifact is no text model, or cannot be served so.
        UnavailableError: the package `tokenizers` is not installed.
    """
    plan = plan_text(artifact, text, limits)
    seen = observe(artifact, every_point=options.warms_graph)
    count = len(artifact.manifest.profiles)
    drafts = [
        draft_model(
            bucket_artifact(artifact, plan, length),
            bucket_name(name, length),
            seen,
            options,
            warn,
            bucket=length,
            engine_profiles=profile_numbers(artifact.manifest, length) if count > 1 else (),
        )
        for length in plan.buckets.lengths
    ]
    buckets = [BucketModel(draft.folder.entry, draft.model) for draft in drafts]
    folder = front_folder(name, plan, buckets, options.serving)
    folder = add_earlier_versions(folder, drafts[0].model, options.repository)
    reason = f"texts; {len(buckets)} models take their tokens, up to {plan.buckets.lengths[-1]} each"
    notes = (*plan.notes, *note_forgotten(options.repository, name, plan))
    return [*drafts, Draft(artifact, drafts[0].model, folder, reason)], notes
