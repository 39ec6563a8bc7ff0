"""The options that do something.  Flags, variables, job file, help and `plan` follow from them.

An option that names a field of `JobSpec` fills it without further code; `job/draft.py` says
which of them other options or the machine decide as well.  `peers` has the options that only
torchrun or MindSpore need, accepted with a note or refused.
"""

# tidy: long file, the table of all options is read in one place.

from __future__ import annotations

from msrun.cli.options import parsers
from msrun.cli.options.binding import is_bind_value, is_numa_value, parse_bind_core, parse_bind_numa
from msrun.cli.options.log_name import parse_log_name
from msrun.cli.options.option import Arity, FileForm, Option, OptionGroup, options_in
from msrun.cli.options.parallel import parse_parallel
from msrun.job import SERVERS_MAX
from msrun.units import PORT_MAX, parse_duration

NNODES = Option(
    name="nnodes",
    group=OptionGroup.CLUSTER,
    metavar="N|MIN:MAX",
    help="Nodes in the job; with MIN:MAX, nodes may join and leave.",
    parse=parsers.nodes,
    default=(1, 1),
    default_text="1",
    aliases=("-N", "--nodes"),
    torchrun="nnodes",
)
NODE_RANK = Option(
    name="node-rank",
    group=OptionGroup.CLUSTER,
    metavar="N",
    help="Rank of this node.",
    parse=parsers.whole(0),
    field="node_rank",
    default_text="assigned",
    torchrun="node_rank",
    unset=frozenset({"-1"}),
)
WORKER_NUM = Option(
    name="worker-num",
    group=OptionGroup.CLUSTER,
    metavar="N",
    help="Workers in the whole job, on any number of nodes unless --nnodes fixes it.",
    parse=parsers.whole(1),
    field="world_size",
    default_text="the sum over the nodes",
    aliases=("-n",),
)
SERVER_NUM = Option(
    name="server-num",
    group=OptionGroup.CLUSTER,
    metavar="N",
    help="Parameter servers in the whole job, processes beside the workers.",
    parse=parsers.whole(0, SERVERS_MAX),
    field="servers",
    default_text="0",
    environment=("MS_SERVER_NUM",),
)
MASTER_ADDR = Option(
    name="master-addr",
    group=OptionGroup.CLUSTER,
    metavar="HOST",
    help="Node that runs the scheduler; give every node the same name or address.",
    parse=parsers.host,
    field="master_addr",
    default_text="this node alone",
    torchrun="master_addr",
)
MASTER_PORT = Option(
    name="master-port",
    group=OptionGroup.CLUSTER,
    metavar="PORT",
    help="MASTER_PORT of the workers, and where nodes meet; on one node, 0 takes a free port.",
    parse=parsers.whole(0, PORT_MAX),
    field="master_port",
    default_text="0 on one node, 29500 on several",
    torchrun="master_port",
)
RDZV_ENDPOINT = Option(
    name="rdzv-endpoint",
    group=OptionGroup.CLUSTER,
    metavar="HOST[:PORT]",
    help="--master-addr and --master-port in torchrun's form.",
    parse=parsers.endpoint,
    torchrun="rdzv_endpoint",
    unset=frozenset({""}),
)
LOCAL_ADDR = Option(
    name="local-addr",
    group=OptionGroup.CLUSTER,
    metavar="HOST",
    help="Address by which the other nodes reach this one.",
    parse=parsers.host,
    default_text="the one on the route to --master-addr",
    torchrun="local_addr",
)
STANDALONE = Option(
    name="standalone",
    group=OptionGroup.CLUSTER,
    help="A job of this node alone, on a free port.",
    parse=parsers.boolean,
    default=False,
    arity=Arity.SWITCH,
    torchrun="standalone",
)
JOIN_TIMEOUT = Option(
    name="join-timeout",
    group=OptionGroup.CLUSTER,
    metavar="DURATION",
    help="Time for all nodes to register.",
    parse=parsers.patience,
    field="join_timeout",
    default_text="10m",
    aliases=("--cluster-time-out",),
)
LAST_CALL = Option(
    name="last-call",
    group=OptionGroup.CLUSTER,
    metavar="DURATION",
    help="Time for more nodes to register once MIN of MIN:MAX have.",
    parse=parse_duration,
    field="last_call",
    default_text="30s",
)
LEASE = Option(
    name="lease",
    group=OptionGroup.CLUSTER,
    metavar="DURATION",
    help="Time without a heartbeat after which a node is lost; the same on every node.",
    parse=parsers.lease,
    field="lease",
    default_text="10s",
)
RDZV_CONF: Option[parsers.RdzvConf] = Option(
    name="rdzv-conf",
    group=OptionGroup.CLUSTER,
    metavar="K=V,...",
    help="--join-timeout and --last-call in torchrun's form: join_timeout=300,last_call_timeout=5.",
    parse=parsers.rdzv_conf,
    torchrun="rdzv_conf",
    file=FileForm.PAIRS,
    unset=frozenset({""}),
)
JOB_ID = Option(
    name="job-id",
    group=OptionGroup.CLUSTER,
    metavar="NAME",
    help="Name of this launch.",
    parse=parsers.job_id,
    field="job_id",
    default_text="the script's name and 6 hex digits",
)
RDZV_ID = Option(
    name="rdzv-id",
    group=OptionGroup.CLUSTER,
    metavar="NAME",
    help="The job id in torchrun's form, any text; workers read it as TORCHELASTIC_RUN_ID.",
    parse=parsers.run_id,
    field="run_id",
    torchrun="rdzv_id",
    unset=frozenset({"none", ""}),
)
LAUNCHER = Option(
    name="launcher",
    group=OptionGroup.CLUSTER,
    metavar="NAME",
    help="Backend that starts the nodes.",
    parse=parsers.text,
    field="launcher",
    default="dynamic",
    default_text="dynamic",
)
SECRET_FILE = Option(
    name="secret-file",
    group=OptionGroup.CLUSTER,
    metavar="FILE",
    help="Secret of the job, 32 bytes or more, the same on every node.",
    parse=parsers.text,
    field="secret_file",
    default_text="on several nodes ~/.config/msrun/secret, made on first use",
)
INSECURE = Option(
    name="insecure",
    group=OptionGroup.CLUSTER,
    help="Control messages without authentication, on the loopback interface only.",
    parse=parsers.boolean,
    field="insecure",
    arity=Arity.SWITCH,
)
DATA_TLS = Option(
    name="data-tls",
    group=OptionGroup.CLUSTER,
    help="TLS with keys of the job between workers, over gloo alone; needs a torch that has it.",
    parse=parsers.boolean,
    field="data_tls",
    arity=Arity.SWITCH,
)

