"""``attach`` for models whose parameters are sharded: FSDP2 (``fully_shard``) and FSDP1."""

from __future__ import annotations

import logging

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from gradpilot.errors import AttachError, ConfigError
from gradpilot.protos.messages import DENSE, Layout, Option, Plan
from gradpilot.protos.option_text import parse_option
from gradpilot.worker_agent.config import AgentConfig
from gradpilot.worker_agent.loss_scale import LossScale, Scaler
from gradpilot.worker_agent.plan import Given, compile_option
from gradpilot.worker_agent.reporting import WindowRecorder
from gradpilot.worker_agent.sharded import fsdp1, fsdp2
from gradpilot.worker_agent.sharded.exchange import DENSE_SHARDED, ShardedOption, compile_sharded
from gradpilot.worker_agent.sharded.handle import ShardedHandle, counters_of, spoil_gradients
from gradpilot.worker_agent.sharded.pipeline import ShardedPipeline
from gradpilot.worker_agent.sharded.reports import Reporter
from gradpilot.worker_agent.sharded.settings import Sharding
from gradpilot.worker_agent.sharded.slots import Unit
from gradpilot.worker_agent.sharded.steps import Steps
from gradpilot.worker_agent.sharded.warm_up import WarmUp
from gradpilot.worker_agent.sharded.weights import WeightGather

log = logging.getLogger("gradpilot.agent")


def attach_sharded(
    model: nn.Module,
    config: AgentConfig,
    *,
    start: Option = DENSE,
    grad_scaler: Scaler | None = None,
    sharding: Sharding | None = None,
) -> ShardedHandle:
    """Put a sharded model under control; every rank alike, before the first forward pass.

    The option is ``start``, or else what ``GRADPILOT_OPTION`` says; it stays.

    Args:
        model: Root of the sharded modules.
        config: Settings.
        start: Option of all units.
        grad_scaler: See ``attach``.
        sharding: What only sharded models need.

    Raises:
        AttachError: This torch or this model leaves no place for us.
        ConfigError: The option cannot be used here.
    """
    sharding = sharding or Sharding()
    option = parse_option(config.option) if config.option and start == DENSE else start
    if isinstance(model, FullyShardedDataParallel):
        return _attach_fsdp1(model, config, option, grad_scaler, sharding)

    units = fsdp2.find_units(model)
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for unit in units:
        if unit.shard_group is not None:
            groups.setdefault(_ranks(unit.shard_group), unit.shard_group)
    taken = next((u.taken for u in units if u.taken), "")
    if taken:
        raise AttachError(
            f"{taken} is set on this model already, and FSDP2 has room for one; remove it"
        )
    if not groups:
        raise AttachError("no module of this model is sharded: call fully_shard on it first")
    observes = ""
    if len(groups) > 1:
        observes = "its modules are sharded over different groups of ranks"
    elif any(unit.replica_group is not None for unit in units):
        observes = (
            "FSDP2 averages over the replicas of a two-dimensional mesh by itself; to compress"
            " that, shard over one dimension and pass Sharding(replicas=...)"
        )
    group = next(iter(groups.values()))
    replicas = sharding.replicas or next((u.replica_group for u in units if u.replica_group), None)
    copies = 1 if replicas is None else dist.get_world_size(replicas)
    builder = _Builder(model, config, option, grad_scaler, sharding, observes, copies)
    pipeline = builder.pipeline(group, tuple(u.unit for u in units))
    weights = None
    if sharding.weight_refresh_steps and not observes:
        weights = WeightGather(pipeline, lambda: model.training)
    fsdp2.install(
        model,
        units,
        pipeline,
        replicas=None if observes else sharding.replicas,
        weights=weights,
    )
    return builder.handle(weights)


def _attach_fsdp1(
    model: FullyShardedDataParallel,
    config: AgentConfig,
    option: Option,
    grad_scaler: Scaler | None,
    sharding: Sharding,
) -> ShardedHandle:
    fsdp1.check(model)
    if sharding.replicas is not None or sharding.weight_refresh_steps:
        raise ConfigError("Sharding(replicas=, weight_refresh_steps=) are for fully_shard only")
    units = fsdp1.find_units(model)
    group = model.process_group
    assert group is not None
    builder = _Builder(model, config, option, grad_scaler, sharding, "")
    whole = any(not module._handle.uses_sharded_strategy for module, _ in units)
    pipeline = builder.pipeline(group, tuple(unit for _, unit in units), whole=whole)
    fsdp1.install(model, units, pipeline, group)
    return builder.handle(None)


