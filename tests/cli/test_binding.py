"""MindSpore's ways to write `--bind-core` and `--bind-numa`."""

import json

import pytest

from msrun.job import Binding, BindMode

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


@pytest.mark.parametrize("words", ["--numa-binding node --bind-core", "--bind-numa --bind-core"])
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