MODULE = Option(
    name="module",
    group=OptionGroup.PROGRAM,
    help="SCRIPT as the dotted name of a module, as with python -m.",
    parse=parsers.boolean,
    default=False,
    arity=Arity.SWITCH,
    aliases=("-m",),
    torchrun="module",
    file=FileForm.ABSENT,
)
NO_PYTHON = Option(
    name="no-python",
    group=OptionGroup.PROGRAM,
    help="SCRIPT as any command, which Python does not run.",
    parse=parsers.boolean,
    default=False,
    arity=Arity.SWITCH,
    torchrun="no_python",
)
RUN_PATH = Option(
    name="run-path",
    group=OptionGroup.PROGRAM,
    help="SCRIPT as a path, even with --no-python.",
    parse=parsers.boolean,
    default=False,
    arity=Arity.SWITCH,
    torchrun="run_path",
)
CONFIG = Option(
    name="config",
    group=OptionGroup.PROGRAM,
    metavar="FILE",
    help="YAML file with any of these options by name, and script, module, args and env.",
    parse=parsers.text,
    file=FileForm.ABSENT,
)

WORKERS_PER_NODE = Option(
    name="workers-per-node",
    group=OptionGroup.WORKERS,
    metavar="N|auto|gpu|npu|cpu",
    help="Workers each node starts.",
    parse=parsers.workers,
    field="workers_per_node",
    default_text="one per device, else 1",
    aliases=("--nproc-per-node", "--local-worker-num"),
    torchrun="nproc_per_node",
)
START_METHOD = Option(
    name="start-method",
    group=OptionGroup.WORKERS,
    metavar="fork|exec",
    help="Workers forked from a parent that has torch loaded, or one interpreter each.",
    parse=parsers.start_method,
    field="start_method",
    default_text="fork",
    torchrun="start_method",
)
PRELOAD: Option[tuple[str, ...]] = Option(
    name="preload",
    group=OptionGroup.WORKERS,
    metavar="MODULE,...",
    help="Modules that the parent of forked workers imports besides torch.",
    parse=parsers.module_names,
    field="preload",
    file=FileForm.LIST,
)
ENV = Option(
    name="env",
    group=OptionGroup.WORKERS,
    metavar="NAME=VALUE",
    help="Variable of every worker; may be given several times.",
    parse=parsers.variable,
    field="env",
    repeated=True,
    file=FileForm.VARIABLES,
)
ROLE = Option(
    name="role",
    group=OptionGroup.WORKERS,
    metavar="NAME",
    help="ROLE_NAME of the workers.",
    parse=parsers.text,
    field="role",
    default_text="default",
    torchrun="role",
)
VIRTUAL_LOCAL_RANK = Option(
    name="virtual-local-rank",
    group=OptionGroup.WORKERS,
    help="One visible device and LOCAL_RANK 0 in every worker.",
    parse=parsers.boolean,
    field="virtual_local_rank",
    arity=Arity.SWITCH,
    torchrun="virtual_local_rank",
)
JOIN = Option(
    name="join",
    group=OptionGroup.WORKERS,
    help="Waiting for the end of the job; --no-join returns once it runs.",
    parse=parsers.boolean,
    default=True,
    default_text="join",
    negatives=("--no-join", "--detach"),
    arity=Arity.OPTIONAL,
    is_value=parsers.is_boolean,
)

