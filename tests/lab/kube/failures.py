"""The errors that a client of the API server gets."""

from __future__ import annotations


class ApiError(Exception):
    """A refused request.

    Attributes:
        code: HTTP status.
        reason: Kubernetes' word for it.
    """

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason

    def as_status(self) -> dict:
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": str(self),
            "reason": self.reason,
            "code": self.code,
        }


def not_found(resource, name: str) -> ApiError:
    return ApiError(404, "NotFound", f'{resource.qualified} "{name}" not found')
