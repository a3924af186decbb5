"""What the person at the terminal sees: few lines, colour only where it is understood."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

RANK_COLOURS = (36, 35, 33, 32, 34, 31, 96, 95)


class Terminal:
    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stdout
        self.colours = self.stream.isatty() and not os.environ.get("NO_COLOR")

    def say(self, text: str) -> None:
        print(text, file=self.stream, flush=True)

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """One line once it is done, with the time it took."""
        begun = time.monotonic()
        yield
        self.say(f"  {self.paint('✓', 32)} {what} ({time.monotonic() - begun:.1f} s)")

    def rank_line(self, rank: int | str, text: str) -> None:
        mark = f"r{rank}" if isinstance(rank, int) else "··"
        colour = RANK_COLOURS[rank % len(RANK_COLOURS)] if isinstance(rank, int) else 90
        self.say(f"  {self.paint(f'{mark:>3} │', colour)} {printable(text)}")

    def paint(self, text: str, code: int) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.colours else text


def printable(text: str) -> str:
    """A job's output must not steer the terminal: control characters other than a tab are dropped."""
    return "".join(character for character in text if character == "\t" or character.isprintable())
