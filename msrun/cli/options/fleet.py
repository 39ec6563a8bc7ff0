"""Options of the backends that start agents on other nodes."""

from __future__ import annotations

from msrun.cli.options import parsers
from msrun.cli.options.option import Option, OptionGroup, options_in

HOSTFILE = Option(
    name="hostfile",
    group=OptionGroup.FLEET,
    metavar="FILE",
    help="Nodes and their slots, as Open MPI, MPICH or DeepSpeed write them.",
    parse=parsers.text,
    unset=frozenset({""}),
)
RANK_TABLE_FILE = Option(
    name="rank-table-file",
    group=OptionGroup.FLEET,
    metavar="FILE",
    help="HCCL rank table with the job's nodes, ranks and devices.",
    parse=parsers.text,
    unset=frozenset({""}),
)
INCLUDE = Option(
    name="include",
    group=OptionGroup.FLEET,
    metavar="HOSTS",
    help="Nodes of the hostfile to use, such as n[1-3],n7 or n1@n2:0,1.",
    parse=parsers.text,
)
EXCLUDE = Option(
    name="exclude",
    group=OptionGroup.FLEET,
    metavar="HOSTS",
    help="Nodes of the hostfile to leave out, in the same form.",
    parse=parsers.text,
)
REMOTE_PYTHON = Option(
    name="remote-python",
    group=OptionGroup.FLEET,
    metavar="PATH",
    help="Python interpreter on the nodes, with msrun installed.",
    parse=parsers.text,
    default_text="the path of this one",
)


def _own(name: str, metavar: str, text: str) -> Option[str]:
    return Option(
        name=name, group=OptionGroup.FLEET, metavar=metavar, help=text, parse=parsers.text
    )


RANKS_BY = Option(
    name="ranks-by",
    group=OptionGroup.FLEET,
    metavar="msrun|mpi",
    help="For mpirun, who starts the ranks; msrun neither watches nor restarts those of mpi.",
    parse=parsers.words("msrun", "mpi"),
    default="msrun",
    default_text="msrun",
)
# What one backend alone understands; the names are those of its `open_launcher`.
OWN: tuple[Option[str], ...] = (
    _own("ssh", "WORDS", "For ssh, the client and its options, such as 'ssh -F config'."),
    _own("mpirun", "PATH", "For mpirun, its path; Open MPI, MPICH or Intel MPI."),
    _own("mpirun-args", "WORDS", "For mpirun, further options of it."),
    _own("partition", "NAME", "For slurm, the partition."),
    _own("time", "LIMIT", "For slurm, the time limit, such as 1h30m or 1:30:00."),
    _own("account", "NAME", "For slurm, the account that is charged."),
    _own("gpus-per-node", "N", "For slurm, GPUs of each node."),
    _own("cpus-per-node", "N", "For slurm, CPUs of each node, which all its workers share."),
    _own("signal-seconds", "N", "For slurm, seconds before the limit at which the job is stopped."),
    _own("requeue", "true|false", "For slurm, whether Slurm may start the job again."),
    _own("output", "FILE", "For slurm, the file of the console; %j is the number of the job."),
    _own("sbatch-args", "WORDS", "For slurm, further options of sbatch."),
)
FLEET_TABLE = (*options_in(globals()), *OWN)
