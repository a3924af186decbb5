"""Refusals that people and programs see: a status, a code, a sentence, and the fields it is about."""


class Problem(Exception):
    """Every refusal of the portal, the same in pages, REST and the command line (RFC 9457)."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        errors: list[dict[str, str]] | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail
        self.errors = errors or []
        self.headers = headers or {}


def field_problem(status: int, code: str, field: str, message: str) -> Problem:
    """A refusal that is about one field."""
    return Problem(status, code, f"{field}: {message}", errors=[{"field": field, "message": message}])
