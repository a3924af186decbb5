"""The REST interface: one API object, one router per noun. OpenAPI at /api/v1/docs."""

from ninja import NinjaAPI

from portal.api import gpus, health, jobs, logs, me, mig, nodes, problems, queries, topology
from portal.api.auth import Credentials

api = NinjaAPI(
    title="gpuyard",
    version="1",
    description="Submit jobs, watch them, read their logs and the GPUs' telemetry. Errors are RFC 9457 problem+json.",
    urls_namespace="api",
    auth=Credentials(),
)
problems.install(api)
api.add_router("/jobs", jobs.router, tags=["jobs"])
api.add_router("/jobs", logs.router, tags=["logs"])
api.add_router("/nodes", nodes.router, tags=["nodes"])
api.add_router("/nodes", health.nodes, tags=["health"])
api.add_router("/nodes", mig.router, tags=["mig"])
api.add_router("/nodes", topology.router, tags=["nodes"])
api.add_router("/gpus", gpus.router, tags=["gpus"])
api.add_router("/gpus", health.gpus, tags=["health"])
api.add_router("/me", me.router, tags=["me"])
api.add_router("/metrics", queries.router, tags=["metrics"])
