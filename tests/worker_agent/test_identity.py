from __future__ import annotations

import random

import pytest

import gradpilot
from gradpilot.protos.messages import PROTOCOL_VERSION, Plan
from gradpilot.protos.validate import validate_hello
from gradpilot.worker_agent.identity import Job, Place, hello, place, propose

ENTROPY = bytes(range(8))
ALL = {
    "GRADPILOT_RUN": "mine",
    "SLURM_JOB_ID": "42",
    "TORCHELASTIC_RUN_ID": "rdzv",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


@pytest.mark.parametrize(
    ("run", "missing", "expected", "source"),
    [
        ("given", (), "given", "argument"),
        ("", (), "mine", "GRADPILOT_RUN"),
        ("", ("GRADPILOT_RUN",), "slurm-42", "SLURM_JOB_ID"),
        ("", ("GRADPILOT_RUN", "SLURM_JOB_ID"), "rdzv", "TORCHELASTIC_RUN_ID"),
        ("", tuple(ALL), "run-0304050607", "random"),
    ],
)
def test_the_run_id_is_the_first_that_is_known(
    run: str, missing: tuple[str, ...], expected: str, source: str
) -> None:
    env = {name: value for name, value in ALL.items() if name not in missing}
    job = propose(env, run, now=1.0, entropy=ENTROPY)
    assert (job.run, job.source) == (expected, source)


@pytest.mark.parametrize("value", ["none", "None", "", "  "])
def test_torchruns_default_id_is_no_id(value: str) -> None:
    assert propose({"TORCHELASTIC_RUN_ID": value}).source == "random"


def test_two_jobs_without_any_id_differ() -> None:
    assert propose({}).run != propose({}).run


def test_the_run_stays_and_the_incarnation_grows_with_every_restart() -> None:
    first = propose(ALL, now=1000.0, entropy=ENTROPY)
    second = propose({**ALL, "TORCHELASTIC_RESTART_COUNT": "0"}, now=1000.5, entropy=ENTROPY)
    third = propose({**ALL, "TORCHELASTIC_RESTART_COUNT": "10"}, now=99999.0, entropy=ENTROPY)
    assert first.run == second.run == third.run
    assert first.incarnation < second.incarnation < third.incarnation


def test_two_starts_in_the_same_moment_differ() -> None:
    assert propose(ALL, now=1.0).incarnation != propose(ALL, now=1.0).incarnation


def test_proposing_leaves_the_users_random_state_alone() -> None:
    random.seed(1)
    state = random.getstate()
    propose({})
    assert random.getstate() == state


def test_odd_variables_cannot_spoil_logs() -> None:
    job = propose({"TORCHELASTIC_RUN_ID": "a\nb\x1b[0m" + "x" * 300})
    assert job.run.startswith("ab[0m")
    assert job.run.isprintable()
    assert len(job.run) == 128


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"LOCAL_RANK": "3", "SLURM_LOCALID": "5"}, 3),
        ({"SLURM_LOCALID": "5"}, 5),
        ({"LOCAL_RANK": "x"}, 0),
        ({}, 0),
    ],
)
def test_the_local_rank_comes_from_the_launcher(env: dict[str, str], expected: int) -> None:
    here = place(env)
    assert here.local_rank == expected
    assert here.node


def test_hello_carries_the_versions_and_is_accepted() -> None:
    said = hello(
        Job("r", "i", "argument"),
        Place("n", 1),
        model="m",
        rank=1,
        world_size=2,
        step=5,
        plan=Plan(1, 2, "abc"),
    )
    validate_hello(said)
    assert said.protocol_version == PROTOCOL_VERSION
    assert said.agent_version == gradpilot.__version__
    assert (said.node, said.local_rank, said.rank, said.step) == ("n", 1, 1, 5)
