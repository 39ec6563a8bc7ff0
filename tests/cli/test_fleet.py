"""Jobs whose backend starts the agents: what each node is told, and what is refused."""

import json

import pytest
import yaml

from msrun.cli.options.fleet import FLEET_TABLE
from msrun.fleet import parse_order
from ranktable import Inventory, InventoryDevice, build_table, render_table


@pytest.fixture
def hosts(here):
    (here / "hosts").write_text("node[0-2] slots=2\n")
    devices = tuple(InventoryDevice(device_id=i) for i in (4, 5))
    servers = [Inventory(server_id=f"10.0.0.{i}", devices=devices) for i in (1, 2)]
    (here / "table.json").write_text(render_table(build_table(servers)))
    return here


@pytest.fixture
def submitted(msrun, system, hosts):
    """Return the plan that a call submits."""

    def call(words, **variables):
        outcome = msrun(words, **variables)
        assert (outcome.code, outcome.err, outcome.job) == (7, "", None), hosts
        return system.plans.pop()

    return call


def words_of(plan):
    return [list(parse_order(command.order).words) for command in plan.commands]


def test_every_host_gets_its_words(submitted, hosts):
    plan = submitted("--launcher ssh --hostfile hosts --max-restarts 3 train.py --lr 1")

    start = ["--workers-per-node", "2", "--job-id", "train-0a1b2c"]
    assert words_of(plan) == [[*start, "--max-restarts=3", "train.py", "--lr", "1"]] * 3
    assert [command.node for command in plan.commands] == ["node0", "node1", "node2"]
    assert (plan.fleet.nnodes, plan.fleet.cwd) == (3, str(hosts))


def test_agents_get_options_from_wherever_they_are(submitted, hosts):
    (hosts / "job.yaml").write_text(
        "launcher: ssh\nhostfile: hosts\ngrace: 5s\nenv: {A: 1}\nscript: train.py\nargs: [x]\n"
    )

    plan = submitted("--config job.yaml --env B=2", MSRUN_ROLE="r", PET_MAX_RESTARTS="2")

    assert words_of(plan)[0][4:] == [
        "--env=A=1",
        "--env=B=2",
        "--role=r",
        "--max-restarts=2",
        "--grace=5s",
        "train.py",
        "x",
    ]


@pytest.mark.parametrize(
    ("words", "nodes"),
    [
        ("--hostfile hosts --nnodes 2", ["node0", "node1"]),
        ("--hostfile hosts --exclude node0", ["node1", "node2"]),
        ("--hostfile hosts --include node1@node2:1", ["node1", "node2"]),
        ("--rank-table-file table.json", ["10.0.0.1", "10.0.0.2"]),
        (
            "--rank-table-file table.json --workers-per-node 2 --worker_num 4",
            ["10.0.0.1", "10.0.0.2"],
        ),
    ],
)
def test_which_nodes_there_are(submitted, words, nodes):
    plan = submitted(f"--launcher ssh {words} train.py")

    assert [command.node for command in plan.commands] == nodes
    assert plan.fleet.nnodes == len(nodes)


def test_a_rank_table_chooses_devices(submitted):
    plan = submitted("--launcher ssh --rank-table-file table.json train.py")

    order = parse_order(plan.commands[1].order)
    assert order.env["ASCEND_RT_VISIBLE_DEVICES"] == "4,5"
    assert order.words[:2] == ("--workers-per-node", "2")


@pytest.mark.parametrize(
    ("words", "is_told"),
    [("", True), ("--nnodes 2", True), ("--nnodes 1:2", False), ("--exclude 10.0.0.1", False)],
)
def test_workers_are_told_of_a_table_that_is_the_jobs(submitted, hosts, words, is_told):
    plan = submitted(f"--launcher ssh --rank-table-file table.json {words} train.py")

    expected = {"RANK_TABLE_FILE": str(hosts / "table.json")} if is_told else {}
    assert plan.fleet.env == expected


def test_agents_learn_of_torchruns_time_to_end(submitted):
    plan = submitted("--launcher ssh --hostfile hosts --nproc-per-node 2 train.py")

    assert "--grace=30s" in words_of(plan)[0]


def test_nodes_that_come_and_go(submitted):
    plan = submitted("--launcher ssh --hostfile hosts --nnodes 1:3 train.py")

    assert plan.fleet.nnodes == 3
    assert "--nnodes=1:3" in words_of(plan)[0]


