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
    _own("time", "LIMIT", "For slurm and kubernetes, the time limit, such as 1h30m."),
    _own("account", "NAME", "For slurm, the account that is charged."),
    _own("gpus-per-node", "N", "For slurm and kubernetes, GPUs of each node."),
    _own("cpus-per-node", "N", "For slurm, CPUs of each node, which all its workers share."),
    _own("signal-seconds", "N", "For slurm, seconds before the limit at which the job is stopped."),
    _own("requeue", "true|false", "For slurm, whether Slurm may start the job again."),
    _own("output", "FILE", "For slurm, the file of the console; %j is the number of the job."),
    _own("sbatch-args", "WORDS", "For slurm, further options of sbatch."),
    _own("image", "IMAGE", "For kubernetes, the image of the pods, with msrun and the program."),
    _own("namespace", "NAME", "For kubernetes, the namespace."),
    _own("context", "NAME", "For kubernetes, the context of the kubeconfig."),
    _own("resources", "K=V,...", "For kubernetes, what each pod gets: nvidia.com/gpu=8,cpu=32."),
    _own("shm", "SIZE|off", "For kubernetes, the limit of /dev/shm, such as 16Gi."),
    _own("volumes", "V,...", "For kubernetes, directories such as pvc:data:/data:ro."),
    _own("workdir", "PATH", "For kubernetes, the working directory in the image."),
    _own("ship", "true|false", "For kubernetes, whether the script is sent in a ConfigMap."),
    _own("ttl", "DURATION|off", "For kubernetes, how long an ended job stays; 7d by default."),
    _own("node-selector", "K=V,...", "For kubernetes, labels that nodes must have."),
    _own("tolerations", "T,...", "For kubernetes, taints such as gpu=a100:NoSchedule."),
    _own("topology-spread", "KEY,...", "For kubernetes, labels over which pods are spread."),
    _own("priority-class", "NAME", "For kubernetes, the priority class."),
    _own("service-account", "NAME", "For kubernetes, the service account."),
    _own("image-pull-secrets", "NAMES", "For kubernetes, secrets to pull the image with."),
    _own("suspend", "true|false", "For kubernetes, whether the job is created suspended."),
    _own("k8s-kind", "job|jobset", "For kubernetes, the object that makes the pods."),
    _own("k8s-queue", "NAME", "For kubernetes, the local queue of Kueue."),
    _own("k8s-gang", "NAME", "For kubernetes, volcano or scheduler-plugins: all pods at once."),
    _own("k8s-patch", "FILE", "For kubernetes, YAML that is merged over the objects."),
)
FLEET_TABLE = (*options_in(globals()), *OWN)
