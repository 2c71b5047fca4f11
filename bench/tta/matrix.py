"""Which rows there are, in which order, and how people name them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from bench.tta.methods import METHODS
from bench.tta.networks import NETWORKS, SEEDS
from bench.tta.tasks import TASKS

FIELDS = ("task", "network", "method", "seed")

QUICK_STEPS = 60
"""Of ``quick``, whose seed 1 meets C1 from its second phase on, the first slow one: a training of
so few steps does not get to another, but to decisions and switches."""


@dataclass(frozen=True, slots=True, order=True)
class Row:
    """One training.

    Attributes:
        task: One of ``TASKS``.
        network: One of ``NETWORKS``.
        method: One of ``METHODS``.
        seed: Seed of parameters, batches and compressors, and of where a schedule begins.
        ranks: Ranks N, a host each.
        steps: Steps.
    """

    task: str
    network: str
    method: str
    seed: int
    ranks: int
    steps: int

    @property
    def id(self) -> str:
        """Return how people name it; ranks and steps are the same throughout a matrix."""
        return f"{self.task}/{self.network}/{self.method}/{self.seed}"

    @property
    def file(self) -> str:
        """Return the name of the file that keeps it."""
        text = f"{self.task}-{self.ranks}x{self.steps}.{self.network}.{self.method}.{self.seed}"
        return f"{text}.json"

    @property
    def block(self) -> tuple[str, str, int]:
        """Return what rows that are compared with each other have in common."""
        return (self.task, self.network, self.seed)


_MAIN = ("fp32", "bf16", "powersgd", "topk", "topkc", "skip", "adaptive", "oracle")
_CONSTANT = tuple(name for name, network in NETWORKS.items() if not network.changing)
_CHANGING = tuple(name for name, network in NETWORKS.items() if network.changing)
_TELLING = ("100mbit-5ms", "c1")
_EXTRA = ("slow-link",)
_OTHERS = tuple(name for name in (*_CHANGING, *_CONSTANT) if name not in (*_TELLING, *_EXTRA))
_TASKS = ("cnn", "transformer")

Part = tuple[Sequence[str], Sequence[str], Sequence[str], Sequence[int]]

MATRICES: dict[str, tuple[Part, ...]] = {
    "quick": ((("cnn",), _TELLING, ("bf16", "topk", "adaptive"), (1,)),),
    # Seed 1 first: it meets C1 from a slow phase on.
    "required": (
        (_TASKS, _TELLING, _MAIN, (1,)),
        (_TASKS, _OTHERS, _MAIN, (1,)),
        (_TASKS, _TELLING, _MAIN, (0,)),
        (_TASKS, _OTHERS, _MAIN, (0,)),
        (_TASKS, _CHANGING, _MAIN, (2,)),
    ),
    "rest": (
        (("cnn",), _EXTRA, _MAIN, (1,)),
        (("mlp",), _TELLING, _MAIN, (0,)),
        (
            ("cnn",),
            _TELLING,
            tuple(name for name in METHODS if name not in _MAIN),
            (0,),
        ),
    ),
    "all": ((tuple(TASKS), tuple(NETWORKS), tuple(METHODS), range(SEEDS)),),
}
"""Tasks, networks, methods and seeds of every part.

``required`` is more than four hours, by how much tells ``--list``: what a row needs beside its
training (a lab, processes, evaluations) takes more than half of that by itself. So it is in an
order in which whatever has been made is a result: both tasks on the two most telling networks, on
all others, and then once more with other seeds. About four hours hold one seed of everything and a
second one of the most telling networks.
"""


def rows(matrix: str, pattern: str = "*", ranks: int = 4, steps: int = 0) -> list[Row]:
    """Return the rows of a matrix in the order in which they run.

    Rows of one task, network and seed run one after another, so that whatever the machine does
    besides meets all methods of a comparison alike; which of them begins changes with the seed. The
    oracle is last: it needs the others.

    Args:
        matrix: One of ``MATRICES``.
        pattern: ``task/network/method/seed``; each a list of shell patterns with commas between,
            and what is left out at the end means all.
        ranks: Ranks N.
        steps: Steps; 0 for what the task asks for, in ``quick`` for ``QUICK_STEPS``.

    Raises:
        ValueError: The pattern has too many parts, or a part that fits nothing.
    """
    parts = MATRICES[matrix]
    wanted = _split(pattern)
    found: dict[Row, None] = {}
    for tasks, networks, methods, seeds in parts:
        for seed in seeds:
            for task in tasks:
                for network in networks:
                    for method in _turned(methods, seed):
                        own = QUICK_STEPS if matrix == "quick" else TASKS[task].steps
                        row = Row(task, network, method, seed, ranks, steps or own)
                        if _fits(row, wanted):
                            found[row] = None
    if not found:
        raise ValueError(f"no row of matrix {matrix!r} fits {pattern!r}; see --list")
    return list(found)


def blocks(rows: Iterable[Row]) -> dict[tuple[str, str, int], list[Row]]:
    """Return rows by what is compared with each other."""
    found: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        found.setdefault(row.block, []).append(row)
    return found


def _turned(methods: Sequence[str], seed: int) -> list[str]:
    others = [name for name in methods if name != "oracle"]
    turn = seed % max(len(others), 1)
    return [*others[turn:], *others[:turn], *(name for name in methods if name == "oracle")]


def _split(pattern: str) -> list[list[str]]:
    parts = [part.split(",") for part in pattern.split("/")]
    if len(parts) > len(FIELDS):
        raise ValueError(f"a pattern is {'/'.join(FIELDS)}, got {pattern!r}")
    known = ([*TASKS], [*NETWORKS], [*METHODS], [str(seed) for seed in range(SEEDS)])
    for part, names, field in zip(parts, known, FIELDS, strict=False):
        for one in part:
            if not any(fnmatchcase(name, one) for name in names):
                raise ValueError(f"no {field} fits {one!r}; there are {', '.join(names)}")
    return parts


def _fits(row: Row, wanted: Sequence[Sequence[str]]) -> bool:
    values = row.id.split("/")
    return all(
        any(fnmatchcase(value, one) for one in part)
        for value, part in zip(values, wanted, strict=False)
    )
