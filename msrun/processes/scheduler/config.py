"""The configuration of a scheduler process."""

import msgspec

from msrun.cluster.wire.messages import Formation
from msrun.job import RestartLimits

# Fits into a pipe that nobody reads yet.
REASON_BYTES_MAX = 2_000


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The first line on the scheduler's standard input, the secret included.

    Args:
        job_id: The job.
        formation: How many nodes it takes.
        join_timeout: Seconds in which they must register; None waits for ever.
        last_call: Seconds for which more nodes than the fewest are waited for.
        replaces: As of `SchedulerState`.
        restarts: Restart budget and pace.
        secret: The job's secret; None without authentication.
        wal_file: Path of the write-ahead log.
        log_file: Path of the log for people.
        started_before: Schedulers of the job that were started before this one.
        term: Highest term that one of them has written; a whole log has a record of it.
        parent: Pid of the parent.
        alone: The parent is no agent of this job, but passes on the signals that it gets, by
            standard input; the scheduler leaves by itself when all nodes know the verdict.
        listen_fd: Inherited listening socket.
        began_fd: Inherited pipe that gets a line with this scheduler's term once the log has it,
            and a sentence if the scheduler cannot go on.
        rank_table: Where to write the rank table of each generation; empty writes none.
    """

    job_id: str
    formation: Formation
    join_timeout: float | None
    last_call: float
    restarts: RestartLimits
    secret: bytes | None
    wal_file: str
    log_file: str
    parent: int
    started_before: int = 0
    term: int = 0
    alone: bool = False
    replaces: bool = False
    listen_fd: int = -1
    began_fd: int = -1
    rank_table: str = ""
