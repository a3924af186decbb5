"""The `gpuyard` command.

Exit status: 0 done, 1 failed, 2 wrong use or input, 3 not signed in, 4 not found, 5 unreachable.
"""

import json
import sys
from collections.abc import Callable, Iterator
from functools import update_wrapper
from typing import Any

import click

from client import config, render, specs
from client.api import Client, Rank
from client.errors import ClientError, Refused
from client.following import Away, Following, Item, LogLine, StateChange


class RankType(click.ParamType):
    name = "rank"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Rank:
        if value == "launcher":
            return "launcher"
        if str(value).isascii() and str(value).isdigit():
            return int(value)
        raise click.BadParameter(f"{value!r} is neither the number of a rank nor the word launcher.", ctx, param)


as_json = click.option("--json", "raw", is_flag=True, help="The portal's answer as JSON.")
job_id = click.argument("job_id", metavar="ID", type=click.IntRange(min=1))


def talks(command: Callable[..., int | None]) -> Callable[..., None]:
    """Gives the command a client, turns what goes wrong into a sentence and an exit status."""

    def wrapped(**options: Any) -> None:
        try:
            where = config.load()
            with Client(where.url, where.token) as portal:
                sys.exit(command(portal, **options) or 0)
        except ClientError as error:
            sys.exit(complain(error))

    return update_wrapper(wrapped, command)


def complain(error: ClientError) -> int:
    click.echo(f"gpuyard: {error}", err=True)
    for item in error.fields if isinstance(error, Refused) else []:
        click.echo(f"  {item.field}: {item.message}", err=True)
    return error.exit_code


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="gpuyard", prog_name="gpuyard")
def main() -> None:
    """Submit and watch jobs on the team's GPUs."""


@main.command()
@click.argument("url", required=False)
@click.option("--token", help="Asked for if left out, so that it stays out of the shell's history.")
def login(url: str | None, token: str | None) -> None:
    """Store the portal's URL and your token (made on its page Tokens)."""
    try:
        address = config.checked_url(url or click.prompt("Portal", default="http://127.0.0.1:8000"))
        given = config.Config(address, token or click.prompt("Token", hide_input=True))
        with Client(given.url, given.token) as portal:
            me = portal.me()
        where = config.store(given)
    except ClientError as error:
        sys.exit(complain(error))
    click.echo(f"Signed in to {given.url} as {me['username']}; stored in {where}.")


@main.command()
@click.argument("file", metavar="JOB.YAML")
@click.option(
    "--set", "assignments", multiple=True, metavar="KEY=VALUE", help="Change one value, e.g. resources.gpus=8."
)
@click.option("-f", "--follow", is_flag=True, help="Follow it to its end; the exit status is the job's result.")
@as_json
@talks
def submit(portal: Client, file: str, assignments: tuple[str, ...], follow: bool, raw: bool) -> int:
    """Submit a job; - reads it from standard input."""
    answer = portal.submit(specs.override(specs.read(file), assignments))
    if raw:
        echo_json(answer)
    else:
        click.echo(
            f"Job #{answer['id']} ({render.shown(answer['name'])}) is {render.state(answer['state'])}.", err=follow
        )
    return show_following(Following(portal, answer["id"])) if follow else 0


@main.command()
@click.option("--state", help="waiting, starting, running, stopping, succeeded, failed, stopped, active or ended.")
@click.option("--all", "everybodys", is_flag=True, help="Also the jobs of others that you may see.")
@click.option("-n", "--limit", type=click.IntRange(1, 10_000), default=50, show_default=True)
@as_json
@talks
def jobs(portal: Client, state: str | None, everybodys: bool, limit: int, raw: bool) -> None:
    """List your jobs, newest first."""
    owner = None if everybodys else portal.me()["username"]
    rows = list(portal.jobs(limit=limit, state=state, owner=owner))
    show(rows, raw, render.jobs, empty="No jobs. `gpuyard submit job.yaml` makes one.")


@main.command()
@job_id
@as_json
@talks
def job(portal: Client, job_id: int, raw: bool) -> None:
    """Show one job."""
    show(portal.job(job_id), raw, render.job)


@main.command()
@job_id
@click.option("-f", "--follow", is_flag=True, help="Go on until the job has ended.")
@click.option("-r", "--rank", type=RankType(), help="One rank, or launcher; without it every rank, each line marked.")
@talks
def logs(portal: Client, job_id: int, rank: Rank | None, follow: bool) -> int:
    """Print a job's log. One rank's comes byte for byte, unless it is followed on a terminal."""
    if follow:
        return show_following(Following(portal, job_id, ranks=None if rank is None else [rank]))
    if rank is not None:
        for data in whole_log(portal, job_id, rank):
            click.echo(data, nl=False)
        return 0
    following = Following(portal, job_id)
    for line in following.new_lines(portal.job(job_id)):
        click.echo(render.rank_line(line.rank, line.text))
    for line in following.unfinished():
        click.echo(render.rank_line(line.rank, line.text))
    return 0


@main.command()
@job_id
@as_json
@talks
def cancel(portal: Client, job_id: int, raw: bool) -> None:
    """Stop a job, waiting or running. Repeating it changes nothing."""
    answer = portal.cancel(job_id)
    show(answer, raw, lambda it: [f"Job #{it['id']} is {render.state(it['state'])}."])


@main.command()
@as_json
@talks
def nodes(portal: Client, raw: bool) -> None:
    """List the machines."""
    show(portal.nodes(), raw, render.nodes, empty="No machine has joined yet.")


@main.command()
@click.option("--free", is_flag=True, help="Only those that a job could have now.")
@click.option("--model", help="Only this model, e.g. H100.")
@as_json
@talks
def gpus(portal: Client, free: bool, model: str | None, raw: bool) -> None:
    """List the GPUs: how busy they are and who holds them."""
    rows = portal.gpus(free="true" if free else None, model=model)
    show(rows, raw, render.gpus, empty="No such GPU.")


def show(answer: Any, raw: bool, lines: Callable[[Any], list[str]], empty: str = "") -> None:
    if raw:
        echo_json(answer)
    elif not answer:
        click.echo(empty)
    else:
        click.echo("\n".join(lines(answer)))


def echo_json(answer: Any) -> None:
    click.echo(json.dumps(answer, indent=2, ensure_ascii=False))


def whole_log(portal: Client, job_id: int, rank: Rank) -> Iterator[bytes]:
    offset = 0
    while True:
        piece = portal.logs(job_id, rank, offset)
        yield piece.data
        if piece.complete or not piece.data:
            return
        offset = piece.next_offset


def show_following(following: Following) -> int:
    """-> 0 if the job succeeded. Log lines go to standard output, what is said about the job to standard error."""
    state = ""
    try:
        for item in following.items():
            show_item(item)
            state = item.state if isinstance(item, StateChange) else state
    except KeyboardInterrupt:
        click.echo(
            f"\nThe job goes on: gpuyard logs {following.job_id} -f; stop it: gpuyard cancel {following.job_id}",
            err=True,
        )
        return 130
    return 0 if state == "succeeded" else 1


def show_item(item: Item) -> None:
    if isinstance(item, LogLine):
        click.echo(render.rank_line(item.rank, item.text))
    elif isinstance(item, StateChange):
        click.echo(render.change(item.job), err=True)
    elif isinstance(item, Away):
        click.echo(f"gpuyard: {item.message} Trying on.", err=True)


if __name__ == "__main__":
    main()