def test_the_scheduler_and_the_python_that_are_named(submitted):
    words = "--master-addr 10.0.0.9 --master-port 7 --remote-python /p/python --job-id j"
    plan = submitted(f"--launcher ssh --hostfile hosts {words} train.py")

    order = parse_order(plan.commands[0].order)
    assert (order.master_addr, order.master_port) == ("10.0.0.9", 7)
    assert "exec /p/python -P -m launchers.remote" in plan.commands[0].argv[-1]
    assert order.words == ("--workers-per-node", "2", "--job-id", "j", "train.py")


def test_slurm_needs_no_hosts(submitted):
    plan = submitted("--launcher slurm --nnodes 4 --partition p --time 1:00:00 train.py")

    script = plan.files["job.sbatch"].splitlines()
    assert script[2:6] == [
        "#SBATCH --nodes=4",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --partition=p",
        "#SBATCH --time=1:00:00",
    ]


def test_words_of_srun_and_mpirun(submitted):
    plan = submitted("--launcher slurm -N 4 -n 16 --time 1h --detach train.py")
    assert plan.files == submitted("--launcher slurm --nodes=4 -n16 --time 1:00:00 train.py").files
    assert plan.fleet.nnodes == 4
    assert "--worker-num=16" in plan.fleet.words


TEXTS = {
    "hostfile": ("ssh", "hosts", "--hostfile"),
    "rank-table-file": ("ssh", "table.json", "--rank-table-file"),
    "include": ("ssh", "node1", "--hostfile=hosts"),
    "exclude": ("ssh", "node1", "--hostfile=hosts"),
    "remote-python": ("ssh", "py", "--hostfile=hosts"),
    "ssh": ("ssh", "ssh -v", "--hostfile=hosts"),
    "partition": ("slurm", "p", ""),
    "time": ("slurm", "1:00", ""),
    "account": ("slurm", "a", ""),
    "gpus-per-node": ("slurm", "8", ""),
    "cpus-per-node": ("slurm", "8", ""),
    "signal-seconds": ("slurm", "60", ""),
    "requeue": ("slurm", "true", ""),
    "output": ("slurm", "o", ""),
    "sbatch-args": ("slurm", "--exclusive", ""),
    "image": ("kubernetes", "t", "--image"),
    **{
        name: ("kubernetes", text, "--image=t --nnodes=2")
        for name, text in {
            "namespace": "team",
            "context": "lab",
            "resources": "cpu=8",
            "shm": "1Gi",
            "volumes": "pvc:a:/a",
            "workdir": "/train",
            "ship": "true",
            "ttl": "1h",
            "node-selector": "a=b",
            "tolerations": "gpu",
            "topology-spread": "zone",
            "priority-class": "high",
            "service-account": "s",
            "image-pull-secrets": "s",
            "suspend": "true",
            "k8s-kind": "jobset",
            "k8s-queue": "q",
            "k8s-gang": "volcano",
            "k8s-patch": "patch.yaml",
        }.items()
    },
}


def test_every_option_is_tried():
    # mpirun's ask the program for its version, so they are tried with real ones.
    of_mpirun = {"mpirun", "mpirun-args", "ranks-by"}
    assert {option.name for option in FLEET_TABLE} - of_mpirun == set(TEXTS)


@pytest.mark.parametrize("name", TEXTS)
def test_every_form_means_the_same(submitted, hosts, name):
    launcher, text, more = TEXTS[name]
    words = [f"--launcher={launcher}", *(more.split() if "=" in more else [])]
    (hosts / "patch.yaml").write_text("metadata: {annotations: {who: me}}\n")
    (hosts / "job.yaml").write_text(f"{name}: {json.dumps(text)}\n")
    without = None if more.startswith("--") and "=" not in more else submitted([*words, "train.py"])

    by_flag = submitted([*words, f"--{name}={text}", "train.py"])
    variable = f"MSRUN_{name.replace('-', '_').upper()}"
    others = [submitted([*words, "train.py"], **{variable: text})]
    others += [submitted([*words, "--config=job.yaml", "train.py"])]

    assert others == [by_flag] * 2
    assert by_flag != without


KUBERNETES = "--launcher kubernetes --image t --job-id j --nnodes 2 train.py --lr 3e-4"


@pytest.mark.usefixtures("hosts")
def test_manifests_are_printed_as_they_are(msrun, system):
    printed = msrun(f"plan {KUBERNETES}")
    found = list(yaml.safe_load_all(printed.out))

    assert (printed.code, printed.err) == (0, "")
    assert [(each["kind"], each["metadata"]["name"]) for each in found] == [
        ("Service", "j"),
        ("Job", "j"),
    ]
    container = found[1]["spec"]["template"]["spec"]["containers"][0]
    assert container["args"] == ["train.py", "--lr", "3e-4"]
    assert system.plans == []


