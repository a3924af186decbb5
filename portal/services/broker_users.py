"""The broker's accounts of the nodes. Each reads its own order and queue, writes its own stream, and no more."""

import redis

from portal.models import Node
from portal.services import broker
from wire.names import desired_key, hint_queue, upstream_key

COMMANDS = (
    "+brpop", "+llen", "+sadd", "+multi", "+exec", "+ping", "+hello", "+client|setinfo", "+xadd", "+get",
)  # fmt: skip


def user_of(node: Node) -> str:
    """Never the name of one of the portal's own accounts, whatever the node is called."""
    return f"node.{node.name}"


def rules(node: Node) -> list[str]:
    queue = hint_queue(node.name)
    return [
        "reset", "on", f"#{node.broker_password_sha256}", "-@all",
        f"~{queue}*", f"~_kombu.binding.{queue}", f"~_kombu.binding_permanent.{queue}",
        f"%W~{upstream_key(node.name)}", f"%R~{desired_key(node.name)}",
        *COMMANDS,
    ]  # fmt: skip


def assert_user(client: redis.Redis, node: Node) -> None:
    client.execute_command("ACL", "SETUSER", user_of(node), *rules(node))


def assert_all(client: redis.Redis) -> int:
    """Make every account as it should be. -> how many. Accounts of nodes that are no longer enrolled are removed."""
    nodes = list(Node.objects.all())
    for node in nodes:
        assert_user(client, node)
    wanted = {user_of(node) for node in nodes}
    present = [name.decode() if isinstance(name, bytes) else str(name) for name in client.acl_users()]
    strangers = [name for name in present if name.startswith("node.") and name not in wanted]
    if strangers:
        client.acl_deluser(*strangers)
    return len(nodes)


class Watch:
    """Accounts live in the broker's memory: after its restart they are gone, and nodes cannot get in."""

    def __init__(self) -> None:
        self._run_id = ""

    def look(self) -> int:
        """-> how many accounts were made anew."""
        client = broker.client()
        run_id = str(client.info("server")["run_id"])
        if run_id == self._run_id:
            return 0
        count = assert_all(client)
        self._run_id = run_id
        return count


WATCH = Watch()
