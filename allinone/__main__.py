"""`python -m allinone up | demo | assets | database -- COMMAND…`."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from allinone import assets, checks, demo, postgres
from allinone.faults import USAGE, Fault, disk_errors_named
from allinone.options import CHECKOUT, Options
from allinone.stack import Stack
from allinone.terminal import Terminal

TEND_S = 0.2


def main(argv: list[str]) -> int:
    name, *rest = argv or ["help"]
    command = COMMANDS.get(name)
    if command is None:
        print(f"{__doc__}\n`make help` lists what can be done.", file=sys.stderr)
        return USAGE
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell that starts us in the background has SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    terminal = Terminal()
    try:
        return command(terminal, rest)
    except Fault as fault:
        print(fault, file=sys.stderr)
        return fault.exit_code
    except KeyboardInterrupt:
        return 130


def up(terminal: Terminal, _: list[str]) -> int:
    return serve(terminal, Options.load(), with_demo=False)


def run_demo(terminal: Terminal, _: list[str]) -> int:
    return serve(terminal, Options.load(), with_demo=True)


def serve(terminal: Terminal, options: Options, with_demo: bool) -> int:
    result = None
    with disk_errors_named(options.state_dir), checks.only_one(options):
        checks.before_start(options)
        assets.install()
        try:
            with Stack(options, terminal) as stack:
                if with_demo:
                    result = demo.run(stack)
                    demo.print_summary(terminal, result)
                terminal.say(welcome(stack))
                if not (result and options.exit_after_demo):
                    keep_serving(stack)
        except KeyboardInterrupt:
            terminal.say("Stopped; everything that was started here has ended.")
    if result and options.exit_after_demo:
        terminal.say(demo.as_json(result))
        return 0 if result.state == "succeeded" else 1
    return 0


def keep_serving(stack: Stack) -> None:
    stack.terminal.say("  Ctrl-C stops everything.")
    while True:
        stack.tend()
        time.sleep(TEND_S)


def welcome(stack: Stack) -> str:
    return "\n".join(
        [f"\n  {stack.options.public_url or stack.options.url}", *(f"    {line}" for line in stack.logins)]
    )


def install_assets(_: Terminal, __: list[str]) -> int:
    assets.install()
    return 0


def with_database(_: Terminal, command: list[str]) -> int:
    """Runs a command that wants a database, and has one only while it runs."""
    words = command[1:] if command[:1] == ["--"] else command
    if not words:
        raise Fault("Write a command after it: python -m allinone database -- manage.py check.", USAGE)
    if words[0].endswith(".py"):
        words = [sys.executable, *words]
    with postgres.temporary() as server:
        return subprocess.run(
            words, cwd=CHECKOUT, check=False, env=os.environ | {"DATABASE_URL": server.url}
        ).returncode


COMMANDS: dict[str, Callable[[Terminal, list[str]], int]] = {
    "up": up,
    "demo": run_demo,
    "assets": install_assets,
    "database": with_database,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
