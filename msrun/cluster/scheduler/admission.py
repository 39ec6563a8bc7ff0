"""Admits nodes that the scheduler can reach, and so, presumably, the other nodes."""

from __future__ import annotations

from dataclasses import dataclass, field

from msrun.cluster.scheduler.events import AgentMessage, Lost
from msrun.cluster.wire.messages import Register

Life = tuple[str, int]
"""One incarnation of a node: its id and the number of the incarnation."""


@dataclass(slots=True)
class Admission:
    """Holds back the messages of a node until it is known whether the node can be reached.

    Args:
        is_open: All are admitted, because there is one node.
    """

    is_open: bool = False
    _reachable: set[Life] = field(default_factory=set)
    _held: dict[Life, list[AgentMessage]] = field(default_factory=dict)

    @property
    def is_busy(self) -> bool:
        """Whether `probed` is waited for."""
        return bool(self._held)

    def expect(self, node_id: str, incarnation: int) -> None:
        """Admit an incarnation of a node that an earlier scheduler has reached."""
        self._reachable.add((node_id, incarnation))

    def receive(self, event: AgentMessage) -> tuple[list[AgentMessage], bool]:
        """Return the messages to handle now, and whether the node must be probed (`probed`)."""
        life = (event.node_id, event.incarnation)
        if life in self._held:
            self._held[life].append(event)
            return [], False
        if self.is_open or life in self._reachable or not _is_new(event):
            return [event], False
        self._held[life] = [event]
        return [], True

    def probed(self, life: Life, *, is_reachable: bool) -> list[AgentMessage]:
        """Return the messages that were held back; none if the node was lost."""
        held = self._held.pop(life, [])
        if held and is_reachable:
            self._reachable.add(life)
        return held

    def lose(self, loss: Lost) -> None:
        """Forget the messages of an incarnation of a node."""
        self._held.pop((loss.node_id, loss.incarnation), None)


def _is_new(event: AgentMessage) -> bool:
    """Return whether a node registers that has taken part in nothing.

    Any other was reached by an earlier scheduler, and workers that may run on it cannot wait.
    """
    return isinstance(event.body, Register) and event.body.is_new
