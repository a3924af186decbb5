"""Words for people, and text that is safe to store."""

from collections.abc import Sequence

GB = 1_000_000_000


def storable(text: str, limit: int) -> str:
    """PostgreSQL takes neither NUL nor half a surrogate pair; a column takes no more than its length."""
    clean = text.replace("\x00", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode("utf-8")
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"


def one_of(words: Sequence[str]) -> str:
    """-> "A100, H100 or L40S"."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} or {words[-1]}"


def counted(number: int, noun: str) -> str:
    """-> "1 job", "2 jobs"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