MAX_RESTARTS = Option(
    name="max-restarts",
    group=OptionGroup.STOPPING,
    metavar="N",
    help="Restarts of all workers after failures.",
    parse=parsers.whole(0),
    field="restarts.max_restarts",
    default_text="0",
    torchrun="max_restarts",
)
RESTART_WINDOW = Option(
    name="restart-window",
    group=OptionGroup.STOPPING,
    metavar="DURATION",
    help="Time over which restarts are counted.",
    parse=parsers.positive_seconds,
    field="restarts.window",
    default_text="inf",
)
NO_PROGRESS_LIMIT = Option(
    name="no-progress-limit",
    group=OptionGroup.STOPPING,
    metavar="N",
    help="Equal early failures in a row after which the job ends; 0 sets no limit.",
    parse=parsers.whole(0),
    field="restarts.no_progress_limit",
    default_text="0",
)
EXCLUDE_AFTER = Option(
    name="exclude-after",
    group=OptionGroup.STOPPING,
    metavar="N",
    help="Failures starting on one node after which the job leaves it out; 0 sets no limit.",
    parse=parsers.whole(0),
    field="restarts.exclude_after",
    default_text="2",
)
GRACE = Option(
    name="grace",
    group=OptionGroup.STOPPING,
    metavar="DURATION",
    help="Time between SIGTERM and SIGKILL.",
    parse=parse_duration,
    field="grace",
    default_text="10s; 30s with a word that is torchrun's alone",
    aliases=("--shutdown-timeout",),
    torchrun="shutdown_timeout",
    environment=("TORCH_ELASTIC_SHUTDOWN_TIMEOUT",),
)

HANG_TIMEOUT: Option[float | None] = Option(
    name="hang-timeout",
    group=OptionGroup.STOPPING,
    metavar="DURATION|auto|off",
    help="Time without msrun.beat() after which a worker hangs that has ever called it.",
    parse=parsers.hang_timeout,
    field="hang_timeout",
    default_text="auto: a warning after 60s or 5 times the longest interval, an end if none works",
)
DETECT_IDLE = Option(
    name="detect-idle",
    group=OptionGroup.STOPPING,
    metavar="DURATION|off",
    help="Time below 1 % of a CPU after which a worker hangs.",
    parse=parsers.idle_timeout,
    field="detect_idle",
    default_text="off",
)

