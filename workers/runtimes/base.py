"""What the shim asks of a runtime. Imported at every job's start, so it stays free of `typing` and the like."""

from workers.plan import Pairs, Plan


class LaunchFailed(Exception):
    """The command could not be started; the text is one sentence for the person who gave it."""


class Runtime:
    """One run of one command line on this node, with everything that comes of it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.main_status: int | None = None
        """Of the command itself once it has ended, as waitpid gives it."""

    def start(self, output_fd: int) -> int:
        """Starts the command, its output going to `output_fd`. -> its pid. Raises LaunchFailed."""
        raise NotImplementedError

    def signal(self, number: int) -> None:
        """Asks the run to end: the command itself where it hands signals on, else every process."""
        raise NotImplementedError

    def signal_tree(self, number: int) -> None:
        raise NotImplementedError

    def wait(self) -> bool:
        """Collects what has ended, without waiting. -> True as soon as nothing of the run can be alive."""
        raise NotImplementedError

    def kill_tree(self) -> None:
        """One round of ending everything without asking; to be repeated until `wait` says True."""
        raise NotImplementedError

    def members(self) -> list[int]:
        """The pids of the run."""
        raise NotImplementedError

    def oom_kills(self) -> int | None:
        """How many processes the kernel ended for want of memory; None where nobody counts them."""
        raise NotImplementedError

    def settle(self) -> None:
        """What may wait until the command has started."""
        raise NotImplementedError

    def record(self) -> Pairs:
        """What another process needs to find the run, should the shim die."""
        raise NotImplementedError

    def clean_up(self) -> None:
        """After the end: gives back what the run took from the kernel."""
        raise NotImplementedError
