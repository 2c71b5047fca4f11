"""What is compared: every compressor that loses something, at several settings, and skipping."""

from __future__ import annotations

from dataclasses import dataclass

from gradpilot.protos.messages import DENSE, Option, Setting

QUANTIZERS = ("thc", "int8", "qsgd", "natural", "terngrad", "onebit", "efsignsgd", "signsgd")
"""They send something of every element."""


@dataclass(frozen=True, slots=True)
class Method:
    """One option under a name.

    Attributes:
        name: Shown to people, unique.
        family: Methods that one exponent could serve.
        option: What every step is done with.
    """

    name: str
    family: str
    option: Option

    @property
    def feedback(self) -> bool:
        """Return whether what was not sent waits in a residual."""
        if self.option.skip:
            return self.option.skip_feedback
        return not self.unbiased

    @property
    def unbiased(self) -> bool:
        """Return whether random elements are sent, multiplied so that the mean is right."""
        return Setting("estimate", "unbiased") in self.option.settings

    @property
    def waits(self) -> bool:
        """Return whether it leaves something out, of which the gain tells, and sends it later."""
        return self.feedback and self.option.compressor not in QUANTIZERS


def _of(name: str, collective: str, ratio: float = 1.0, **settings: object) -> Option:
    written = tuple(Setting(key, str(value)) for key, value in sorted(settings.items()))
    return Option(name, ratio, collective, settings=written)


def _ring(skip: int, divisor: str, feedback: bool = False) -> Option:
    return Option(
        collective="ring", skip=skip, divisor=divisor, rotation="random", skip_feedback=feedback
    )


BASELINE = Method("dense", "dense", DENSE)

_SELECTIONS = {
    "topk": (0.1, 0.01, 0.001),
    "lwtopk": (0.1, 0.01, 0.001),
    "mstopk": (0.01,),
    "sidco": (0.1, 0.01),
    "dgc": (0.01,),
}
"""All-gathered, own choice of every rank."""

_SHARED = {
    "topkc": (0.3, 0.1, 0.03, 0.01),
    "chunkunion": (0.3, 0.1, 0.03),
    "countsketch": (0.03, 0.01),
}
"""All-reduced, one choice for all ranks."""

METHODS: tuple[Method, ...] = (
    *(
        Method(f"{name} {ratio:g}", name, _of(name, "allgather", ratio))
        for name, ratios in _SELECTIONS.items()
        for ratio in ratios
    ),
    *(
        Method(f"threshold {t:g}", "threshold", _of("threshold", "allgather", threshold=t))
        for t in (2.0, 4.0)
    ),
    *(
        Method(
            f"artopk {selection} {ratio:g}",
            f"artopk {selection}",
            _of("artopk", "native", ratio, selection=selection),
        )
        for selection, ratios in (("star", (0.1, 0.01, 0.001)), ("var", (0.1, 0.01)))
        for ratio in ratios
    ),
    *(
        Method(f"{name} {ratio:g}", name, _of(name, "native", ratio))
        for name, ratios in _SHARED.items()
        for ratio in ratios
    ),
    *(
        Method(
            f"randomk {estimate} {ratio:g}",
            f"randomk {estimate}",
            _of("randomk", "native", ratio, estimate=estimate),
        )
        for estimate, ratios in (("feedback", (0.3, 0.1, 0.01)), ("unbiased", (0.3, 0.1)))
        for ratio in ratios
    ),
    *(
        Method(
            f"powersgd {step} rank {rank}",
            f"powersgd {step}" if rank > 1 else f"powersgd {step} rank 1",
            _of("powersgd", "native", rank=rank, step=step),
        )
        for step, rank in (("full", 16), ("full", 4), ("full", 1), ("half", 4), ("half", 1))
    ),
    *(Method(f"thc {bits} bits", "thc", _of("thc", "native", bits=bits)) for bits in (4, 3)),
    Method("int8", "int8", _of("int8", "native", exchange="all_reduce")),
    Method("qsgd 7 levels", "qsgd", _of("qsgd", "native", levels=7, norm="max",
                                        exchange="all_reduce")),
    Method("natural", "natural", _of("natural", "allgather")),
    *(
        Method(f"terngrad clip {clip:g}", "terngrad", _of("terngrad", "allgather", clip=clip))
        for clip in (1.5, 2.5)
    ),
    Method("onebit", "onebit", _of("onebit", "allgather")),
    Method("efsignsgd", "efsignsgd", _of("efsignsgd", "allgather")),
    Method("signsgd", "signsgd", _of("signsgd", "allgather", exchange="all_gather")),
    *(
        Method(f"skip {skip} of 4, divisor {divisor}", f"skip {divisor}", _ring(skip, divisor))
        for divisor in ("skip", "drop")
        for skip in (1, 2, 3)
    ),
    *(
        Method(f"skip {skip} of 4, feedback", "skip feedback", _ring(skip, "skip", feedback=True))
        for skip in (1, 2)
    ),
)  # fmt: skip

STRESSED = ("topk 0.001", "artopk star 0.001", "topkc 0.03", "topkc 0.01", "chunkunion 0.03",
            "randomk feedback 0.1", "randomk feedback 0.01", "countsketch 0.01", "lwtopk 0.001",
            "signsgd", "efsignsgd", "terngrad clip 2.5")  # fmt: skip
"""Methods also tried at learning rates too high for them, to see what precedes divergence."""


def named(name: str) -> Method:
    """Return a method.

    Raises:
        KeyError: There is none of that name.
    """
    return {method.name: method for method in (BASELINE, *METHODS)}[name]
