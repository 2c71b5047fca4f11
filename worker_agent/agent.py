"""``attach``: put a DDP model under gradpilot's control, and the handle it returns."""

from __future__ import annotations

import atexit
import collections
import json
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradpilot.errors import AttachError, ConfigError, ProtocolError
from gradpilot.protos.jsoncodec import from_json, to_json
from gradpilot.protos.messages import (
    DENSE,
    Ack,
    Catalog,
    Counters,
    Layout,
    Option,
    Plan,
    Report,
    Welcome,
)
from gradpilot.worker_agent import embedded, groups, identity
from gradpilot.worker_agent.agreement import Agreement, control_timeout
from gradpilot.worker_agent.buckets import BucketTable
from gradpilot.worker_agent.catalog import calibrate, families
from gradpilot.worker_agent.client import ControllerClient
from gradpilot.worker_agent.config import AgentConfig, set_up_logging
from gradpilot.worker_agent.coordinator import FIRST_INTERVAL, Coordinator
from gradpilot.worker_agent.division import DivisionRule
from gradpilot.worker_agent.hook import Pipeline, hook
from gradpilot.worker_agent.plan import ActivePlan
from gradpilot.worker_agent.reporting import WindowRecorder
from gradpilot.worker_agent.teardown import settle
from gradpilot.worker_agent.wire import Wire

log = logging.getLogger("gradpilot.agent")

CLIENT_SECONDS = 0.6
CHILD_SECONDS = 0.9
"""How long the exit may wait for the connection and for an embedded controller to end."""

MEET_SECONDS = 10.0
"""How much longer than a controller may take to start the other ranks wait for the first."""

STATE_VERSION = 2
"""Version of ``Handle.state_dict``; raised when an old reader could misread it."""

_open: set[Handle] = set()


class Handle:
    """A model under control. Made by ``attach``; its methods never wait for the controller.

    Attributes:
        run: Run id.
        model: Name of the model within the run.
        controller: Address of the controller, "" without one.
        metrics_url: Where an embedded controller serves its metrics, "" otherwise.
    """

    def __init__(
        self,
        *,
        job: identity.Job,
        config: AgentConfig,
        pipeline: Pipeline,
        coordinator: Coordinator,
        recorder: WindowRecorder,
        table: BucketTable,
        link: _ControllerLink | None,
        child: embedded.EmbeddedController | None,
        owned: tuple[dist.ProcessGroup, ...],
        addresses: tuple[str, str],
    ) -> None:
        self.run = job.run
        self.model = config.model
        self.controller, self.metrics_url = addresses
        self._pipeline = pipeline
        self._coordinator = coordinator
        self._recorder = recorder
        self._table = table
        self._link = link
        self._child = child
        self._groups = owned
        self._closed = False

    @property
    def plan(self) -> Plan:
        """Return the plan in force."""
        return self._coordinator.active.plan

    @property
    def step(self) -> int:
        """Return the number of synchronised backward passes so far."""
        return self._pipeline.step

    @property
    def layout(self) -> Layout | None:
        """Return the present bucket layout; None before the first step."""
        return self._table.layout

    @property
    def frozen(self) -> str:
        """Return why plans no longer change, "" if they may."""
        return self._coordinator.frozen

    @property
    def counters(self) -> Counters:
        """Return the events since the agent was attached."""
        return _counters(self._pipeline, self._coordinator, self._link)

    def observe(self, *, loss: float | None = None, lr: float | None = None) -> None:
        """Tell the controller the newest loss and learning rate; optional, never waits."""
        self._recorder.observe(loss=loss, lr=lr)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint of this rank must hold; loads with ``weights_only=True``.

        Residuals differ between ranks, so every rank saves its own. Call between two steps.
        """
        return {
            "version": STATE_VERSION,
            "world_size": self._pipeline.world_size,
            "step": self._pipeline.step,
            "plan": to_json(self.plan),
            "residuals": self._pipeline.residuals.state_dict(),
            "memories": self._pipeline.memories.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state_dict``; all ranks alike, before the first step.

        A state of another world size gives step and plan only: whose residual would be whose is
        not defined, so they are dropped and counted in ``counters.residual_resets``.

        Raises:
            ConfigError: The state is of another version, or the steps have begun.
        """
        if state.get("version") != STATE_VERSION:
            raise ConfigError(
                f"expected agent state of version {STATE_VERSION}, got {state.get('version')!r};"
                " load it with the gradpilot that saved it, or start without it"
            )
        self._pipeline.step = int(state["step"])
        plan = from_json(Plan, state["plan"])
        if state["world_size"] == self._pipeline.world_size:
            self._coordinator.restore(plan)
            self._pipeline.residuals.load_state_dict(state["residuals"])
            self._pipeline.memories.load_state_dict(state["memories"])
            return
        self._pipeline.residuals.resets += len(state["residuals"])
        log.warning(
            "the checkpoint is of %s ranks, this job has %d: %d residuals were dropped",
            state["world_size"],
            self._pipeline.world_size,
            len(state["residuals"]),
        )
        # Skips and bounds depend on the world size, so start dense; ids go on from there.
        self._coordinator.restore(replace(plan, assignments=(), default=DENSE))

    def detach(self) -> None:
        """Go back to plain DDP: dense all-reduce on DDP's own group, no threads, no controller.

        Call on all ranks between the same two steps. DDP keeps the hook, which does nothing but
        what DDP did; a residual is sent with the next step.
        """
        if self._closed:
            return
        self._coordinator.restore(replace(self.plan, assignments=(), default=DENSE))
        self.close()

    def close(self) -> None:
        """Stop threads and connection within 2 s; called at exit for what is still open."""
        if self._closed:
            return
        self._closed = True
        _open.discard(self)
        agreed = self._coordinator.close()
        if self._link is not None:
            self._link.close()  # with the line below at most 1.5 s, mostly 0.5
        idle = self._pipeline.close()
        if self._child is not None:
            self._child.stop(CHILD_SECONDS)
        if idle and agreed:
            for group in self._groups:
                groups.release(group)


