"""What a collective costs: affine in latency and in the time to push its bytes.

Letters: N ranks, L = log2 N, alpha one-way latency of a message (s), beta time to push one byte
(s), M bytes of a message (those that *one* rank hands in, of an all-gather its part, of a
reduce-scatter and an all-to-all all N parts), c kept fraction, S skipped reduce steps.

Three tables, one per backend:

* ``model``: the alpha-beta models of Tyagi & Swany, *Flexible Communication* (IEEE BigData 2023),
  Table I; used to reproduce their results.
* ``gloo``: what torch's gloo really shows on links of 50 Mbit/s to 1 Gbit/s with 0 to 20 ms
  round trip, N = 4 and 8. Every step pays a full round trip because the receiver must announce
  itself first; the sends of one rank in a broadcast share its uplink.
* ``nccl``: textbook ring forms; not measured here.

Our own all-reduces (``ring``, ``halving_doubling``, ``tree``) run the same steps on any backend.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from gradpilot.errors import ConfigError
from gradpilot.policies.skipping import SKIPPING, contributions, most_skipped
from gradpilot.protos.messages import COLLECTIVES

BACKENDS: tuple[str, ...] = ("gloo", "nccl", "model")


OWN_BROADCAST = "scatter_broadcast"

AT_ONCE = {"gloo": 2}
"""Collectives of one group that a backend works on at a time: gloo has two threads a device. On
others, such as NCCL, they follow one another in the order of a stream."""


def at_once(backend: str) -> int:
    """Return how many collectives of one group a backend works on at a time."""
    return AT_ONCE.get(backend, 1)


class Affine(NamedTuple):
    """Seconds = ``alphas`` * alpha + ``payloads`` * M * beta."""

    alphas: float
    payloads: float

    def seconds(self, alpha: float, beta: float, size: float) -> float:
        """Return the seconds for a payload of ``size`` bytes."""
        return self.alphas * alpha + self.payloads * size * beta

    def __add__(self, other: object) -> Affine:
        """Return the cost of one after the other, for the same payload size."""
        if not isinstance(other, Affine):
            return NotImplemented
        return Affine(self.alphas + other.alphas, self.payloads + other.payloads)


NOTHING = Affine(0.0, 0.0)


# --- textbook forms ------------------------------------------------------------------------------


def parameter_server(n: int) -> Affine:
    """Star: everybody sends to one and receives from it; its link carries 2(N-1) M."""
    return Affine(2.0, 2.0 * (n - 1)) if n > 1 else NOTHING


def ring_all_reduce(n: int, skip: int = 0) -> Affine:
    """Ring reduce-scatter without its first ``skip`` steps, then ring all-gather; M / N slices."""
    if n < 2:
        return NOTHING
    steps = 2 * (n - 1) - _clamped("ring", n, skip)
    return Affine(float(steps), steps / n)


def tree_all_reduce(n: int) -> Affine:
    """Reduce up a binary tree and broadcast down, whole message at every level (the paper's)."""
    levels = math.log2(n) if n > 1 else 0.0
    return Affine(2 * levels, 2 * levels)


def double_tree_all_reduce(n: int) -> Affine:
    """Pipelined double binary tree, NCCL's "Tree": about two messages whatever N; fill ignored."""
    return Affine(2 * math.log2(n), 2.0) if n > 1 else NOTHING


def halving_doubling_all_reduce(n: int, skip: int = 0) -> Affine:
    """Recursive halving without its first ``skip`` steps, then doubling.

    If N is no power of 2, nothing is skipped, and one exchange of M comes before and after.
    """
    if n < 2:
        return NOTHING
    skip = _clamped("halving_doubling", n, skip)
    core = 1 << (n.bit_length() - 1)
    extra = 0 if core == n else 2
    halved = 0.5**skip - 1 / core
    return Affine(2 * math.log2(core) - skip + extra, halved + (core - 1) / core + extra)


def rotated_trees_all_reduce(n: int, skip: int = 0) -> Affine:
    """A binomial tree per slice of M / N without its lowest ``skip`` levels, up and down.

    The trees are rotated against each other, so that all ranks are equally busy at every level.
    """
    if n < 2:
        return NOTHING
    skip = _clamped("tree", n, skip)
    up = contributions("tree", n, skip) - 1
    return Affine(2.0 * math.ceil(math.log2(n)) - skip, (up + n - 1) / n)


def ring_reduce_scatter(n: int) -> Affine:
    """The first half of a ring all-reduce; a pairwise all-to-all costs the same."""
    return Affine(float(n - 1), (n - 1) / n) if n > 1 else NOTHING


def ring_all_gather(n: int) -> Affine:
    """Everybody's M bytes travel once around the ring."""
    return Affine(float(n - 1), float(n - 1)) if n > 1 else NOTHING


def log_all_gather(n: int) -> Affine:
    """The paper's form: recursive doubling, L messages, but the same bytes."""
    return Affine(math.log2(n), float(n - 1)) if n > 1 else NOTHING


def tree_broadcast(n: int) -> Affine:
    """Binary tree, L levels one after another."""
    levels = math.log2(n) if n > 1 else 0.0
    return Affine(levels, levels)


def scatter_broadcast(n: int) -> Affine:
    """Scatter, then all-gather: better than a tree for long messages."""
    return Affine(math.log2(n) + n - 1, 2 * (n - 1) / n) if n > 1 else NOTHING


def direct_scatter_broadcast(n: int) -> Affine:
    """Ours: all slices straight from the source at once, then an all-gather around a ring.

    The source waits for nothing, so a slice is N - 1 messages from the rank that gets it last.
    """
    return Affine(float(n - 1), 2 * (n - 1) / n) if n > 1 else NOTHING


def carried_by(request: str, collective: str) -> str:
    """Return the operation that carries a request under an option.

    Who carries all-reduces by messages of our own carries broadcasts so, too.

    Args:
        request: One of ``messages.REQUESTS``.
        collective: ``Option.collective``.
    """
    if collective not in SKIPPING:
        return request
    return {"all_reduce": collective, "broadcast": OWN_BROADCAST}.get(request, request)


def _clamped(collective: str, n: int, skip: int) -> int:
    return min(max(skip, 0), most_skipped(collective, n))


# --- tables per backend --------------------------------------------------------------------------


def _own(collective: str, n: int, skip: int) -> Affine:
    """Return the cost of an all-reduce or the broadcast of our own, a message per step."""
    if collective == OWN_BROADCAST:
        return direct_scatter_broadcast(n)
    forms = {
        "ring": ring_all_reduce,
        "halving_doubling": halving_doubling_all_reduce,
        "tree": rotated_trees_all_reduce,
    }
    return forms[collective](n, skip)


def _model(collective: str, n: int, skip: int) -> Affine:
    if collective in (*SKIPPING, OWN_BROADCAST):
        return _own(collective, n, skip)
    forms = {
        "all_reduce": ring_all_reduce(n),
        "all_gather": log_all_gather(n),
        "broadcast": tree_broadcast(n),
        # Not in the paper: textbook.
        "reduce_scatter": ring_reduce_scatter(n),
        "all_to_all": ring_reduce_scatter(n),
    }
    return forms[collective]


def _nccl(collective: str, n: int, skip: int) -> Affine:
    if collective in (*SKIPPING, OWN_BROADCAST):
        return _own(collective, n, skip)
    forms = {
        "all_reduce": ring_all_reduce(n),
        "all_gather": ring_all_gather(n),
        "broadcast": Affine(float(n - 1), 1.0),  # pipelined chain
        "reduce_scatter": ring_reduce_scatter(n),
        "all_to_all": ring_reduce_scatter(n),
    }
    return forms[collective]


def _gloo(collective: str, n: int, skip: int) -> Affine:
    if collective in (*SKIPPING, OWN_BROADCAST):
        # They post their receives early, so a step costs alpha, and one alpha once. Measured for
        # the ring; the others go the same way.
        steps, payloads = _own(collective, n, skip)
        return Affine(steps + 1.0, payloads)
    levels = math.ceil(math.log2(n))
    forms = {
        # Within 8 % of 23 of 24 measured cells with RTT >= 1 ms and M >= 1 MB.
        "all_reduce": Affine(4.0 * (n - 1), 2 * (n - 1) / n),
        # Same rendezvous: measured 1.3 - 3 alpha a step below 4 MB.
        "all_gather": Affine(2.0 * (n - 1), float(n - 1)),
        # Binomial tree, measured 2.7 M/B at N = 4 and 6.0 M/B at N = 8.
        "broadcast": Affine(2.0 * levels, levels * (levels + 1) / 2),
        # An all-reduce of which each rank keeps its part, by the bytes seen on the wire: 2 (N - 1)
        # / N of the payload at N = 2 and 4. Its time was not measured.
        "reduce_scatter": Affine(4.0 * (n - 1), 2 * (n - 1) / n),
        # Bytes as seen on the wire, textbook steps with a rendezvous each. Not measured.
        "all_to_all": Affine(2.0 * (n - 1), (n - 1) / n),
    }
    return forms[collective]


_TABLES = {"gloo": _gloo, "nccl": _nccl, "model": _model}


@lru_cache(maxsize=4096)
def coefficients(
    collective: str, n_ranks: int, skip: int = 0, backend: str = "gloo"
) -> tuple[float, float]:
    """Return ``(a, b)``: a collective takes ``a * alpha + b * bytes * beta`` seconds.

    Args:
        collective: One of ``messages.COLLECTIVES``.
        n_ranks: Ranks N; one rank or none costs nothing.
        skip: Reduce steps left out of an all-reduce of our own, clamped to what it can skip.
        backend: Name of a table; a backend without one gets NCCL's, the textbook ring forms.

    Raises:
        ConfigError: No such collective.
    """
    if collective not in COLLECTIVES:
        raise ConfigError(f"unknown collective {collective!r}; known: {', '.join(COLLECTIVES)}")
    if n_ranks < 2:
        return (0.0, 0.0)
    cost = _TABLES.get(backend, _nccl)(collective, n_ranks, skip)
    return (cost.alphas, cost.payloads)


# --- the paper's choice between all-gather and AR-Topk -------------------------------------------
#
# All three carry k values and k indices of 4 bytes; the payload unit is the *values*, M c bytes.


def sparse_all_gather(n: int) -> Affine:
    """Values and indices through all-gather: alpha L + 2 M c beta (N - 1)."""
    form = log_all_gather(n)
    return Affine(form.alphas, 2 * form.payloads)


def art_ring(n: int) -> Affine:
    """AR-Topk: broadcast of the indices, ring all-reduce of the values."""
    return tree_broadcast(n) + ring_all_reduce(n)


def art_tree(n: int) -> Affine:
    """AR-Topk: broadcast of the indices, tree all-reduce of the values."""
    return tree_broadcast(n) + tree_all_reduce(n)


SPARSE = {"all_gather": sparse_all_gather, "art_ring": art_ring, "art_tree": art_tree}


class Thresholds(NamedTuple):
    """Bounds on x = alpha / (M c beta), latency over the time to push the kept values once.

    Each says: the first is faster than the second iff x is below.
    """

    ring_tree: float
    ring_gather: float
    tree_gather: float


@lru_cache(maxsize=1024)
def thresholds(n: int) -> Thresholds:
    """Return where the winner among all-gather, AR-Topk ring and AR-Topk tree changes.

    Args:
        n: Ranks N, at least 2.
    """
    levels = math.log2(n)
    latency_gap = (n - 1) - levels
    return Thresholds(
        ring_tree=(levels - (n - 1) / n) / latency_gap if latency_gap > 0 else math.inf,
        ring_gather=1 - 1 / n - levels / (2 * (n - 1)),
        tree_gather=(n - 1) / levels - 1.5,
    )


def cheapest_sparse(n: int, alpha: float, beta: float, value_bytes: float) -> str:
    """Return ``all_gather``, ``art_ring`` or ``art_tree``, by the thresholds alone."""
    push = value_bytes * beta
    at = thresholds(n)
    ring_tree = alpha < at.ring_tree * push
    ring_gather = alpha < at.ring_gather * push
    tree_gather = alpha < at.tree_gather * push
    if ring_tree and ring_gather:
        return "art_ring"
    if tree_gather and not ring_tree:
        return "art_tree"
    return "all_gather"
