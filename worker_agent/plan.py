"""The plan in force, compiled: which compressor each bucket gets, and which path the step takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gradpilot.errors import ConfigError
from gradpilot.protos.messages import BF16, Option, Plan, check_option
from gradpilot.worker_agent.collectives.base import SCHEDULES
from gradpilot.worker_agent.collectives.hierarchical import Hierarchical
from gradpilot.worker_agent.compressors.base import Compressor, create
from gradpilot.worker_agent.memory import owner_of
from gradpilot.worker_agent.nodes import Nodes


@dataclass(frozen=True, slots=True)
class Given:
    """An option with the compressor that carries it out.

    Attributes:
        option: The option.
        compressor: Made from it.
        feedback: Whether a residual is kept: always, but for what is sent whole.
        owner: Who may read what the compressor remembers of a bucket.
    """

    option: Option
    compressor: Compressor
    feedback: bool
    owner: str


def compile_option(option: Option, world_size: int, nodes: Nodes | None = None) -> Given:
    """Return what carries an option out.

    Args:
        option: The option.
        world_size: Ranks N.
        nodes: Nodes by rank, for ``hierarchical``; None for one node of all ranks.

    Raises:
        ConfigError: The option cannot be used here; the message says why.
    """
    check_option(option, world_size)
    inner = compressor = create(option)
    if option.collective == "hierarchical":
        compressor = Hierarchical(inner=inner, nodes=nodes or Nodes((0,) * world_size))
    else:
        inner.check(world_size, option.collective)
    if option.skip:
        most = SCHEDULES.get(option.collective).most_skipped(world_size)
        if option.skip > most:
            raise ConfigError(
                f"{option.collective} can skip at most {most} steps with {world_size} ranks,"
                f" got {option.skip}"
            )
    keeps_omitted = option.skip > 0 and option.skip_feedback
    feedback = keeps_omitted or not inner.lossless
    return Given(option, compressor, feedback, owner_of(option))


class ActivePlan:
    """A plan ready to be carried out.

    Args:
        plan: A plan all of whose options can be used here.
        world_size: Ranks N.
        device: Type of the device that holds the gradients.
        nodes: See ``compile_option``.

    Raises:
        ConfigError: An option cannot be used.
    """

    def __init__(
        self, plan: Plan, world_size: int, device: str = "cpu", nodes: Nodes | None = None
    ) -> None:
        if plan.interval < 1:
            raise ConfigError(f"plan interval must be at least 1 step, got {plan.interval}")
        compiled: dict[Option, Given] = {}

        def given(option: Option) -> Given:
            if option not in compiled:
                compiled[option] = compile_option(option, world_size, nodes)
            return compiled[option]

        self.plan = plan
        self._default = given(plan.default)
        self._assigned = {a.bucket: given(a.option) for a in plan.assignments}
        self.feedback = any(g.feedback for g in compiled.values())
        """Whether any bucket keeps a residual."""
        self.native = all(
            g.option.collective == "native"
            and g.compressor.single_round
            # On CUDA the finite check of a residual would stall the stream that calls back.
            and (device == "cpu" or not g.feedback)
            for g in compiled.values()
        )
        """Whether every bucket is one all-reduce of the backend, so that no thread is needed.

        It depends on the plan alone, so all ranks take the same path.
        """
        self.in_place = self.native and all(g.option == Option() for g in compiled.values())
        """Whether, moreover, every bucket is averaged where it lies, in its own dtype."""

    def given(self, fingerprint: str) -> Given:
        """Return what the bucket with this fingerprint gets."""
        return self._assigned.get(fingerprint, self._default)


def safe_plan(plan: Plan) -> Plan:
    """Return what the ranks fall back to without a controller: bf16 all-reduce everywhere.

    Its term and id stay those of the plan that it replaces, so that any plan of a returning
    controller is newer.
    """
    return replace(
        plan,
        assignments=(),
        default=BF16,
        policy="safe",
        reason="no controller for longer than the plan's time to live",
    )
