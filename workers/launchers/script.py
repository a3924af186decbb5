"""One process per node, started as it is written."""

from wire.desired import Launch
from wire.reports import RankExit
from workers.launchers import base
from workers.plan import Plan
from workers.spool import AttemptDir


class ScriptLauncher:
    def plan(self, launch: Launch, attempt: AttemptDir, job_path: str = "") -> Plan:
        words = base.words_of(launch.command)
        cwd = base.working_directory(launch, attempt)
        # The command is the only process the portal starts on this node, so in its world a node is a rank.
        ours = {"RANK": str(launch.node_rank), "WORLD_SIZE": str(launch.node_count), "NODE_RANK": str(launch.node_rank)}
        env = ours | base.job_environment(launch, attempt, job_path)
        return Plan(base.program(words, cwd, env), env, cwd, [stream(launch)], limits=base.limits(launch))

    def rank_exits(self, launch: Launch, attempt: AttemptDir, ended: RankExit) -> list[RankExit]:
        message = base.last_error_line(attempt.log_path(stream(launch)))
        failed = ended.signal is not None or ended.exit_code != 0
        return [RankExit(rank=launch.first_rank, exit_code=ended.exit_code, signal=ended.signal,
                         message=message if failed else None, ended_at=ended.ended_at)]


def stream(launch: Launch) -> str:
    return f"rank-{launch.first_rank}"
