"""Watches an agent's way to its scheduler, and finds out that the scheduler is gone."""

from __future__ import annotations

from collections.abc import Callable

from msrun.cluster.agent.events import SchedulerLost
from msrun.cluster.verdict import Verdict
from msrun.errors import ExitCode
from msrun.processes.agent.node_resources import NodeResources
from msrun.processes.console import Console
from msrun.transport.loop import Loop
from msrun.transport.probe import Prober
from msrun.transport.sockets import ConnectionState

# A connection may end for another reason than its key: a scheduler that is started again,
# a tunnel without its other end yet.
_REJECTED_SECONDS = 2.0
_RECONNECT_SECONDS = 0.5
# A node that starts before the scheduler's node says what it waits for.
_WAITING_SECONDS = 3.0


class SchedulerWatch:
    """Watches the scheduler, a child of this process or of another node's agent.

    Args:
        node: This node's resources.
        loop: This process's loop.
        console: Takes messages to the user.
        tell: Takes the event that there is no scheduler any more.
        greet: Called when a new connection has taken the place of a broken one.
    """

    def __init__(
        self,
        node: NodeResources,
        loop: Loop,
        console: Console,
        tell: Callable[[SchedulerLost], None],
        greet: Callable[[], None],
    ) -> None:
        self._node = node
        self._loop = loop
        self._console = console
        self._tell = tell
        self._greet = greet
        self._prober = Prober(loop)
        self._was_up = False
        self._has_warned = False
        self._rejected_at: float | None = None
        self._reconnect_at: float | None = None
        self._waiting_at: float | None = None

    def start(self) -> None:
        """Begin to watch."""
        self._loop.watch(self._node.socket.monitor, self._on_line)
        if self._node.scheduler:
            self._node.scheduler.watch(self._loop, self._console.say, self._on_over)
        else:
            self._waiting_at = self._loop.now() + _WAITING_SECONDS

    def deadline(self) -> float | None:
        """Time by which `tick` must be called; None when there is none."""
        dues = (self._prober.deadline(), self._waiting_at, self._reconnect_at)
        return min((due for due in dues if due is not None), default=None)

    def tick(self) -> None:
        """Act on the deadlines that are due."""
        self._prober.tick()
        if self._waiting_at is not None and self._loop.now() >= self._waiting_at:
            self._waiting_at = None
            self._console.say(f"msrun: waiting for the scheduler at {self._node.scheduler_name}")
        if self._reconnect_at is not None and self._loop.now() >= self._reconnect_at:
            self._reconnect_at = None
            self._node.socket.reconnect()

    def _on_over(self, how: str, verdict: Verdict | None) -> None:
        self._tell(SchedulerLost(how, verdict))

    def _on_line(self) -> None:
        for line in self._node.socket.line():
            is_again = line is ConnectionState.RETRYING
            self._reconnect_at = None if is_again else self._loop.now() + _RECONNECT_SECONDS
            if line is ConnectionState.UP:
                if self._was_up:
                    self._greet()
                self._was_up, self._rejected_at = True, None
                self._waiting_at = self._reconnect_at = None
            elif is_again:
                continue
            elif self._was_up:
                self._ask_whether_it_lives()
            elif line is ConnectionState.SILENT:
                self._warn_of_silence()
            else:
                self._reject()

    def _warn_of_silence(self) -> None:
        """Warn once that nobody answers at the port, unless the scheduler is our own."""
        self._rejected_at = None
        if not self._has_warned and self._node.scheduler is None:
            self._has_warned = True
            self._console.say(
                f"warning: what listens at {self._node.scheduler_name} does not answer as a "
                "scheduler does: it is overloaded or stopped, or another program has the port"
            )

    def _reject(self) -> None:
        now = self._loop.now()
        self._rejected_at = self._rejected_at or now
        if now - self._rejected_at >= _REJECTED_SECONDS:
            reason = (
                f"{self._node.scheduler_name} refuses this node: it has another secret, or is "
                "no scheduler of msrun"
            )
            self._tell(SchedulerLost(reason, code=ExitCode.AUTHENTICATION))

    def _ask_whether_it_lives(self) -> None:
        """Find out whether its node's agent, which holds its socket, is still there."""
        host, port = self._node.scheduler_address
        if self._node.scheduler is None:
            self._prober.watch_end(host, int(port), self._on_master_end)

    def _on_master_end(self) -> None:
        reason = f"the launcher on the scheduler's node, {self._node.scheduler_name}, has ended"
        self._tell(SchedulerLost(reason, code=ExitCode.NODE_LOST))
