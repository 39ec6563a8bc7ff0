"""MindSpore's ways to write `--bind-core` and `--bind-numa`, and torchrun's `--numa-binding`."""

import json

import pytest
from msgspec.structs import replace

from msrun.job import Binding, BindMode
from msrun.supervise.affinity import plan_cpus, plan_memory
from msrun.topology import CpuTopology, Device, DeviceKind

AUTO = Binding(mode=BindMode.AUTO)
OFF = Binding()


def given(**by_device):
    return Binding(
        mode=BindMode.GIVEN,
        by_device={
            int(name.removeprefix("device")): numbers for name, numbers in by_device.items()
        },
    )


@pytest.fixture
def bind(msrun):
    """Return CPU and memory binding of a job with these words."""

    def call(*words):
        outcome = msrun([*words, "train.py"])
        assert outcome.err == ""
        return outcome.job.bind_core, outcome.job.bind_numa

    return call


@pytest.mark.parametrize(
    ("value", "cpus"),
    [
        ({"device0": ["0-3"]}, given(device0=(0, 1, 2, 3))),
        (
            {"device0": ["0-1", "3,2"], "device1": [" 4 "]},
            given(device0=(0, 1, 2, 3), device1=(4,)),
        ),
        ({"device_12": ["7"]}, given(device12=(7,))),
    ],
)
def test_given_cpus(bind, value, cpus):
    assert bind("--bind_core", json.dumps(value)) == (cpus, OFF)


@pytest.mark.parametrize(
    ("value", "memory"),
    [
        ({"device0": ["0"]}, given(device0=(0,))),
        (
            {"device0": 1, "device1": "0-1", "device2": [0, "1"]},
            given(device0=(1,), device1=(0, 1), device2=(0, 1)),
        ),
    ],
)
def test_given_memory(bind, value, memory):
    assert bind(f"--bind_numa={json.dumps(value)}") == (OFF, memory)


def test_both(bind):
    words = ["--bind-core", '{"device0": ["2"]}', "--bind-numa", '{"device0": [1]}']

    assert bind(*words) == (given(device0=(2,)), given(device0=(1,)))


@pytest.mark.parametrize(
    "words", ["--numa-binding exclusive --bind-core", "--bind-numa --bind-core"]
)
def test_all_automatic(bind, words):
    assert bind(*words.split()) == (AUTO, AUTO)


def test_the_scheduler_is_not_bound(msrun):
    value = '{"scheduler": ["0"], "device0": ["1"]}'

    outcome = msrun(["--bind-core", value, "train.py"])

    assert outcome.job.bind_core == given(device0=(1,))
    assert outcome.err == (
        f"note: --bind-core {value}: the scheduler is not bound, so its entry is not used\n"
    )


@pytest.mark.parametrize(
    ("value", "end"),
    [
        (
            "[" * 20_000,
            'is no JSON object (choose true, false, auto or such as {"device0": ["0-3"]})',
        ),
        ("[" * 20_000 + ".json", "cannot be read: File name too long"),
    ],
    ids=["json", "path"],
)
def test_a_very_long_value(msrun, value, end):
    outcome = msrun([f"--bind-numa={value}", "train.py"])

    assert outcome.err == f"error: --bind-numa '{'[' * 57}...' {end}\n"


# MindSpore's bind_config file.


@pytest.fixture
def bind_file(msrun, here):
    def call(content, *words):
        text = content if isinstance(content, str) else json.dumps(content)
        (here / "bind.json").write_text(text)
        return msrun(["--bind_numa", "bind.json", *words, "train.py"])

    return call


def config(cpu="none", memory="none", **more):
    return {"bind_config": {"bind_cpu_mode": cpu, "bind_memory_mode": memory}, **more}


