"""The last buckets of a rank, kept where neither its threads nor its end can take them away.

A ring of fixed records in anonymous shared memory (a memfd). The watcher, another process, holds
the same memory, so it reads what a rank did last even if that rank is stopped, stuck in C with the
interpreter's lock, or killed. Not a file: dirty pages of one on a disk can make the writer wait for
the disk, and one on a full tmpfs kills the writer; these pages are allocated when the ring is made.

Needs the standard library only, since the watcher must start fast and stay small.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from dataclasses import dataclass
from typing import Protocol

KEPT = 50
"""Newest notes that a reader gets."""

_SLOTS = 64
"""A few more than ``KEPT``, so that writing on does not spoil what is being read."""

_HEADER = struct.Struct("<8sQqd")
_MAGIC = b"gpflight"
_STEP_END = struct.Struct("<qd")
_STEP_END_AT = 16

# number, step, bucket, thread, bytes, term, plan, seconds, fingerprint, op, number again
_RECORD = struct.Struct("<QqIIqqqd12s52sQ")
_ROOM = 64
_SIZE = _ROOM + _SLOTS * _RECORD.size
_MOST_LABELS = 64


class Sized(Protocol):
    """A tensor, as far as the recorder knows it."""

    def numel(self) -> int:
        """Return its elements."""

    def element_size(self) -> int:
        """Return the bytes of one."""


class Identified(Protocol):
    """A slot, as far as the recorder knows it."""

    @property
    def index(self) -> int:
        """Return its position in the order in which DDP hands buckets over."""

    @property
    def key(self) -> str:
        """Return its fingerprint."""


class Labelled(Protocol):
    """An option, as far as the recorder knows it."""

    @property
    def label(self) -> str:
        """Return the option in a few words."""


class Keyed(Protocol):
    """A plan, as far as the recorder knows it."""

    @property
    def key(self) -> tuple[int, int]:
        """Return its term and id."""


@dataclass(frozen=True, slots=True)
class Note:
    """A bucket that DDP handed over.

    Attributes:
        number: How many buckets had been handed over by then, this one included.
        step: Synchronised backward pass.
        bucket: Position in the order in which DDP hands buckets over.
        fingerprint: Identity of the bucket; "" where the path did not look at it.
        op: Label of the option that it gets, cut to 52 bytes.
        bytes: Size of its gradient.
        term: Term of the plan in force.
        plan: Id of the plan in force.
        seconds: Monotonic clock of the machine.
        thread: System's id of the thread that handed it over.
    """

    number: int
    step: int
    bucket: int
    fingerprint: str
    op: str
    bytes: int
    term: int
    plan: int
    seconds: float
    thread: int


@dataclass(frozen=True, slots=True)
class Flight:
    """What a reader finds.

    Attributes:
        steps: Number of the step after the last one that ended; -1 if none has ended.
        ended_seconds: Monotonic clock at that end; 0.0 if none has ended.
        closed: Whether the rank said that no more is to come.
        notes: The newest ``KEPT`` notes, oldest first.
    """

    steps: int
    ended_seconds: float
    closed: bool
    notes: tuple[Note, ...]

    @property
    def progress(self) -> tuple[int, int]:
        """Return something that differs whenever the rank has got on."""
        return (self.notes[-1].number if self.notes else 0, self.steps)

    @property
    def last_seconds(self) -> float:
        """Return the monotonic clock when the rank last got on; 0.0 if it never did."""
        return max(self.ended_seconds, self.notes[-1].seconds if self.notes else 0.0)


class FlightRecorder:
    """Writes the ring; one writer, a few hundred nanoseconds to 2 microseconds a note.

    Attributes:
        fd: File descriptor of the memory, to be handed to the reader.

    Raises:
        OSError: There is no memory for it.
        AttributeError: The system knows no such memory.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("gradpilot-flight")
        try:
            os.posix_fallocate(self.fd, 0, _SIZE)
            self._memory = mmap.mmap(self.fd, _SIZE)
        except OSError:
            os.close(self.fd)
            raise
        _HEADER.pack_into(self._memory, 0, _MAGIC, 0, -1, 0.0)
        self._number = 0
        self._labels: dict[int, tuple[Labelled, bytes]] = {}
        self._op, self._plan = b"", (0, 0)

    def note(
        self, buffer: Sized, step: int, slot: Identified, option: Labelled, plan: Keyed
    ) -> None:
        """Note a bucket that is being handed over.

        Args:
            buffer: Its gradient.
            step: Synchronised backward pass.
            slot: Who it is.
            option: What it gets.
            plan: The plan in force.
        """
        # The option is kept with its label, so that no other object can get its id.
        known = self._labels.get(id(option))
        if known is None:
            known = self._learn(option)
        self._op, self._plan = known[1], plan.key
        self.note_again(buffer, step, slot.index, slot.key)

    def note_again(self, buffer: Sized, step: int, bucket: int, fingerprint: str = "") -> None:
        """Note another bucket with the option and under the plan of the note before."""
        number = self._number = self._number + 1
        _RECORD.pack_into(
            self._memory,
            _ROOM + number % _SLOTS * _RECORD.size,
            number,
            step,
            bucket,
            threading.get_native_id(),
            buffer.numel() * buffer.element_size(),  # a sparse one has no nbytes
            *self._plan,
            time.monotonic(),
            fingerprint.encode(),
            self._op,
            number,
        )

    def end_step(self, steps: int) -> None:
        """Note that a step has ended; ``steps`` is the number of the next one."""
        _STEP_END.pack_into(self._memory, _STEP_END_AT, steps, time.monotonic())

    def close(self) -> None:
        """Say that no more is to come; a detached model may go on taking notes for nobody."""
        if self.fd >= 0:
            struct.pack_into("<Q", self._memory, 8, 1)
            os.close(self.fd)
            self.fd = -1

    def _learn(self, option: Labelled) -> tuple[Labelled, bytes]:
        if len(self._labels) >= _MOST_LABELS:
            self._labels.clear()
        known = self._labels[id(option)] = (option, option.label.encode()[:52])
        return known


def read(fd: int) -> Flight:
    """Return what the ring of ``fd`` holds; a note that is just being written is left out.

    Raises:
        ValueError: It is no such ring.
        OSError: It cannot be read.
    """
    data = os.pread(fd, _SIZE, 0)
    if len(data) != _SIZE or not data.startswith(_MAGIC):
        raise ValueError("not a flight recorder's memory")
    _, closed, steps, ended = _HEADER.unpack_from(data)
    notes = []
    for at in range(_ROOM, _SIZE, _RECORD.size):
        number, step, bucket, thread, size, term, plan, seconds, fingerprint, op, again = (
            _RECORD.unpack_from(data, at)
        )
        if not number or number != again:
            continue
        notes.append(
            Note(
                number,
                step,
                bucket,
                fingerprint.rstrip(b"\0").decode(errors="replace"),
                op.rstrip(b"\0").decode(errors="replace"),
                size,
                term,
                plan,
                seconds,
                thread,
            )
        )
    notes.sort(key=lambda note: note.number)
    return Flight(steps, ended, bool(closed), tuple(notes[-KEPT:]))