def test_manifests_are_written_as_they_are_printed(msrun, hosts):
    printed = msrun(f"plan {KUBERNETES}")
    written = msrun(f"plan -o new/dir {KUBERNETES}")

    files = sorted((hosts / "new/dir").iterdir(), reverse=True)
    assert [file.name for file in files] == ["service.yaml", "job.yaml"]
    assert (written.out, written.err) == ("", "note: service.yaml, job.yaml are in new/dir\n")
    assert "---\n".join(file.read_text() for file in files) == printed.out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("-o d train.py", "-o d needs a backend that starts other nodes"),
        (f"-o train.py/d {KUBERNETES}", "-o train.py/d cannot be written: Not a directory"),
        (
            "-o d --launcher ssh --hostfile hosts train.py",
            "-o d: this backend has no files to write",
        ),
    ],
)
@pytest.mark.usefixtures("hosts")
def test_files_that_are_not_written(msrun, words, sentence):
    assert msrun(f"plan {words}").err.splitlines()[0] == f"error: {sentence}"


@pytest.mark.usefixtures("hosts")
def test_a_plan_for_people_and_for_programs(msrun):
    words = "--launcher ssh --hostfile hosts --nnodes 1 --job-id j --ssh s train.py"
    plain, document = msrun(f"plan {words}"), msrun(f"plan --json {words}")

    lines = plain.out.splitlines()
    assert (plain.code, lines[0]) == (0, "node0:")
    assert lines[1].startswith("  s -T -e none ")
    assert lines[2].startswith('  reads the secret, then {"words":["--workers-per-node","2",')
    found = json.loads(document.out)
    assert found["commands"][0]["node"] == "node0"
    assert found["fleet"]["job_id"] == "j"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--launcher ssh train.py", "--launcher ssh needs the hosts"),
        (
            "--launcher ssh --hostfile hosts --node-rank 0 train.py",
            "--node-rank 0 is for one node, and ssh starts them all",
        ),
        (
            "--launcher ssh --hostfile hosts --nnodes 4 train.py",
            "--nnodes 4 is more than the 3 hosts that are named",
        ),
        (
            "--launcher ssh --hostfile hosts --rank-table-file table.json train.py",
            "--hostfile hosts contradicts --rank-table-file table.json (choose one)",
        ),
        (
            "--launcher ssh --rank-table-file table.json --workers-per-node 4 train.py",
            (
                "--workers-per-node 4 contradicts --rank-table-file table.json, "
                "which gives node 10.0.0.1 2"
            ),
        ),
        (
            "--launcher ssh --rank-table-file table.json --nnodes 1 --worker_num 4 train.py",
            "--worker_num 4 contradicts --rank-table-file table.json, whose nodes have 2",
        ),
        (
            "--launcher slurm --include a train.py",
            "--include and --exclude need --hostfile, whose hosts they choose",
        ),
        (
            "--launcher ssh --hostfile hosts --partition p train.py",
            "--launcher ssh has no option --partition (choose --ssh)",
        ),
        ("--launcher ssh --hostfile hosts", "no SCRIPT is given"),
        (
            "--launcher ssh --hostfile none train.py",
            "hostfile none cannot be read: No such file or directory",
        ),
        (
            "--launcher ssh --hostfile train.py train.py",
            "train.py:1: host \"print('hello')\" is no host name or address",
        ),
        (
            "--launcher ssh --ranks-by mpi --hostfile hosts train.py",
            "--ranks-by mpi needs --launcher mpirun",
        ),
        (
            "--launcher ssh --ranks-by us --hostfile hosts train.py",
            "--ranks-by 'us' is unknown (choose msrun or mpi)",
        ),
        (
            "--launcher mpirun --mpirun /none/mpirun train.py",
            "--mpirun /none/mpirun is not there",
        ),
        (
            "--launcher slurm --nodes 4 --time soon train.py",
            "--time 'soon' is no duration (choose such as 90s, 10m, 1h30m, 0.5 or inf)",
        ),
        ("--partition p train.py", "--partition p needs a backend that starts other nodes"),
        (
            "--launcher slurm --no-join --ssh s train.py",
            (
                "--launcher slurm has no option --ssh (choose --sbatch-args, --detach, "
                "--partition, --time, --account, --gpus-per-node, --cpus-per-node, "
                "--signal-seconds, --requeue, --output)"
            ),
        ),
    ],
)
def test_what_is_refused(msrun, hosts, words, sentence):
    outcome = msrun(words)

    assert hosts.is_dir()
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.splitlines()[0] == f"error: {sentence}"
