"""Which nodes the scheduler hears: those that it, and so the others, can reach."""

from __future__ import annotations

from dataclasses import dataclass, field

from msrun.cluster.scheduler.events import AgentMessage, Lost
from msrun.cluster.wire.messages import Register

Life = tuple[str, int]
"""A node and its incarnation."""


@dataclass(slots=True)
class Admission:
    """Holds back what a node says until it is known whether it can be reached.

    Args:
        is_open: Everybody is heard, as there is one node.
    """

    is_open: bool = False
    _reachable: set[Life] = field(default_factory=set)
    _held: dict[Life, list[AgentMessage]] = field(default_factory=dict)

    @property
    def is_busy(self) -> bool:
        """Whether `probed` is waited for."""
        return bool(self._held)

    def expect(self, node_id: str, incarnation: int) -> None:
        """Hear a life of a node that an earlier scheduler has reached."""
        self._reachable.add((node_id, incarnation))

    def receive(self, event: AgentMessage) -> tuple[list[AgentMessage], bool]:
        """Return what is heard now, and whether `probed` must be told about the node."""
        life = (event.node_id, event.incarnation)
        if life in self._held:
            self._held[life].append(event)
            return [], False
        if self.is_open or life in self._reachable or not _is_new(event):
            return [event], False
        self._held[life] = [event]
        return [], True

    def probed(self, life: Life, *, is_reachable: bool) -> list[AgentMessage]:
        """Return what a node has said meanwhile; nothing where it was lost."""
        held = self._held.pop(life, [])
        if held and is_reachable:
            self._reachable.add(life)
        return held

    def lose(self, loss: Lost) -> None:
        """Forget what a life of a node has said."""
        self._held.pop((loss.node_id, loss.incarnation), None)


def _is_new(event: AgentMessage) -> bool:
    """Return whether a node registers that has taken part in nothing.

    Another was reached by an earlier scheduler, and what may run on it cannot wait.
    """
    return isinstance(event.body, Register) and event.body.is_new
