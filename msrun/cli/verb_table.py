"""The verbs of `msrun`: where each one is, and its line in `--help`."""

from __future__ import annotations

from typing import NamedTuple


class Verb(NamedTuple):
    """One verb.

    Args:
        place: Its function, as `module:name`; only the verb that is called is imported, because
            each one takes its time to load.
        help: What it does, in one sentence.
    """

    place: str
    help: str


VERBS = {
    "run": Verb("msrun.cli.verbs.run:run", "Start the job; msrun does this without a verb too."),
    "verify": Verb(
        "msrun.cli.verbs.verify:verify", "Compare the first step with that of one process."
    ),
    "plan": Verb("msrun.cli.verbs.plan:plan", "Show what run would do."),
    "ls": Verb("msrun.cli.verbs.status:ls", "List your jobs on this machine."),
    "status": Verb("msrun.cli.verbs.status:status", "Show where a job stands."),
    "logs": Verb("msrun.cli.verbs.inspect:logs", "Show what ranks have written."),
    "stacks": Verb("msrun.cli.verbs.inspect:stacks", "Show the stack of every rank."),
    "signal": Verb("msrun.cli.verbs.control:send_signal", "Send a signal to workers."),
    "drain": Verb("msrun.cli.verbs.control:drain", "Let a node leave a job that goes on."),
    "scale": Verb(
        "msrun.cli.verbs.control:scale", "Change the number of servers or nodes of a job."
    ),
    "stop": Verb("msrun.cli.verbs.control:stop", "Stop a job."),
    "convert": Verb("msrun.cli.verbs.convert:convert", "Turn a checkpoint into one file, or back."),
    "ranktable": Verb(
        "msrun.cli.verbs.ranktable:ranktable", "Build, check, show, merge or convert rank tables."
    ),
    "search": Verb("msrun.cli.verbs.search:search", "Find the fastest parallel plan of a model."),
    "advise": Verb("msrun.cli.verbs.advise:advise", "Say which parallel technique a model needs."),
    "install-shim": Verb(
        "msrun.cli.verbs.shim:install_shim", "Make a command torchrun that runs msrun."
    ),
    "operator": Verb("msrun.cli.verbs.operator:operator", "Run jobs for a Kubernetes cluster."),
    "calibrate": Verb(
        "msrun.cli.verbs.calibrate:calibrate", "Measure devices and links for search."
    ),
}
# These may be about a job that a launcher runs elsewhere.
ELSEWHERE = ("status", "logs", "stacks", "signal", "drain", "scale", "stop")
