"""What the controller says, and what becomes of it.

Runs in the client's reading thread. Whatever a message is or a callback raises, the session goes
on and training does not notice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gradpilot.errors import ConfigError, GradpilotError, ProtocolError
from gradpilot.protos import codec, validate
from gradpilot.protos.messages import Ack, Catalog, GoingAway, Plan, ProbeRequest, Welcome
from gradpilot.worker_agent.outgoing import ClientCounters
from gradpilot.worker_agent.session import Line, Session

if TYPE_CHECKING:
    from gradpilot.protos.v1 import controller_pb2


def nothing(_: object) -> None:
    """Ignore a message."""


class Incoming:
    """Decodes, checks and hands over.

    Args:
        line: Shared with the client.
        counters: Where refusals are counted.
        world_size: Ranks in the group of the model, against which plans are checked.
        catalog: Returns the newest catalog that was given to be sent; None before the first.
        step: Returns the present step.
        send_ack: Queues an acknowledgement.
        say_once: Logs a warning.

    Attributes:
        welcome: Newest Welcome.
        newest: Key of the newest plan seen.
        on_first_welcome: Called when a controller answers on a new connection.
    """

    def __init__(
        self,
        *,
        line: Line,
        counters: ClientCounters,
        world_size: int,
        catalog: Callable[[], Catalog | None],
        step: Callable[[], int],
        send_ack: Callable[[Ack], None],
        say_once: Callable[[str], None],
    ) -> None:
        self.welcome: Welcome | None = None
        self.newest = (-1, -1)
        self.on_plan: Callable[[Plan], None] = nothing
        self.on_probe: Callable[[ProbeRequest], None] = nothing
        self.on_welcome: Callable[[Welcome], None] = nothing
        self.on_first_welcome: Callable[[Welcome], None] = nothing
        self._line = line
        self._counters = counters
        self._world_size = world_size
        self._catalog = catalog
        self._step = step
        self._send_ack = send_ack
        self._say_once = say_once

    def take(self, session: Session, envelope: controller_pb2.ControllerMessage) -> None:
        """Take one message of a session; never raises."""
        try:
            if not session.heard():
                return
            message = codec.decode_controller(envelope)
            match message:
                case Welcome():
                    validate.validate_welcome(message)
                    self._take_welcome(session, message)
                case GoingAway():
                    validate.validate_going_away(message)
                    session.end(
                        f"goes away: {message.reason}", retry_seconds=message.reconnect_seconds
                    )
                case Plan() | ProbeRequest() if not session.controller:
                    raise ProtocolError(f"{type(message).__name__} came before Welcome")
                case Plan():
                    self._take_plan(message)
                case ProbeRequest():
                    validate.validate_probe_request(message)
                    self.on_probe(message)
        except ProtocolError as error:
            self._counters.protocol_errors += 1
            self._say_once(f"ignored a message of the controller: {error}")
        except Exception as error:
            self._say_once(f"a message of the controller could not be handled: {error!r}")

    def _take_welcome(self, session: Session, welcome: Welcome) -> None:
        first = not session.controller
        if not first and session.controller != welcome.controller:
            # Another process answers on this stream; it has not heard our Hello.
            session.end("changed within a session")
            return
        with self._line.wake:
            session.controller = welcome.controller
            session.dues.welcomed = True
            self._line.wake.notify_all()
        self.welcome = welcome
        if first:
            self._counters.sessions += 1
            self.on_first_welcome(welcome)
        self.on_welcome(welcome)

    def _take_plan(self, plan: Plan) -> None:
        """Offer a newer plan to the agent and acknowledge what became of it."""
        if plan.key <= self.newest:
            self._counters.plans_ignored += 1
            return
        state, reason = "held", ""
        try:
            catalog = self._catalog()
            if catalog is None:
                raise ConfigError("a plan came before this rank has sent a catalog")
            validate.validate_plan(plan, catalog.layout, self._world_size)
            self.on_plan(plan)
            self.newest = plan.key
        except Exception as error:
            known = isinstance(error, GradpilotError)
            state, reason = "rejected", str(error) if known else repr(error)
            self._counters.plans_rejected += 1
            self._say_once(f"rejected a plan of the controller: {reason}")
        self._send_ack(Ack(plan.term, plan.id, state, self._step(), reason))
