"""What the scheduler's state machine knows of its job, and how it says so."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

import msgspec

from msrun.cluster.scheduler.events import Action, JobPhase, SendToAgent
from msrun.cluster.scheduler.forming import Forming
from msrun.cluster.scheduler.generation import Generation
from msrun.cluster.scheduler.restart_policy import GiveUp, RestartPolicy
from msrun.cluster.scheduler.roster import Roster
from msrun.cluster.verdict import RankExit, Verdict
from msrun.cluster.wire.messages import Formation, FromScheduler, Stop, Waiting
from msrun.errors import ExitCode


@dataclass(slots=True, kw_only=True)
class JobState:
    """One job, as its scheduler knows it.

    Args:
        job_id: The job.
        formation: How many nodes it takes.
        join_timeout: Seconds in which they must register, each time; inf waits.
        policy: Decides about restarts.
        last_call: Seconds for which more nodes than the fewest are waited for.
        started_at: Time of the first event, on the caller's monotonic clock.
        generation: The generation that runs or is next; 0 for the first.  A node that has
            seen a later one (`_seen`) knows more than the log, which then was lost or damaged.
    """

    job_id: str
    formation: Formation
    join_timeout: float
    policy: RestartPolicy
    last_call: float = 0.0
    started_at: float = 0.0
    generation: int = 0
    phase: JobPhase = JobPhase.FORMING
    verdict: Verdict | None = None
    _roster: Roster = field(init=False)
    _current: Generation = field(default_factory=Generation)
    _stopped_with: tuple[str, int] = ("", signal.SIGTERM)
    _obstacle: Verdict | None = None
    _forming: Forming = field(init=False)
    _grow_at: float | None = None
    _seen: int = -1
    _may_miss_spares: bool = False
    _has_lost_log: bool = False
    _cause: str = ""
    untold: set[str] = field(default_factory=set)
    """Nodes that do not know from this scheduler how the job ended, or that it goes on."""

    def __post_init__(self) -> None:
        """Count the time for the first forming from the start."""
        self._roster = Roster(self.formation)
        self._forming = Forming(
            join_timeout=self.join_timeout,
            last_call=self.last_call,
            give_up_at=self.started_at + self.join_timeout,
        )

    @property
    def _all_known_at(self) -> float:
        """Time by which whoever ran for another scheduler has registered here or is dead."""
        return self.started_at + self.formation.lease

    @property
    def _all_stopped_at(self) -> float | None:
        """Time from which no worker lives that was not started here; None while some are known."""
        known_at = self._all_known_at if self._has_lost_log else self.started_at
        return None if self._roster.stale else known_at

    def _has_all_stopped(self, now: float) -> bool:
        at = self._all_stopped_at
        return at is not None and now >= at

    def _forming_deadline(self) -> float | None:
        """Return when a job that forms goes on, or ends because it must."""
        if self._obstacle:
            return self._all_stopped_at
        return self._forming.deadline(is_full=self._roster.is_full())

    def may_leave(self, *, now: float) -> bool:
        """Whether no node that may live has yet to hear how the job ended.

        The log has only the members of the generation; who else had registered with an earlier
        scheduler shows when it registers again.
        """
        return not self.untold and not (self._may_miss_spares and now < self._all_known_at)

    def _send(self, node_id: str, body: FromScheduler) -> SendToAgent:
        return SendToAgent(node_id, self.generation, body)

    def _tell_all(self, body: FromScheduler) -> list[Action]:
        return [self._send(node_id, body) for node_id in sorted(self._roster.nodes)]

    def _stand_by(self, node_id: str) -> Waiting:
        is_next, reason = self._roster.stand_by(node_id, self._current.members)
        return Waiting(reason=f"job {self.job_id} has its {reason}", spare=not is_next)

    def _stop_message(self) -> Stop:
        reason, signum = self._stopped_with
        return Stop(reason=reason, signum=signum)

    # Verdicts.

    def _verdict(self, code: int, reason: str) -> Verdict:
        return Verdict(
            job_id=self.job_id,
            code=code,
            reason=reason,
            generation=self.generation,
            restarts=self.policy.used,
            stuck=self._current.all_stuck(),
        )

    def _failure(self, root: RankExit | None, step: GiveUp) -> Verdict:
        code, reason = self._current.failure(root, step)
        verdict = msgspec.structs.replace(self._verdict(code, reason), hint=step.hint)
        return self._current.with_ends(verdict, root)

    def _join_timeout(self) -> Verdict:
        reason = f"{self._roster.attendance()}, after {self.join_timeout:g}s"
        if not self._current.members:
            return self._verdict(ExitCode.JOIN_TIMEOUT, reason)
        root = self._current.root()
        ended = f"the job cannot go on: {self._current.sentence(root)}; {reason}"
        code = ExitCode.JOIN_TIMEOUT if root else ExitCode.NODE_LOST
        return self._verdict(code, ended)
