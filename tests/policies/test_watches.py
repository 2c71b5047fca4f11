from __future__ import annotations

import math

from gradpilot.policies.history import History
from gradpilot.policies.watches import Ban, Look, Overflow, Regime, ResidualTrend, Trial
from gradpilot.protos.jsoncodec import from_json, to_json
from gradpilot.protos.messages import BF16, DENSE, Setting


def test_what_guards_remember_survives_the_store() -> None:
    settings = (Setting("selection", "star"),)
    history = History(
        look=Look((BF16,), 7, (0.1, 0.2, 0.03), (9.0, 0.2, 0.03)),
        trial=Trial((DENSE,), (BF16, DENSE), 9, 0.5, 1.0, 0.1, 0.0, (1.0, math.inf), 1, 0, 1),
        bans=(Ban("artopk", settings, 0.01, "ring", 0, "cost", 5, 1005, 2, 1e-3, 8e-9),),
        overflow=Overflow(3, 1, 2, -1, 4),
        residuals=ResidualTrend((1.0, 2.0), 0.5, 0.6, 1, 0),
        regime=Regime(0.1, 0.9, 1, (1.0, 2.0)),
    )
    assert from_json(History, to_json(history)) == history
    assert from_json(History, to_json(History())).trial is None
    assert math.isnan(from_json(Regime, to_json(Regime())).lr)
