"""Ends of workers from words, and messages and verdicts as words."""

import signal

from msrun.cluster.verdict import RankExit
from msrun.cluster.wire.messages import (
    Drained,
    Finish,
    Interrupted,
    NodeFailed,
    Refused,
    Register,
    Restarting,
    Serve,
    ServerFailed,
    ServersChanged,
    Start,
    Stop,
    Waiting,
    Warmed,
    WorkerExited,
)


def worker_end(rank, *, node_rank=0, first_rank=0, host="a", **words):
    """Return an end as `code=3 signal=SIGKILL ran=5 age=0.1 error=... oom=yes swept=yes` say."""
    signum = signal.Signals[words.pop("signal")] if "signal" in words else None
    code = words.pop("code", None)
    ran_for, age = float(words.pop("ran", 5)), float(words.pop("age", 0))
    flags = {name: words.pop(name, "no") == "yes" for name in ("oom", "core", "stopped", "swept")}
    error = words.pop("error", "")
    is_server = words.pop("is_server", False)
    assert not words
    return RankExit(
        rank=rank,
        node_rank=node_rank,
        host=host,
        local_rank=rank - first_rank,
        pid=100 + rank,
        code=None if code is None else int(code),
        signum=signum,
        ran_for=ran_for,
        age=age,
        error=error,
        log_file=f"logs/{'server' if is_server else 'worker'}_{rank}.log",
        is_server=is_server,
        **flags,
    )


def show_verdict(verdict):
    said = f"code={verdict.code} generation={verdict.generation} restarts={verdict.restarts}"
    said += f" reason={verdict.reason!r}"
    if verdict.root:
        said += f" root={'server ' * verdict.root.is_server}{verdict.root.rank}"
    for group in verdict.collateral:
        said += f" collateral={group.ranks} {group.how!r}"
    if verdict.finished:
        said += f" finished={verdict.finished}"
    if verdict.stuck:
        said += f" stuck={verdict.stuck}"
    return said + (f" hint={verdict.hint!r}" if verdict.hint else "")


def show_message(body):  # noqa: C901, PLR0911, PLR0912 - one line a message
    match body:
        case Start():
            ranks = f"{body.first_rank}..{body.first_rank + body.count - 1} of {body.world_size}"
            store = f"store={body.store_host}:{body.store_port}"
            serving = " serve_store" if body.serve_store else ""
            return f"Start node={body.node_rank} of {body.nnodes} ranks={ranks} {store}{serving}"
        case Stop():
            servers = " with servers" if body.servers else ""
            return f"Stop {signal.Signals(body.signum).name}{servers} reason={body.reason!r}"
        case Serve():
            return f"Serve {body.servers} of {body.total}"
        case Restarting():
            count = f"{body.restart} of {body.max_restarts}"
            return f"Restarting {count} delay={body.delay:g} reason={body.reason!r}"
        case Finish():
            return f"Finish code={body.verdict.code}"
        case Refused():
            return f"Refused code={body.code} reason={body.reason!r}"
        case Waiting():
            return f"Waiting{' as a spare' * body.spare} reason={body.reason!r}"
        case Register():
            return f"Register slots={body.slots}"
        case Warmed():
            return "Warmed"
        case WorkerExited():
            swept = " (swept)" if body.exit.swept else ""
            swept = swept or " (stopped)" * (body.exit.stopped and body.exit.succeeded)
            return f"WorkerExited rank={body.exit.rank} {body.exit.how()}{swept}"
        case Drained():
            return "Drained" + (f" stuck={body.stuck}" if body.stuck else "")
        case Interrupted():
            return f"Interrupted {signal.Signals(body.signum).name}"
        case ServersChanged():
            servers = " ".join(f"{s.server}:{s.pid}+{s.restarts}" for s in body.servers)
            return f"ServersChanged {servers}".rstrip()
        case ServerFailed():
            why = f" {body.reason!r}" if body.reason else ""
            return f"ServerFailed server={body.exit.rank} {body.exit.how()}{why}"
        case NodeFailed():
            return f"NodeFailed code={body.code} reason={body.reason!r}"
