"""How near a lab comes to what is asked, and what that costs; writes ``bench/results/netlab.json``.

    python -m bench.netlab.measure [--output FILE] [--repeats N]

One lab of four hosts, changed live from network to network. For each: every pair of neighbours
alone, then all four links in both directions at once, as a ring of all-reduce uses them. Then what
the delay process can carry at most, and what background traffic costs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench import results_file
from bench.netlab import probes
from bench.netlab.checks import RATE_TOLERANCE, RTT_TOLERANCE, Measured, check, warm_up, wire_share
from bench.netlab.control import Helper
from bench.netlab.lab import Lab
from bench.netlab.link import Link

NETWORKS = ((1000.0, 1.0), (500.0, 1.0), (100.0, 5.0), (50.0, 20.0))
HOSTS = 4
FASTEST_MBIT = 10_000.0
BACKGROUND_MBIT = (100.0, 1000.0)
SECONDS = 1.5
AMONG_OTHERS = 1.0
"""Where acknowledgements queue behind data, TCP may leave slow start early: how much longer it
needs then to fill the link, s."""

NAME = "measure"


def _row(one: Measured) -> dict[str, Any]:
    return {
        "case": "one pair",
        "network": _network(one.asked_mbit, one.asked_rtt_ms),
        "pair": f"{one.source}-{one.target}",
        "asked_mbit": one.asked_mbit,
        "measured_mbit": round(one.measured_mbit, 2),
        "rate_error_percent": round(100 * one.rate_error, 2),
        "asked_rtt_ms": one.asked_rtt_ms,
        "measured_rtt_ms": round(one.measured_rtt_ms, 3),
        "rtt_p90_ms": round(one.rtt_p90_ms, 3),
        "rtt_error_percent": round(100 * one.rtt_error, 2),
        "delay_cpu_percent": round(100 * one.delay_cpu, 1),
    }


def _network(mbit: float, rtt_ms: float) -> str:
    return f"{mbit:g} Mbit/s {rtt_ms:g} ms"


def together(lab: Lab, mbit: float, rtt_ms: float) -> dict[str, Any]:
    """Measure each host sending to the next, all at once."""
    share, delay = wire_share(lab.state().mtu), Helper(lab.name, "delay").process()
    assert delay is not None

    def one(source: int) -> float:
        target = (source + 1) % HOSTS
        where = (lab.namespace(source), lab.namespace(target), lab.address(target))
        return 8e-6 * probes.throughput(*where, SECONDS, AMONG_OTHERS + warm_up(rtt_ms)) / share

    before, begun = delay.cpu_seconds(), time.monotonic()
    with ThreadPoolExecutor(HOSTS) as pool:
        rates = list(pool.map(one, range(HOSTS)))
    spent = (delay.cpu_seconds() - before) / (time.monotonic() - begun)
    return {
        "case": "all links at once, both ways",
        "network": _network(mbit, rtt_ms),
        "asked_mbit": mbit,
        "measured_mbit": [round(rate, 2) for rate in rates],
        "rate_error_percent": round(100 * (min(rates) / mbit - 1), 2),
        "delay_cpu_percent": round(100 * spent, 1),
    }


def most(lab: Lab) -> dict[str, Any]:
    """Measure what goes through the delay process when the rate is no limit."""
    lab.set(rate_mbit=FASTEST_MBIT, rtt_ms=1.0)
    (one,) = check(lab, [(0, 1)], seconds=SECONDS)
    return {**_row(one), "case": "as fast as the delay process can"}


def background(lab: Lab, mbit: float) -> dict[str, Any]:
    """Measure rate and cost of background traffic alone."""
    lab.set(rate_mbit=2 * mbit)
    lab.background(0, 1, mbit)
    process = Helper(lab.name, "background").process()
    assert process is not None
    time.sleep(0.3)
    carried, used, begun = lab.carried(0, 1), process.cpu_seconds(), time.monotonic()
    time.sleep(SECONDS)
    carried, spent = lab.carried(0, 1) - carried, time.monotonic() - begun
    used = process.cpu_seconds() - used
    lab.background(0, 1, 0)
    return {
        "case": "background traffic",
        "asked_mbit": mbit,
        "measured_mbit": round(8e-6 * carried / spent, 2),
        "rate_error_percent": round(100 * (8e-6 * carried / spent / mbit - 1), 2),
        "background_cpu_percent": round(100 * used / spent, 1),
    }


def run(repeats: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Measure everything and return rows and verdicts."""
    rows: list[dict[str, Any]] = []
    verdicts: list[dict[str, Any]] = []
    changes = []
    first = Link(rate_mbit=NETWORKS[-1][0], rtt_ms=NETWORKS[-1][1])
    with Lab(NAME, hosts=HOSTS, link=first, replace=True) as lab:
        for mbit, rtt_ms in NETWORKS:
            begun = time.monotonic()
            lab.set(rate_mbit=mbit, rtt_ms=rtt_ms)
            changes.append(1e3 * (time.monotonic() - begun))
            pairs = [one for _ in range(repeats) for one in check(lab, seconds=SECONDS)]
            rings = [together(lab, mbit, rtt_ms) for _ in range(repeats)]
            rows += [*map(_row, pairs), *rings]
            what = _network(mbit, rtt_ms)
            verdicts += [
                _within(f"rate, {what}", [one.rate_error for one in pairs], RATE_TOLERANCE),
                _within(f"round trip, {what}", [one.rtt_error for one in pairs], RTT_TOLERANCE),
                _within(
                    f"rate with all links busy, {what}",
                    [ring["rate_error_percent"] / 100 for ring in rings],
                    RATE_TOLERANCE,
                ),
            ]
        rows.append(most(lab))
        carried = rows[-1]["measured_mbit"]
        verdicts.append(
            results_file.verdict(
                "what the delay process carries, Mbit/s", ">= 1000", carried, carried >= 1000
            )
        )
        rows += [background(lab, mbit) for mbit in BACKGROUND_MBIT]
        rows.append(
            {
                "case": "live change of rate and round trip of all hosts",
                "median_ms": round(statistics.median(changes), 1),
                "max_ms": round(max(changes), 1),
            }
        )
    return rows, verdicts


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of docs/netlab.md, from the rows of a result file."""
    lines = [
        "| asked for | rate, Mbit/s | round trip, ms | all links busy, Mbit/s "
        "| delay process, one transfer | all links |",
        "|---|---|---|---|---|---|",
    ]
    for network in dict.fromkeys(row["network"] for row in rows if row["case"] == "one pair"):
        ours = [row for row in rows if row.get("network") == network]
        pairs = [row for row in ours if row["case"] == "one pair"]
        rings = [row for row in ours if row["case"] != "one pair"]
        busy = [rate for ring in rings for rate in ring["measured_mbit"]]
        cells = [
            network,
            _span([row["measured_mbit"] for row in pairs], 1),
            _span([row["measured_rtt_ms"] for row in pairs], 2),
            _span(busy, 1),
            *(f"{max(row['delay_cpu_percent'] for row in of):.0f} %" for of in (pairs, rings)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _span(values: Sequence[float], digits: int) -> str:
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def _within(name: str, errors: Sequence[float], tolerance: float) -> dict[str, Any]:
    worst = max(errors, key=abs)
    return results_file.verdict(
        f"{name}: worst error, %",
        f"within {100 * tolerance:g}",
        round(100 * worst, 2),
        abs(worst) <= tolerance,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the result file."""
    parser = argparse.ArgumentParser(prog="python -m bench.netlab.measure", description=__doc__)
    parser.add_argument("--output", type=Path, help="result file (bench/results/netlab.json)")
    parser.add_argument("--repeats", type=int, default=2, help="of each network (%(default)s)")
    options = parser.parse_args(arguments)
    rows, verdicts = run(max(1, options.repeats))
    command = "python -m bench.netlab.measure"
    path = results_file.write("netlab", command, [], rows, verdicts, options.output)
    for one in verdicts:
        word = "ok  " if one["holds"] else "MISS"
        print(f"{word} {one['name']}: {one['measured']} (target {one['target']})")
    print(f"{table(rows)}{path}")


if __name__ == "__main__":
    main()
