"""The only way to get at a thing by its name or number: with the user who asks.

What a person may not see answers exactly like what does not exist.
"""

from uuid import UUID

from portal.models import Gpu, HardwareOrder, Job, Node, Project, User
from portal.services.errors import Problem

MAX_ID = 2**63 - 1


def get_job(user: User, job_id: int) -> Job:
    visible = Job.objects.visible_to(user).select_related("owner", "project")
    job = visible.filter(pk=job_id).first() if 0 < job_id <= MAX_ID else None
    if job is None:
        raise Problem(404, "not_found", f"There is no job {job_id}, or it is not yours to see.")
    return job


def get_node(user: User, name: str) -> Node:
    """Machines are for everyone who has signed in to see; what runs on them is filtered where it is shown."""
    node = Node.objects.filter(name=name).first() if user.is_active and "\x00" not in name else None
    if node is None:
        raise Problem(404, "not_found", "There is no node of this name.")
    return node


def get_gpu(user: User, uuid: str) -> Gpu:
    found = Gpu.objects.select_related("node").filter(uuid=uuid) if user.is_active and "\x00" not in uuid else None
    gpu = found.first() if found is not None else None
    if gpu is None:
        raise Problem(404, "not_found", "There is no GPU of this UUID.")
    return gpu


def get_order(user: User, order_id: UUID) -> HardwareOrder:
    """What a node is told to do with its hardware is no secret."""
    order = HardwareOrder.objects.select_related("node", "gpu").filter(pk=order_id).first() if user.is_active else None
    if order is None:
        raise Problem(404, "not_found", "There is no such order.")
    return order


def require_admin(user: User) -> None:
    """For what changes machines."""
    if not (user.is_active and user.is_superuser):
        raise Problem(403, "not_permitted", "Only an administrator may do this.")


def get_project(user: User, name: str) -> Project:
    project = Project.objects.visible_to(user).filter(name=name).first() if "\x00" not in name else None
    if project is None:
        raise Problem(404, "not_found", "There is no project of this name, or you are not a member.")
    return project
