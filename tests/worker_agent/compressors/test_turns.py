from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradpilot.worker_agent.compressors._turns import (
    MOST_TURNS_MISSED,
    SKEW_TO_FOLLOW,
    SKEW_TO_TAKE_TURNS,
    Standing,
    first_standing,
    next_source,
    recalled,
    remembered,
)


def norms(skew: float, world_size: int, loud: int = 0) -> list[float]:
    """Return norms of which one has ``skew`` times the energy of each other."""
    return [skew**0.5 if rank == loud else 1.0 for rank in range(world_size)]


def walk(
    standing: Standing, skew: float, world_size: int, steps: int, start: int = 0
) -> tuple[list[int], Standing]:
    sources = []
    for step in range(start, start + steps):
        source, standing = next_source(standing, norms(skew, world_size), step)
        sources.append(source)
    return sources, standing


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("skew", [1.0, 2.0, SKEW_TO_FOLLOW - 0.1])
def test_takes_turns_while_ranks_are_alike(world_size: int, skew: float) -> None:
    sources, standing = walk(first_standing(world_size), skew, world_size, 60)
    assert sources == [step % world_size for step in range(60)]
    assert not standing.following
    assert max(standing.ages) == world_size - 1


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_follows_the_loudest_once_it_has_been_loud_for_a_while(world_size: int) -> None:
    sources, standing = walk(first_standing(world_size), 50.0, world_size, 80)
    begun = next(i for i in range(80) if set(sources[i : i + 3]) == {0})
    assert 3 <= begun <= 40  # one loud step is not enough
    assert standing.following
    assert sources[begun:].count(0) > 0.6 * (80 - begun)


def test_one_loud_step_changes_nothing() -> None:
    _, standing = walk(first_standing(4), 1.0, 4, 10)
    source, standing = next_source(standing, norms(1e6, 4), 10)
    assert source == 10 % 4
    assert not standing.following


def test_the_skew_is_that_of_energies() -> None:
    assert first_standing(1).skew == 1.0
    assert first_standing(4).skew == pytest.approx(1.0)
    _, standing = walk(first_standing(4), 9.0, 4, 200)
    assert standing.skew == pytest.approx(9.0, rel=1e-3)
    assert sum(standing.shares) == pytest.approx(1.0)
    assert Standing((1.0, 0.0), (0, 0), following=True).skew == float("inf")


def test_does_not_switch_to_and_fro_between_the_bounds() -> None:
    between = (SKEW_TO_FOLLOW + SKEW_TO_TAKE_TURNS) / 2
    _, quiet = walk(first_standing(4), between, 4, 200)
    assert not quiet.following
    _, loud = walk(first_standing(4), 2 * SKEW_TO_FOLLOW, 4, 200)
    _, loud = walk(loud, between, 4, 200, start=200)
    assert loud.following
    _, loud = walk(loud, SKEW_TO_TAKE_TURNS - 0.5, 4, 200, start=400)
    assert not loud.following


def test_follows_the_rank_that_is_loudest_now() -> None:
    _, standing = walk(first_standing(4), 50.0, 4, 100)
    assert standing.following
    standing = Standing(standing.shares, (0, 1, 2, 3), following=True)
    assert next_source(standing, norms(50.0, 4, loud=2), 100)[0] == 2
    assert next_source(standing, [1.0] * 4, 101)[0] == 0  # the first of equal ones


def test_serves_the_rank_that_waited_longest() -> None:
    standing = Standing((0.97, 0.01, 0.01, 0.01), (0, 16, 17, 3), following=True)
    source, standing = next_source(standing, norms(100.0, 4), 0)
    assert (source, standing.ages) == (2, (1, 17, 0, 4))
    source, standing = next_source(standing, norms(100.0, 4), 1)
    assert (source, standing.ages) == (1, (2, 0, 1, 5))
    assert next_source(standing, norms(100.0, 4), 2)[0] == 0


@settings(deadline=None, max_examples=60)
@given(world_size=st.integers(1, 6), data=st.data())
def test_ages_count_the_steps_since_a_rank_was_the_source(
    world_size: int, data: st.DataObject
) -> None:
    loudness = st.lists(
        st.sampled_from([0.0, 1e-30, 1.0, 5.0, 3e38]), min_size=world_size, max_size=world_size
    )
    standing, last = first_standing(world_size), [-1] * world_size
    given_norms = data.draw(loudness)
    for step in range(60):
        if step % 20 == 19:
            given_norms = data.draw(loudness)
        source, standing = next_source(standing, given_norms, step)
        last[source] = step
        assert standing.ages == tuple(step - before for before in last)
        assert max(standing.ages) < (MOST_TURNS_MISSED + 1) * world_size
        assert sum(standing.shares) == pytest.approx(1.0)


def test_a_memory_gives_the_standing_back() -> None:
    _, standing = walk(first_standing(3), 50.0, 3, 33)
    assert recalled(remembered(standing), 3) == standing
    assert recalled({}, 3) == first_standing(3)


def test_a_memory_of_so_many_other_ranks_is_of_no_use() -> None:
    _, standing = walk(first_standing(3), 50.0, 3, 33)
    assert recalled(remembered(standing), 4) == first_standing(4)


def test_a_memory_is_small_and_on_the_host() -> None:
    memory = remembered(first_standing(1024))
    assert sum(t.nbytes for t in memory.values()) < 20_000
    assert all(t.device == torch.device("cpu") for t in memory.values())
