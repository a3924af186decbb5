"""What the shim asks of a runtime. Imported at every job's start, so it stays free of `typing` and the like."""

from workers.plan import Plan


class LaunchFailed(Exception):
    """The command could not be started; the text is one sentence for the person who gave it."""


class Runtime:
    """One run of one command line on this node, with everything that comes of it."""

    def start(self, plan: Plan, output_fd: int) -> int:
        """Starts the command, its output going to `output_fd`. -> its pid. Raises LaunchFailed."""
        raise NotImplementedError

    def signal(self, number: int) -> None:
        """Sends a signal to every process of the run."""
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

    def clean_up(self) -> None:
        """After the end: gives back what the run took from the kernel."""
        raise NotImplementedError
