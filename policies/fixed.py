"""The policy that never decides: one option for all buckets."""

from __future__ import annotations

from typing import ClassVar

from gradpilot.errors import ConfigError
from gradpilot.policies.base import POLICIES, Inputs, Outcome
from gradpilot.policies.link import fit_link
from gradpilot.policies.options import current_options
from gradpilot.protos.messages import check_option


@POLICIES.register("fixed")
class Fixed:
    """Give every bucket ``settings.fixed``: baseline, fallback and test double."""

    source: ClassVar[str] = "this project"
    grain: ClassVar[str] = "uniform"
    uses: ClassVar[tuple[str, ...]] = ()

    def decide(self, inputs: Inputs) -> Outcome:
        """Return a switch to the fixed option unless it is in force or cannot be used."""
        option = inputs.settings.fixed
        link = fit_link(inputs.operations, inputs.world_size, inputs.backend, inputs.link)
        try:
            check_option(option, inputs.world_size)
        except ConfigError as error:
            return Outcome("keep", f"fixed option refused: {error}", link=link)
        if not inputs.layout.buckets:
            return Outcome("keep", "the layout has no buckets yet", link=link)
        able = [f for f in inputs.families if (f.compressor, f.settings) == option.family]
        if inputs.families and not any(option.collective in f.collectives for f in able):
            return Outcome("keep", f"the agents cannot do {option.label}", link=link)
        wanted = (option,) * len(inputs.layout.buckets)
        if current_options(inputs) == wanted:
            return Outcome("keep", f"{option.label} is fixed and in force", link=link)
        return Outcome("switch", f"{option.label} is fixed", options=wanted, link=link)
