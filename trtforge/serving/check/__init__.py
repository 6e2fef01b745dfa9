"""Prove a packaged repository with the real server."""

from trtforge.serving.check.repository import check_repository, require_gpu
from trtforge.serving.check.results import CheckResult, LoadCheck, ModelCheck, RequestCheck

__all__ = ["CheckResult", "LoadCheck", "ModelCheck", "RequestCheck", "check_repository", "require_gpu"]