LOG_DIR = Option(
    name="log-dir",
    group=OptionGroup.LOGS,
    metavar="DIR",
    help="Directory of the logs.",
    parse=parsers.text,
    field="log_dir",
    default_text="msrun_logs/JOB_ID",
    torchrun="log_dir",
    unset=frozenset({""}),
)
EMIT_RANK_TABLE = Option(
    name="emit-rank-table",
    group=OptionGroup.LOGS,
    metavar="FILE",
    help="HCCL rank table of the job, written by the node of the scheduler.",
    parse=parsers.text,
    default_text="none",
    unset=frozenset({""}),
)
WORKER_LOG_NAME = Option(
    name="worker-log-name",
    group=OptionGroup.LOGS,
    metavar="PATTERN",
    help="Name of a worker's log, with {rank} {local_rank} {host} {hostname} {ip}.",
    parse=parse_log_name,
    field="worker_log_name",
    default_text="worker_{rank}",
    unset=frozenset({""}),
)
LOG_LIMIT: Option[int | None] = Option(
    name="log-limit",
    group=OptionGroup.LOGS,
    metavar="SIZE|off",
    help="Bytes of the logs of a rank, such as 1GiB; the beginning and the newest lines stay.",
    parse=parsers.log_limit,
    field="log_limit",
    default_text="off",
)
TAIL = Option(
    name="tail",
    group=OptionGroup.LOGS,
    metavar="RANKS",
    help="Ranks shown on the console, such as 0,2-3, all or none.",
    parse=parsers.ranks,
    field="tail",
    default_text="0 at a terminal and of more than 16 workers, else all",
    aliases=("--tail-worker-log",),
    file=FileForm.LIST,
)
TEE: Option[dict[int, int]] = Option(
    name="tee",
    group=OptionGroup.LOGS,
    metavar="STD",
    help="Streams shown on the console, by local rank: 1 stdout, 2 stderr, 3 both; or 0:3,1:1.",
    parse=parsers.std_by_rank,
    field="tee",
    default_text="3, of the ranks of --tail",
    aliases=("-t",),
    torchrun="tee",
)
REDIRECTS: Option[dict[int, int]] = Option(
    name="redirects",
    group=OptionGroup.LOGS,
    metavar="STD",
    help="Streams with a file of their own beside the log, .out or .err, in the form of --tee.",
    parse=parsers.std_by_rank,
    field="redirects",
    default_text="none: one log has both",
    aliases=("-r",),
    torchrun="redirects",
)
DUPLICATE_STDOUT_FILTERS: Option[tuple[str, ...]] = Option(
    name="duplicate-stdout-filters",
    group=OptionGroup.LOGS,
    metavar="TEXT,...",
    help="Copy of the lines of stdout that have one of the texts: filtered_stdout.log.",
    parse=parsers.texts,
    field="stdout_filters",
    torchrun="duplicate_stdout_filters",
    file=FileForm.LIST,
    unset=frozenset({""}),
)
DUPLICATE_STDERR_FILTERS: Option[tuple[str, ...]] = Option(
    name="duplicate-stderr-filters",
    group=OptionGroup.LOGS,
    metavar="TEXT,...",
    help="Copy of the lines of stderr that have one of the texts: filtered_stderr.log.",
    parse=parsers.texts,
    field="stderr_filters",
    torchrun="duplicate_stderr_filters",
    file=FileForm.LIST,
    unset=frozenset({""}),
)
LOCAL_RANKS_FILTER = Option(
    name="local-ranks-filter",
    group=OptionGroup.LOGS,
    metavar="RANKS",
    help="Local ranks that may appear on the console.",
    parse=parsers.ranks,
    field="tail_local",
    torchrun="local_ranks_filter",
    file=FileForm.LIST,
    unset=frozenset({""}),
)

BIND_CORE = Option(
    name="bind-core",
    group=OptionGroup.PLACEMENT,
    metavar="auto|JSON",
    help='CPUs of each worker: auto takes those near its device; or {"device0": ["0-3"]}.',
    parse=parse_bind_core,
    field="bind_core",
    default_text="off",
    arity=Arity.OPTIONAL,
    is_value=is_bind_value,
    file=FileForm.TREE,
)
BIND_NUMA = Option(
    name="bind-numa",
    group=OptionGroup.PLACEMENT,
    metavar="auto|JSON|FILE",
    help='Memory of each worker: auto takes that near its CPUs; or {"device0": [0]}.',
    parse=parse_bind_numa,
    field="bind_numa",
    default_text="off",
    arity=Arity.OPTIONAL,
    is_value=is_numa_value,
    file=FileForm.TREE,
)
NUMA_BINDING = Option(
    name="numa-binding",
    group=OptionGroup.PLACEMENT,
    metavar="MODE",
    help="CPUs and memory near the worker's device: exclusive cores, or all of its node, socket or "
    "core-complex.",
    parse=parsers.numa_binding,
    torchrun="numa_binding",
)

PARALLEL = Option(
    name="parallel",
    group=OptionGroup.PARALLEL,
    metavar="FILE|JSON",
    help="Configuration of msrun.init(): mesh, operator plan, optimizer, pipeline.",
    parse=parse_parallel,
    file=FileForm.TREE,
)

WORKING = options_in(globals())