class _ControllerLink:
    """The connection to the controller as the coordinator and the pipeline see it."""

    def __init__(self, client: ControllerClient, calibration: tuple[Any, ...], ttl: float) -> None:
        self.client = client
        self.ttl_seconds = ttl
        self._calibration = calibration

    def send_ack(self, ack: Ack) -> None:
        self.client.send_ack(ack)

    def send_report(self, report: Report) -> None:
        self.client.send_report(report)

    def layout_changed(self, table: BucketTable) -> None:
        assert table.layout is not None
        world_size = self.client.world_size
        self.client.set_catalog(
            Catalog(table.layout, families(table.slots, world_size), self._calibration)
        )

    def controller_lost(self) -> bool:
        return self.client.seconds_since_contact() > self.ttl_seconds

    def close(self) -> None:
        self.client.close(CLIENT_SECONDS)


def attach(
    model: DistributedDataParallel,
    *,
    controller: str | None = None,
    run: str | None = None,
    name: str | None = None,
    policy: str | None = None,
    seed: int | None = None,
    start: Option = DENSE,
    wire: Callable[[dist.ProcessGroup], Wire] = Wire,
    **settings: Any,
) -> Handle:
    """Put a DDP model under control. Two lines of code: this, after wrapping the model.

    Every rank of the model's process group must call it at the same point with the same arguments:
    it creates process groups and times the compressors for up to a second. With no address
    configured, the first rank starts a controller of its own on a free loopback port.

    Args:
        model: Wrapped model; it gets the one communication hook that DDP has room for.
        controller: ``host:port`` of a controller, ``off`` for none, None for
            ``GRADPILOT_CONTROLLER`` or an embedded one.
        run: Run id; None for ``GRADPILOT_RUN`` or the job's own id.
        name: Name of the model within the run, for jobs that wrap several; None for
            ``GRADPILOT_MODEL`` or "model".
        policy: Policy of an embedded controller; None for ``GRADPILOT_POLICY`` or its default.
        seed: Seed of every random choice.
        start: Option of all buckets until the first plan.
        wire: Makes the driver; another one emulates a link.
        **settings: Other fields of ``AgentConfig``.

    Returns:
        The handle; keep it to read plans and counters and to save the state.

    Raises:
        AttachError: The model is not a DDP model, or its hook slot is taken.
        ConfigError: A setting cannot be used.
    """
    if not isinstance(model, DistributedDataParallel):
        raise AttachError(
            "attach expects a model wrapped in torch.nn.parallel.DistributedDataParallel, got"
            f" {type(model).__name__}; wrap it first. Other wrappers are not managed"
        )
    config = AgentConfig.load(
        controller=controller, run=run, model=name, policy=policy, seed=seed, **settings
    )
    group = model.process_group
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    set_up_logging(config, rank)
    device = next(p.device for p in model.parameters() if p.requires_grad)
    _refuse_taken_slot(model)
    ActivePlan(Plan(0, 0, "", default=start), world_size)  # refuse a bad start before any group

    ranks = dist.get_process_group_ranks(group)
    timeout = control_timeout(config.control_timeout_seconds)
    control = groups.acquire(ranks, "gloo", timeout)
    data = groups.acquire(ranks, dist.get_backend(group))
    job, address, metrics_url, child = _meet(config, ranks)

    table = BucketTable(model.module.named_parameters())
    calibration = calibrate(world_size, device) if address else ()
    place = identity.place(os.environ)
    agreement: Agreement | None = None
    link: _ControllerLink | None = None
    coordinator: Coordinator
    pipeline: Pipeline

    def check(plan: Plan) -> None:
        coordinator.check(plan)

    if world_size > 1:
        agreement = Agreement(
            control,
            dist.distributed_c10d._get_default_store(),
            f"gradpilot/{job.incarnation}/{config.model}",
            timeout.total_seconds(),
            check,
        )
    driver = wire(data)
    backend = dist.get_backend(group)  # not asked again: the group may be gone at the end
    if address:

        def make_hello() -> Any:
            return identity.hello(
                job,
                place,
                model=config.model,
                rank=rank,
                world_size=world_size,
                backend=backend,
                device=device.type,
                emulated=driver.emulated,
                step=pipeline.step,
                plan=coordinator.active.plan if coordinator.active.plan.id else None,
            )

        def on_plan(plan: Plan) -> None:
            try:
                coordinator.offer(plan)
            except (ProtocolError, ConfigError):
                coordinator.reject()
                raise

        client = ControllerClient(address, make_hello, config, world_size=world_size)
        link = _ControllerLink(client, calibration, config.plan_ttl_seconds)
    coordinator = Coordinator(
        Plan(0, 0, "", default=start, interval=FIRST_INTERVAL, policy="start"),
        world_size,
        device.type,
        agreement,
        link,
    )
    recorder = WindowRecorder(
        Layout.of(()),
        report_seconds=config.report_seconds,
        counters=lambda: _counters(pipeline, coordinator, link),
        sample_block=config.sample_block,
        sample_steps=config.sample_steps,
    )
    pipeline = Pipeline(
        group=group,
        wire=driver,
        buckets=table,
        coordinator=coordinator,
        recorder=recorder,
        send_report=link.send_report if link is not None else _drop,
        divides=DivisionRule(model, world_size).divides,
        device=device,
        seed=config.seed,
        statistics_steps=config.statistics_steps,
    )
    if link is not None:

        def on_welcome(welcome: Welcome) -> None:
            recorder.report_seconds = welcome.report_seconds
            link.ttl_seconds = welcome.plan_ttl_seconds

        link.client.start(
            on_plan=on_plan, on_probe=coordinator.request_probe, on_welcome=on_welcome
        )
    model.register_comm_hook(pipeline, hook)
    handle = Handle(
        job=job,
        config=config,
        pipeline=pipeline,
        coordinator=coordinator,
        recorder=recorder,
        table=table,
        link=link,
        child=child,
        owned=(data, control),
        addresses=(address, metrics_url),
    )
    _open.add(handle)
    _attached.append(config.model)
    return handle


