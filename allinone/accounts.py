"""PostgreSQL refuses to run as root; root therefore starts it as an account that can do nothing else."""

import os
import pwd
import subprocess
from pathlib import Path

from allinone.children import Account, as_account
from allinone.faults import Fault

CANDIDATES = ("gpuyard", "nobody")


def unprivileged() -> Account | None:
    """-> the account for servers that refuse root, or None if we are not root anyway."""
    if os.geteuid() != 0:
        return None
    for name in CANDIDATES:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return Account(name, entry.pw_uid, entry.pw_gid)
    raise Fault(
        "PostgreSQL does not run as root and this machine has neither an account named gpuyard nor nobody: "
        "run `useradd --system gpuyard`, or start as an ordinary user."
    )


def reaches(account: Account | None, path: Path) -> bool:
    """Whether the account may enter (or execute) `path`: a checkout below /root is closed to everyone else."""
    if account is None:
        return os.access(path, os.X_OK)
    answer = subprocess.run(
        ["/bin/sh", "-c", 'test -x "$1"', "sh", str(path)],
        check=False,
        cwd="/",
        capture_output=True,
        **as_account(account),
    )
    return answer.returncode == 0


def give(account: Account | None, path: Path) -> None:
    if account:
        os.chown(path, account.uid, account.gid)