@pytest.mark.parametrize(
    ("content", "cpus", "memory"),
    [
        (config(), OFF, OFF),
        ({"bind_config": {}}, OFF, OFF),
        (config(cpu="cpu", bind_cpu={"device0": {"main": "0-1,3"}}), given(device0=(0, 1, 3)), OFF),
        (
            config(cpu="numa", bind_cpu={"device0": 1, "device_1": "0-1"}),
            given(device0=(2, 3), device1=(0, 1, 2, 3)),
            OFF,
        ),
        (config(memory="numa", bind_memory={"device0": 0}), OFF, given(device0=(0,))),
        (
            config(
                cpu="cpu",
                memory="numa",
                bind_cpu={"device0": {"main": "0"}},
                bind_memory={"device0": "1"},
            ),
            given(device0=(0,)),
            given(device0=(1,)),
        ),
    ],
)
def test_a_file(bind_file, content, cpus, memory):
    outcome = bind_file(content)

    assert outcome.err == ""
    assert (outcome.job.bind_core, outcome.job.bind_numa) == (cpus, memory)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            "{",
            (
                "'bind.json' is no JSON object "
                '(choose true, false, auto or such as {"device0": ["0-3"]})'
            ),
        ),
        ({}, "'bind.json': bind_config: null is no JSON object"),
        (
            config(cpu="all"),
            "'bind.json': bind_config.bind_cpu_mode: \"all\" is unknown (choose cpu, numa or none)",
        ),
        (
            config(memory="cpu"),
            "'bind.json': bind_config.bind_memory_mode: \"cpu\" is unknown (choose numa or none)",
        ),
        (config(cpu="cpu"), "'bind.json': bind_cpu: null is no JSON object"),
        (
            config(cpu="cpu", bind_cpu={"device0": "0"}),
            "'bind.json': bind_cpu.device0: \"0\" is no JSON object",
        ),
        (
            config(cpu="cpu", bind_cpu={"device0": {"main": "0", "minddata": "1"}}),
            "'bind.json': bind_cpu.device0.minddata binds threads of MindSpore's own (choose main)",
        ),
        (
            config(cpu="cpu", bind_cpu={"device0": {"main": 3}}),
            '\'bind.json\': device0: 3 is no list such as ["0-3", "8,9"]',
        ),
        (
            {"bind_config": {"actor_thread_fix_bind": True}},
            "'bind.json': actor_thread_fix_bind is for MindSpore's own threads (leave it out)",
        ),
    ],
)
def test_a_file_is_refused(bind_file, content, sentence):
    outcome = bind_file(content)

    assert (outcome.code, outcome.err) == (2, f"error: --bind_numa {sentence}\n")


def test_a_numa_node_that_is_not_there(bind_file):
    outcome = bind_file(config(cpu="numa", bind_cpu={"device0": 5}))

    assert outcome.err == (
        "error: --bind_numa bind.json names NUMA node 5, which is not available (choose from 0-1)\n"
    )


def test_a_file_contradicts_a_flag(bind_file):
    content = config(cpu="cpu", bind_cpu={"device0": {"main": "0"}})

    outcome = bind_file(content, "--bind-core")

    assert outcome.err == "error: --bind_numa bind.json contradicts --bind-core true\n"


# torchrun's modes, on a made-up machine.