def close_all() -> None:
    """Close every handle of this process; runs at exit by itself."""
    for handle in list(_open):
        handle.close()


@atexit.register
def _leave() -> None:
    used = bool(_open) or _attached
    close_all()
    groups.destroy_free()
    if used:
        settle()


_meetings: collections.Counter[str] = collections.Counter()

_attached: list[str] = []
"""Models that were attached in this process, so that the exit takes its moment."""


def _refuse_taken_slot(model: DistributedDataParallel) -> None:
    for taken, _ in getattr(model, "_comm_hooks", ()):
        name = getattr(taken, "__qualname__", repr(taken))
        raise AttachError(
            f"DDP has room for one communication hook and {name} is registered already;"
            " remove that registration (native mixed precision and optimizers in backward make one)"
        )


def _meet(
    config: AgentConfig, ranks: list[int]
) -> tuple[identity.Job, str, str, embedded.EmbeddedController | None]:
    """Let the first rank say what all ranks share: job and addresses.

    Returns:
        Job, controller address and metrics URL ("" without), and the first rank's own controller.
    """
    child: embedded.EmbeddedController | None = None
    here = identity.place(os.environ)
    store = dist.distributed_c10d._get_default_store()
    members = ",".join(map(str, ranks))
    _meetings[members] += 1  # attaching is collective, so all ranks count alike
    key = f"gradpilot/meet/{members}/{_meetings[members]}"
    if ranks[0] == dist.get_rank():
        job = identity.propose(os.environ, config.run)
        address = "" if config.off else config.controller
        if config.embedded:
            child = embedded.start(config)
            address = child.grpc_address if child is not None else ""
        metrics_url = child.metrics_url if child is not None else ""
        shared = [job.run, job.incarnation, job.source, address, metrics_url, here.node]
        store.set(key, json.dumps(shared))
    # Not a broadcast: the control group's timeout is shorter than a controller may take to start.
    store.wait([key], timedelta(seconds=config.embedded_timeout_seconds + MEET_SECONDS))
    *names, address, metrics_url, node = json.loads(store.get(key))
    job = identity.Job(*names)
    if config.embedded and address and here.node != node:
        # An embedded controller listens on the loopback address of the first rank's node only.
        log.warning(
            "this rank is on another node than the embedded controller and sends it no"
            " measurements; set GRADPILOT_CONTROLLER to a controller that all nodes reach"
        )
        address = ""
    return job, address, metrics_url, child


def _counters(
    pipeline: Pipeline, coordinator: Coordinator, link: _ControllerLink | None
) -> Counters:
    events = coordinator.counters
    return Counters(
        steps=pipeline.step,
        switches=events.switches,
        nonfinite_steps=pipeline.nonfinite_steps,
        residual_resets=pipeline.residuals.resets,
        reports_dropped=link.client.dropped if link is not None else 0,
        plans_rejected=events.plans_rejected,
        plans_held=events.plans_held,
        wire_bytes=pipeline.wire_bytes,
        dense_bytes=pipeline.dense_bytes,
        agreement_failures=events.agreement_failures,
    )


def _drop(_: Report) -> None:
    """Take a report where no controller wants one."""