class _Builder:
    """Makes pipeline and handle of one model.

    ``observes`` says why the model is only observed, "" if it is not; ``copies`` is the number of
    replicas of each shard.
    """

    def __init__(
        self,
        model: nn.Module,
        config: AgentConfig,
        option: Option,
        grad_scaler: Scaler | None,
        sharding: Sharding,
        observes: str,
        copies: int = 1,
    ) -> None:
        self._model = model
        self._config = config
        self._option = DENSE if observes else option
        self._scaler = grad_scaler
        self._sharding = sharding
        self._observes = observes
        self._copies = copies
        if observes and dist.get_rank() == 0:
            log.warning("the sharded model is observed only and reduced densely: %s", observes)

    def pipeline(
        self, group: dist.ProcessGroup, units: tuple[Unit, ...], *, whole: bool = False
    ) -> ShardedPipeline:
        """Return the gradient path.

        Args:
            group: Shard group.
            units: All units.
            whole: Whether parameters are not sharded, so that gradients are all-reduced.
        """
        given, replicated = self._compiled(group, whole)
        parameter = next(self._model.parameters())
        ranks = dist.get_world_size(group)
        self._ranks = ranks
        shards = 1 if replicated else ranks
        self._layout = Layout.of(tuple(unit.slot(shards, parameter.dtype).bucket for unit in units))
        self._plan = Plan(0, 0, self._layout.digest, default=self._option, policy="start")
        self._recorder = WindowRecorder(
            self._layout,
            counters=lambda: counters_of(steps),
            report_seconds=self._config.report_seconds,
        )
        self._recorder.set_plan(self._plan.key)
        groups, means, feedback = [group], (ranks, 1), given.feedback
        if replicated is not None:
            over, replicas = replicated
            groups = [group] if whole else [group, replicas]
            means = (dist.get_world_size(replicas),) * 2
            feedback = over.feedback
        steps = Steps(
            groups=groups,
            means=means,
            device=parameter.device,
            feedback=feedback,
            recorder=self._recorder,
            send_report=lambda report: self._reporter.send(report),
            loss_scale=LossScale(self._scaler),
            warm_up=WarmUp(needed=self._option.skip > 0 and self._sharding.warm_up),
            spoil=lambda: spoil_gradients(self._model),
        )
        whole_job = ranks * (1 if whole else self._copies) == dist.get_world_size()
        device = parameter.device.type
        self._reporter = Reporter(self._config, whole_job, device, self._plan, self._layout)
        self._reporter.step = lambda: steps.number
        self._pipeline = ShardedPipeline(
            given,
            steps,
            self._config.seed,
            epoch_steps=max(self._sharding.weight_refresh_steps, 1),
            replicated=replicated,
        )
        return self._pipeline

    def _compiled(
        self, group: dist.ProcessGroup, whole: bool
    ) -> tuple[ShardedOption, tuple[Given, dist.ProcessGroup] | None]:
        replicas = group if whole else self._sharding.replicas
        if self._observes or replicas is None:
            ranks = dist.get_world_size(group)
            given = compile_sharded(self._option, ranks, self._sharding.feedback)
            if self._sharding.weight_refresh_steps and not given.option.skip:
                raise ConfigError("weight_refresh_steps needs an option that skips")
            return given, None
        return DENSE_SHARDED, (
            compile_option(self._option, dist.get_world_size(replicas)),
            replicas,
        )

    def handle(self, weights: WeightGather | None) -> ShardedHandle:
        """Return the handle."""
        return ShardedHandle(
            config=self._config,
            reporter=self._reporter,
            pipeline=self._pipeline,
            plan=self._plan,
            layout=self._layout,
            world_size=self._ranks,
            observes=self._observes,
            observe=self._recorder.observe,
            weights=weights,
        )


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))
