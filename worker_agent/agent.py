"""``attach``: put a DDP model under gradpilot's control."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradpilot.errors import ConfigError, ProtocolError
from gradpilot.protos.messages import (
    DENSE,
    START_INTERVAL,
    START_PROBE,
    Layout,
    Option,
    Plan,
    Report,
    Welcome,
)
from gradpilot.worker_agent import compatibility, groups, identity, watchdog
from gradpilot.worker_agent.agreement import Agreement, control_timeout
from gradpilot.worker_agent.buckets import BucketTable
from gradpilot.worker_agent.catalog import calibrate
from gradpilot.worker_agent.client import ControllerClient
from gradpilot.worker_agent.config import AgentConfig, set_up_logging
from gradpilot.worker_agent.controller_link import ControllerLink
from gradpilot.worker_agent.coordinator import Coordinator
from gradpilot.worker_agent.division import DivisionRule
from gradpilot.worker_agent.handle import Handle, counters_of
from gradpilot.worker_agent.hook import Pipeline
from gradpilot.worker_agent.hook_state import hook
from gradpilot.worker_agent.loss_scale import LossScale, Scaler
from gradpilot.worker_agent.meeting import meet
from gradpilot.worker_agent.nodes import NodeTeams
from gradpilot.worker_agent.plan import ActivePlan
from gradpilot.worker_agent.reporting import WindowRecorder
from gradpilot.worker_agent.sharded import Sharding, is_sharded
from gradpilot.worker_agent.unused import UnusedParameters
from gradpilot.worker_agent.wire import Wire


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
    grad_scaler: Scaler | None = None,
    sharding: Sharding | None = None,
    **settings: Any,
) -> Handle:
    """Put a DDP model under control. Two lines of code: this, after wrapping the model.

    Every rank of the model's process group must call it at the same point with the same arguments:
    it creates process groups and times the compressors for up to a second. With no address
    configured, the first rank starts a controller of its own on a free loopback port.

    Args:
        model: Wrapped model, or what ``torch.compile`` made of one. It gets the one communication
            hook that DDP has room for. A ``HookState`` that was registered with it is attached,
            with its own settings instead of those given here.
        controller: ``host:port`` of a controller, ``off`` for none, None for
            ``GRADPILOT_CONTROLLER`` or an embedded one.
        run: Run id; None for ``GRADPILOT_RUN`` or the job's own id.
        name: Name of the model within the run, for jobs that wrap several; None for
            ``GRADPILOT_MODEL`` or "model".
        policy: Policy of an embedded controller; None for ``GRADPILOT_POLICY`` or its default.
        seed: Seed of every random choice.
        start: Option of all buckets until the first plan.
        wire: Makes the driver; another one emulates a link.
        grad_scaler: The ``GradScaler`` that scales this model's loss, if one does: what was not
            sent yet follows its scale. Its checkpoint and the handle's belong together.
        sharding: What only models sharded by ``fully_shard`` or FSDP1 need; see ``Sharding``.
        **settings: Other fields of ``AgentConfig``.

    Returns:
        The handle; keep it to read plans and counters and to save the state.

    Raises:
        AttachError: The model is not a DDP model, its hook slot is taken, or DDP would not call a
            hook as expected.
        ConfigError: A setting cannot be used.
    """
    if is_sharded(model):
        from gradpilot.worker_agent.sharded.attach import attach_sharded

        sharded_config = AgentConfig.load(
            controller=controller, run=run, model=name, policy=policy, seed=seed, **settings
        )
        set_up_logging(sharded_config, dist.get_rank())
        return attach_sharded(
            model, sharded_config, start=start, grad_scaler=grad_scaler, sharding=sharding
        )
    model = compatibility.ddp_of(model)
    registered = compatibility.check(model)
    if registered is not None and not registered.attaching:
        return registered.attach(model)
    compatibility.guard_join()
    config = AgentConfig.load(
        controller=controller, run=run, model=name, policy=policy, seed=seed, **settings
    )
    group = model.process_group
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    set_up_logging(config, rank)
    device = next(p.device for p in model.parameters() if p.requires_grad)
    if start.collective != "hierarchical":  # which can be judged only when the nodes are known
        ActivePlan(Plan(0, 0, "", default=start), world_size)  # refuse it before any group is made
    ranks = dist.get_process_group_ranks(group)
    timeout = control_timeout(config.control_timeout_seconds)
    groups.begin(group)
    control = groups.acquire(ranks, "gloo", timeout)
    data = groups.acquire(ranks, dist.get_backend(group))
    met = meet(config, ranks)
    job, address = met.job, met.address

    table = BucketTable(model.module.named_parameters())
    calibration = calibrate(world_size, device) if address else ()
    place = identity.place(os.environ)
    agreement: Agreement | None = None
    link: ControllerLink | None = None
    coordinator: Coordinator
    pipeline: Pipeline

    def check(plan: Plan) -> None:
        coordinator.check(plan)

    if world_size > 1:
        agreement = Agreement(
            control,
            groups.store(),
            f"gradpilot/{job.incarnation}/{config.model}",
            timeout.total_seconds(),
            check,
        )
    driver = wire(data)
    backend = dist.get_backend(group)  # not asked again: the group may be gone at the end
    owned: tuple[dist.ProcessGroup, ...] = (data, control)
    if met.nodes.layered:
        driver.teams = NodeTeams(met.nodes, ranks, rank, backend)
        owned += driver.teams.owned
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
                plan=coordinator.active.plan,
            )

        def on_plan(plan: Plan) -> None:
            try:
                coordinator.offer(plan)
            except (ProtocolError, ConfigError):
                coordinator.reject()
                raise

        client = ControllerClient(address, make_hello, config, world_size=world_size)
        link = ControllerLink(client, calibration, met.nodes.layered, config.plan_ttl_seconds)
    coordinator = Coordinator(
        Plan(0, 0, "", default=start, interval=START_INTERVAL, policy="start"),
        world_size,
        device.type,
        agreement,
        link,
        met.nodes,
    )
    recorder = WindowRecorder(
        Layout.of(()),
        report_seconds=config.report_seconds,
        counters=lambda: counters_of(pipeline, coordinator, link),
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
        loss_scale=LossScale(grad_scaler),
        unused=UnusedParameters.of(
            model, in_backward=registered is not None and registered.in_backward
        ),
    )
    guard = watchdog.start(
        config.watchdog_seconds,
        config.dumps,
        job,
        place,
        model=config.model,
        rank=rank,
        world_size=world_size,
    )
    if guard is not None:
        pipeline.fly_with(guard.flight)
    if link is not None:

        def on_welcome(welcome: Welcome) -> None:
            recorder.report_seconds = welcome.report_seconds
            link.ttl_seconds = welcome.plan_ttl_seconds

        if world_size > 1:
            coordinator.request_probe(START_PROBE)
        link.client.start(
            on_plan=on_plan, on_probe=coordinator.request_probe, on_welcome=on_welcome
        )
    handle = Handle(
        job=job,
        config=config,
        pipeline=pipeline,
        coordinator=coordinator,
        recorder=recorder,
        table=table,
        link=link,
        child=met.child,
        owned=owned,
        addresses=(address, met.metrics_url),
        watchdog=guard,
    )
    if registered is None:
        model.register_comm_hook(pipeline, hook)
    return handle


def _drop(_: Report) -> None:
    """Take a report where no controller wants one."""
