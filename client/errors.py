"""What can go wrong between a person and the portal, each with the exit status of the command."""

from dataclasses import dataclass


class ClientError(Exception):
    """`str(error)` is one sentence for people."""

    exit_code = 1


class Unreachable(ClientError):
    exit_code = 5


class NotConfigured(ClientError):
    exit_code = 3


@dataclass(frozen=True)
class FieldError:
    field: str
    message: str


class Refused(ClientError):
    """The portal's answer was a refusal (RFC 9457)."""

    def __init__(self, status: int, code: str, detail: str, fields: list[FieldError]) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.fields = fields

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        return {400: 2, 401: 3, 403: 3, 404: 4, 413: 2, 415: 2, 422: 2}.get(self.status, 1)
