"""Celery bootsteps of a node: started in this order before the consumer, which may wait for the broker for ever, and
stopped in reverse. A run outlives all of them."""

from typing import Any, ClassVar

from celery import Celery, bootsteps

from workers.agent import Agent


class NodeStep(bootsteps.StartStopStep):
    """`create` returns what has `start` and `stop`."""

    requires: ClassVar[set[object]] = {"celery.worker.components:Pool"}

    def agent(self, worker: Any) -> Agent:
        agent: Agent = worker.app.agent
        return agent


class Recovery(NodeStep):
    def start(self, worker: Any) -> None:
        self.agent(worker).recover()


class GpuReader(NodeStep):
    requires: ClassVar[set[object]] = {Recovery}

    def create(self, worker: Any) -> Any:
        return self.agent(worker).reader


class DesiredStateSync(NodeStep):
    requires: ClassVar[set[object]] = {Recovery}

    def create(self, worker: Any) -> Any:
        return self.agent(worker).sync_loop


class AttemptWatch(NodeStep):
    requires: ClassVar[set[object]] = {Recovery}

    def create(self, worker: Any) -> Any:
        return self.agent(worker).watch_loop


class EventSender(NodeStep):
    requires: ClassVar[set[object]] = {Recovery}

    def create(self, worker: Any) -> Any:
        return self.agent(worker).event_loop


class LogShipping(NodeStep):
    requires: ClassVar[set[object]] = {Recovery}

    def create(self, worker: Any) -> Any:
        return self.agent(worker).log_loop


class TelemetrySender(NodeStep):
    requires: ClassVar[set[object]] = {GpuReader}

    def create(self, worker: Any) -> Any:
        return self.agent(worker).telemetry_loop


class HealthReport(NodeStep):
    requires: ClassVar[set[object]] = {GpuReader}

    def create(self, worker: Any) -> Any:
        return self.agent(worker).health_loop


class InventoryReport(NodeStep):
    requires: ClassVar[set[object]] = {GpuReader}

    def create(self, worker: Any) -> Any:
        return self.agent(worker).inventory_loop


class HeartbeatSender(NodeStep):
    requires: ClassVar[set[object]] = {DesiredStateSync, AttemptWatch}

    def create(self, worker: Any) -> Any:
        return self.agent(worker).heartbeat_loop


class Tidying(NodeStep):
    requires: ClassVar[set[object]] = {Recovery}

    def create(self, worker: Any) -> Any:
        return self.agent(worker).tidy_loop


STEPS = (Recovery, GpuReader, DesiredStateSync, AttemptWatch, EventSender, LogShipping, TelemetrySender,
         HealthReport, InventoryReport, HeartbeatSender, Tidying)


def install(app: Celery, agent: Agent) -> None:
    app.agent = agent
    app.steps["worker"].update(STEPS)
