"""A client of a job's scheduler: one question, one answer, or an error of one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from msrun.cluster.wire import control_messages
from msrun.cluster.wire.control_messages import (
    AnyRequest,
    Denied,
    GetNodes,
    GetRanks,
    GetServers,
    NodeRow,
    Nodes,
    Question,
    RankRow,
    Ranks,
    Reply,
    ServerRow,
    Servers,
)
from msrun.errors import (
    AuthenticationError,
    ProtocolError,
    UnreachableError,
    UsageError,
    VersionError,
)
from msrun.processes.control_file import Card
from msrun.transport.loop import new_context
from msrun.transport.sockets import ConnectionState, ControlSocket, endpoint

# Longer than the scheduler waits for its agents.
PATIENCE = 8.0

R = TypeVar("R", bound=Reply)


class ControlClient:
    """A connection to one job.

    Args:
        card: How to reach it.
        patience: Seconds that an answer may take.
    """

    def __init__(self, card: Card, patience: float = PATIENCE) -> None:
        self.card = card
        self._patience = patience
        self._context = new_context()
        address = endpoint(card.host, card.port)
        self._socket = ControlSocket(self._context, address, card.keys)

    def ask(self, request: AnyRequest, kind: type[R]) -> R:
        """Return the answer of the job, which is of `kind`.

        Raises:
            UsageError: It will not or cannot do that.
            AuthenticationError: The key is another one.
            UnreachableError: It does not answer.
            VersionError: It is of another version.
        """
        question = Question(question=self.card.job_id, request=request)
        where = f"{self.card.host} port {self.card.port}"
        frame = self._socket.ask(control_messages.encode(question), self._patience)
        if frame is None:
            msg = f"the job at {where} did not answer within {self._patience:g}s"
            raise UnreachableError(msg, hint="it may have ended, or is another program there")
        if isinstance(frame, ConnectionState):
            msg = f"{where} refuses the key, or is no scheduler of msrun"
            hint = "name the secret that the job was started with: --secret-file FILE"
            raise AuthenticationError(msg, hint=hint)
        try:
            reply = control_messages.decode_answer(frame).answer
        except VersionError:
            raise
        except ProtocolError as error:
            raise UnreachableError(f"{where} answers, but not as a job does: {error}") from error
        if isinstance(reply, Denied):
            raise UsageError(reply.reason)
        if not isinstance(reply, kind):
            raise UnreachableError(f"{where} answers, but not what it was asked")
        return reply

    def nodes(self) -> Iterator[NodeRow]:
        """Yield all nodes of the job, as they are while they are being read."""
        following: int | None = 0
        while following is not None:
            page = self.ask(GetNodes(first=following), Nodes)
            yield from page.rows
            following = page.following

    def ranks(self) -> Iterator[RankRow]:
        """Yield all ranks of the job, as they are while they are being read."""
        following: int | None = 0
        while following is not None:
            page = self.ask(GetRanks(first=following), Ranks)
            yield from page.rows
            following = page.following

    def servers(self) -> Iterator[ServerRow]:
        """Yield all parameter servers of the job, as they are while they are being read."""
        following: int | None = 0
        while following is not None:
            page = self.ask(GetServers(first=following), Servers)
            yield from page.rows
            following = page.following

    def close(self) -> None:
        """Give the connection up."""
        self._context.destroy(linger=0)
