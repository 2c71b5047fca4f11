"""What docs/netlab.md tells of measurements: a table and a paragraph."""

from __future__ import annotations

from bench.report.results import Result, Row, table
from bench.report.section import wrapped

ONE, ALL = "one pair", "all links at once, both ways"
FASTEST = "as fast as the delay process can"

INTRODUCTION = """
[netlab.json](../bench/results/netlab.json), measured on {day} with {cpus} cores that also did
other work. Least and greatest of {pairs} pairs, or of {transfers} transfers with every link busy
both ways (where acknowledgements take up to a hundredth); processor time is the most that was
seen, of one core:
"""

WORDS = """
At a limit of {limit:g} Gbit/s one transfer reached {reached:.1f}, with {cpu:.0f} % of a core:
more than that the delay process cannot carry, all hosts together. Background traffic took
{background}. A change of rate and round trip of all hosts takes {change:.0f} ms, {slowest:.0f} at
most.
"""


def block(result: Result) -> str:
    """Return the paragraphs and the table.

    Args:
        result: ``netlab.json``.
    """
    networks = list(dict.fromkeys(row["network"] for row in result.rows(case=ONE)))
    fastest = result.row(case=FASTEST)
    change = result.row(case="live change of rate and round trip of all hosts")
    background = " and ".join(
        f"{row['background_cpu_percent']:.0f} % of a core at {row['asked_mbit']:g} Mbit/s"
        for row in result.rows(case="background traffic")
    )
    first = networks[0]
    introduction = INTRODUCTION.format(
        day=result.document["created"][:10],
        cpus=result.document["machine"]["cpus"],
        pairs=len(result.rows(case=ONE, network=first)),
        transfers=len(_busy(result, first)),
    )
    words = WORDS.format(
        limit=fastest["asked_mbit"] / 1e3,
        reached=fastest["measured_mbit"] / 1e3,
        cpu=fastest["delay_cpu_percent"],
        background=background,
        change=change["median_ms"],
        slowest=change["max_ms"],
    )
    head = ("asked for", "rate, Mbit/s", "round trip, ms", "all links busy, Mbit/s")
    lines = table(
        (*head, "delay process, one transfer", "all links"),
        [_line(result, network) for network in networks],
    )
    return "\n\n".join(
        (wrapped(introduction.strip()).strip(), lines, wrapped(words.strip()).strip())
    )


def _line(result: Result, network: str) -> tuple[str, ...]:
    pairs = result.rows(case=ONE, network=network)
    return (
        network,
        _span([row["measured_mbit"] for row in pairs], 1),
        _span([row["measured_rtt_ms"] for row in pairs], 2),
        _span(_busy(result, network), 1),
        _most(pairs),
        _most(result.rows(case=ALL, network=network)),
    )


def _busy(result: Result, network: str) -> list[float]:
    return [r for row in result.rows(case=ALL, network=network) for r in row["measured_mbit"]]


def _span(values: list[float], digits: int) -> str:
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def _most(rows: list[Row]) -> str:
    return f"{max(row['delay_cpu_percent'] for row in rows):.0f} %"