# Two sockets of two NUMA nodes of two core complexes of two CPUs.
NODES = {node: tuple(range(4 * node, 4 * node + 4)) for node in range(4)}
SOCKETS = {cpu: tuple(range(cpu // 8 * 8, cpu // 8 * 8 + 8)) for cpu in range(16)}
COMPLEXES = {cpu: (cpu // 2 * 2, cpu // 2 * 2 + 1) for cpu in range(16)}
CPUS = CpuTopology(
    numa=NODES, siblings={cpu: (cpu,) for cpu in range(16)}, memory_nodes=(0, 1, 2, 3)
)


@pytest.fixture
def bind_near(msrun, system):
    """Return the CPUs and memory nodes of each worker, and what was noted."""

    def call(mode, *nodes_of_devices, workers=None, cpus=CPUS):
        devices = tuple(
            Device(kind=DeviceKind.CUDA, index=i, physical=i, numa_node=node)
            for i, node in enumerate(nodes_of_devices)
        )
        system.machine = replace(system.machine, cpus=cpus, devices=devices)
        outcome = msrun(
            f"--numa-binding {mode} --nproc-per-node {workers or len(devices)} train.py"
        )
        assert outcome.code == 0, outcome.err
        job = outcome.job
        plan = plan_cpus(job.bind_core, cpus, devices, job.workers_per_node)
        plan = plan_memory(job.bind_numa, plan, cpus, devices)
        return list(plan.cpus), list(plan.numa_nodes), outcome.err + "".join(plan.notes)

    return call


@pytest.fixture(autouse=True)
def neighbours(system):
    system.neighbours |= {"socket": SOCKETS, "core-complex": COMPLEXES}


@pytest.mark.parametrize(
    ("mode", "cpus", "memory"),
    [
        ("node", [NODES[1], NODES[1], NODES[2]], [(1,), (1,), (2,)]),
        ("socket", [SOCKETS[0], SOCKETS[0], SOCKETS[8]], [(0, 1), (0, 1), (2, 3)]),
        ("core-complex", [(4, 5), (6, 7), (8, 9)], [(1,), (1,), (2,)]),
    ],
)
def test_workers_get_what_is_near_their_devices(bind_near, mode, cpus, memory):
    assert bind_near(mode, 1, 1, 2) == (cpus, memory, "")


def test_exclusive_cores_are_nobody_elses(bind_near):
    """Beside those of its device's node a worker gets its part of nodes that have no device."""
    cpus, _, _ = bind_near("exclusive", 1, 1, 2)

    assert sorted(cpu for own in cpus for cpu in own) == list(range(16))
    assert {4, 5} <= set(cpus[0]) | set(cpus[1])
    assert set(NODES[2]) <= set(cpus[2])


def test_core_complexes_are_shared_in_turn_where_there_are_too_few(bind_near):
    cpus, _, _ = bind_near("core-complex", 3, 3, 3)

    assert cpus == [(12, 13), (14, 15), (12, 13)]


def test_the_larger_core_complex_is_first(bind_near, system):
    numa = {0: (0, 1, 2, 3, 4)}
    system.neighbours["core-complex"] = dict.fromkeys((0, 1), (0, 1)) | dict.fromkeys(
        (2, 3, 4), (2, 3, 4)
    )
    cpus = CpuTopology(numa=numa, siblings={cpu: (cpu,) for cpu in range(5)}, memory_nodes=(0,))

    assert bind_near("core-complex", 0, 0, cpus=cpus)[0] == [(2, 3, 4), (0, 1)]


def test_a_cache_that_reaches_beyond_a_node_counts_by_node(bind_near, system):
    system.neighbours["core-complex"] = SOCKETS

    assert bind_near("core-complex", 1, 2)[0] == [NODES[1], NODES[2]]


@pytest.mark.parametrize(
    ("mode", "cpus"),
    [
        ("node", [NODES[0], NODES[2]]),
        ("socket", [SOCKETS[0], SOCKETS[8]]),
        ("core-complex", [(0, 1), (8, 9)]),
    ],
)
def test_workers_without_devices_are_spread(bind_near, mode, cpus):
    """torchrun refuses them."""
    assert bind_near(mode, workers=2)[0] == cpus


@pytest.mark.parametrize(("mode", "noun"), [("socket", "a socket"), ("core-complex", "a cache")])
def test_a_machine_that_does_not_tell_counts_by_node_and_says_so(bind_near, system, mode, noun):
    system.neighbours.clear()

    cpus, _, said = bind_near(mode, 1, 2)

    assert cpus == [NODES[1], NODES[2]]
    assert said == (
        f"note: --numa-binding {mode}: this machine does not tell which CPUs share {noun}, "
        "so each NUMA node counts as one\n"
    )


def test_cpus_that_were_given_go_before(msrun):
    outcome = msrun(["--numa-binding", "socket", "--bind-core", '{"device0": ["1"]}', "train.py"])

    assert outcome.err.startswith("error: --numa-binding socket contradicts --bind-core")


def test_a_binding_is_given_and_may_be_shared(msrun, system):
    system.machine = replace(system.machine, cpus=CPUS)
    job = msrun("--numa-binding node train.py").job

    assert (job.bind_core.mode, job.bind_core.is_shared) == (BindMode.GIVEN, True)
