"""Who carries the gradients: PyTorch's own ways, one option all the time, or a policy."""

from __future__ import annotations

from dataclasses import dataclass

from gradpilot.policies.base import PolicySettings
from gradpilot.protos.messages import DENSE, Option
from gradpilot.protos.option_text import parse_option

BUCKET_MB = 1.0
"""DDP's bucket size for all methods: small enough that a model of 3 MB has several."""

ONE_BUCKET_MB = 1000.0


@dataclass(frozen=True, slots=True)
class Method:
    """A way to carry gradients.

    Attributes:
        name: Key in ``METHODS``.
        what: One line for people.
        kind: ``torch`` (without gradpilot), ``static`` (one option, no controller), ``policy`` (a
            controller decides) or ``oracle`` (told which option is best when).
        option: Of ``static``, with ``{half}`` for half of the ranks.
        hook: Of ``torch``: ``none``, ``fp16`` or ``powersgd``.
        policy: Of ``policy``.
        arguments: Further arguments of the controller.
        bucket_mb: Bucket size.
    """

    name: str
    what: str
    kind: str
    option: str = ""
    hook: str = ""
    policy: str = ""
    arguments: tuple[str, ...] = ()
    bucket_mb: float = BUCKET_MB

    @property
    def readable(self) -> bool:
        """Return whether one can ask what it holds back; only then can its sums be checked."""
        return self.hook != "powersgd"

    def start(self, ranks: int) -> Option:
        """Return the option that a run begins with; an oracle's is in its orders."""
        if self.kind == "static":
            return parse_option(self.option.format(half=ranks // 2))
        return DENSE

    def equals(self, ranks: int) -> Option | None:
        """Return the option that does all the time what this does; None if none does."""
        if self.kind == "static":
            return self.start(ranks)
        return DENSE if self.hook == "none" else None


def _static(name: str, option: str, what: str) -> Method:
    return Method(name, what, "static", option)


def _policy(name: str, what: str, collectives: tuple[str, ...] = ()) -> Method:
    arguments: tuple[str, ...] = ()
    if collectives:
        every = (*PolicySettings().collectives, *collectives)
        listed = ",".join(f'"{one}"' for one in every)
        arguments = ("--policy-settings.collectives", f"[{listed}]")
    return Method(name, what, "policy", policy=name, arguments=arguments)


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("fp32", "DistributedDataParallel as it is", "torch", hook="none"),
        Method("fp16-hook", "PyTorch's fp16_compress_hook", "torch", hook="fp16"),
        _static("bf16", "bf16", "all-reduce in bf16 (PyTorch's hook refuses gloo)"),
        _static("powersgd", "powersgd rank=4", "PowerSGD, rank 4"),
        _static("powersgd-1", "powersgd rank=1", "PowerSGD, rank 1"),
        _static("topk", "topk ratio=0.01 collective=allgather", "top-k 1 %, all-gather"),
        _static("artopk", "artopk ratio=0.01 selection=star", "AR-Topk STAR 1 %"),
        _static("topkc", "topkc ratio=0.1", "TopKC 10 %"),
        _static("skip", "none collective=ring skip={half}", "SkipReduce, half of the ranks' steps"),
        Method(
            "torch-powersgd",
            "PyTorch's PowerSGD hook, rank 4, in one bucket",
            "torch",
            hook="powersgd",
            bucket_mb=ONE_BUCKET_MB,
        ),
        _policy("flexible", "after Tyagi and Swany, Flexible Communication", ("tree",)),
        _policy("gravac", "after GraVAC"),
        _policy("kimad", "after Kimad"),
        _policy("accordion", "after Accordion"),
        _policy("adaptive", "gradpilot's own policy, with the controller's defaults"),
        Method(
            "oracle",
            "is told the best static option of every phase",
            "oracle",
            policy="fixed",
            # It takes no decisions but follows orders, at most five steps later.
            arguments=("--policy-settings.interval", "5", "--min-decision-seconds", "3600"),
        ),
    )
}
"""By name."""
