from __future__ import annotations

import os
import statistics
import struct
import threading
import time

import pytest
import torch

from gradpilot.protos.messages import DENSE, Bucket, Option, Plan
from gradpilot.worker_agent import flight_recorder
from gradpilot.worker_agent.buckets import Slot
from gradpilot.worker_agent.flight_recorder import KEPT, FlightRecorder, read

TOPK = Option("topk", 0.01, "allgather")
FOUR = torch.zeros(1)
PLAN = Plan(1, 1, "")


def slot(index: int = 0, key: str = "0123456789ab") -> Slot:
    return Slot(Bucket(key, index, 1), ("p",), ((0, 1),), (torch.Size([1]),))


def test_a_new_recorder_tells_nothing() -> None:
    flight = read(FlightRecorder().fd)
    assert (flight.steps, flight.notes, flight.closed, flight.last_seconds) == (-1, (), False, 0.0)


def test_a_note_comes_back_as_it_was_written() -> None:
    recorder = FlightRecorder()
    before = time.monotonic()
    recorder.note(torch.zeros(10_000), 7, slot(3), TOPK, Plan(2, 9, ""))
    (note,) = read(recorder.fd).notes
    assert (note.step, note.bucket, note.fingerprint) == (7, 3, "0123456789ab")
    assert (note.op, note.bytes, note.term, note.plan) == (TOPK.label, 40_000, 2, 9)
    assert before <= note.seconds <= time.monotonic()
    assert note.thread == threading.get_native_id()


def test_a_bucket_that_nobody_looked_at_is_like_the_one_before() -> None:
    recorder = FlightRecorder()
    recorder.note(FOUR, 7, slot(3), TOPK, Plan(2, 9, ""))
    recorder.note_again(torch.zeros(3, dtype=torch.float64), 8, 1)
    recorder.note_again(torch.eye(5).to_sparse(), 8, 2)
    _, note, sparse = read(recorder.fd).notes
    assert (note.step, note.bucket, note.fingerprint, note.bytes) == (8, 1, "", 24)
    assert (note.op, note.term, note.plan) == (TOPK.label, 2, 9)
    assert sparse.bytes == 100


def test_the_newest_stay_in_order() -> None:
    recorder = FlightRecorder()
    for step in range(500):
        recorder.note(FOUR, step, slot(step % 4), DENSE, PLAN)
    notes = read(recorder.fd).notes
    assert [note.step for note in notes] == list(range(500 - KEPT, 500))
    assert [note.number for note in notes] == list(range(501 - KEPT, 501))


def test_progress_is_a_bucket_or_the_end_of_a_step() -> None:
    recorder = FlightRecorder()
    seen = {read(recorder.fd).progress}
    recorder.note(FOUR, 0, slot(), DENSE, PLAN)
    seen.add(read(recorder.fd).progress)
    recorder.end_step(1)
    flight = read(recorder.fd)
    assert flight.steps == 1
    assert flight.last_seconds == flight.ended_seconds >= flight.notes[0].seconds
    assert len({*seen, flight.progress}) == 3


def test_a_note_that_is_being_written_is_left_out() -> None:
    recorder = FlightRecorder()
    for step in range(3):
        recorder.note(FOUR, step, slot(), DENSE, PLAN)
    at = flight_recorder._ROOM + 2 * flight_recorder._RECORD.size
    os.pwrite(recorder.fd, struct.pack("<Q", 66), at)  # its first field only
    assert [note.step for note in read(recorder.fd).notes] == [0, 2]


def test_long_and_many_labels_do_no_harm() -> None:
    recorder = FlightRecorder()
    for number in range(300):
        option = Option("x" * 80, 1.0, "native", skip=number)
        recorder.note(FOUR, number, slot(key="f" * 30), option, PLAN)
        del option  # its id may be given to the next one
    recorder.note(FOUR, 300, slot(), TOPK, PLAN)
    *_, long, last = read(recorder.fd).notes
    assert (long.op, long.fingerprint) == ("x" * 52, "f" * 12)
    assert last.op == TOPK.label
    assert len(recorder._labels) <= 64


def test_a_detached_model_may_go_on_after_the_end() -> None:
    recorder = FlightRecorder()
    reader = os.dup(recorder.fd)
    recorder.close()
    recorder.close()
    recorder.note(FOUR, 1, slot(), DENSE, PLAN)
    assert read(reader).closed
    os.close(reader)


def test_what_is_no_recorder_is_refused() -> None:
    other = os.memfd_create("other")
    os.ftruncate(other, 1 << 16)
    with pytest.raises(ValueError, match="flight recorder"):
        read(other)
    os.close(other)


def test_a_note_costs_less_than_5_microseconds() -> None:
    recorder = FlightRecorder()
    rounds, bucket = [], slot()
    for _ in range(20):
        begun = time.perf_counter()
        for number in range(500):
            recorder.note(FOUR, number, bucket, DENSE, PLAN)
        rounds.append((time.perf_counter() - begun) / 500)
    assert min(rounds) < 5e-6, f"median {1e6 * statistics.median(rounds):.1f} us"
