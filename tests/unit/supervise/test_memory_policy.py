"""Binding memory, for real in a child and with a kernel that refuses."""

import errno
import os
from pathlib import Path

import pytest

from msrun.supervise.memory_policy import bind_memory

NUMA_MAPS = Path("/proc/self/numa_maps")


class Kernel:
    def __init__(self, code=0):
        self.code = code
        self.calls = []

    def __call__(self, *arguments):
        self.calls.append(arguments)
        return self.code


def in_child(function):
    """Return what `function` returns when a fork of this process calls it."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, str(function()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return text


def first_memory_node():
    online = Path("/sys/devices/system/node/has_memory")
    return int(online.read_text().replace(",", "-").split("-")[0]) if online.exists() else 0


@pytest.mark.skipif(not NUMA_MAPS.exists(), reason="the kernel has no NUMA support")
def test_a_child_that_binds_itself_is_bound():
    node = first_memory_node()

    def bind():
        if problem := bind_memory((node,)):
            return problem
        policies = {line.split()[1] for line in NUMA_MAPS.read_text().splitlines()}
        # Shared memory that a library asked for has its own policy.
        return policies - {"local"}

    answer = in_child(bind)
    if "CAP_SYS_NICE" in answer:
        pytest.skip(answer)
    assert answer == str({f"bind:{node}"})


@pytest.mark.skipif(not NUMA_MAPS.exists(), reason="the kernel has no NUMA support")
def test_a_node_that_is_not_there_is_told():
    answer = in_child(lambda: bind_memory((1023,)))
    assert answer.startswith("the kernel refused NUMA node 1023 (")


@pytest.mark.parametrize(("architecture", "number"), [("x86_64", 238), ("aarch64", 237)])
def test_the_mask_has_one_bit_a_node(architecture, number):
    kernel = Kernel()
    assert bind_memory((0, 9), architecture=architecture, call=kernel) is None
    assert kernel.calls == [(number, 2, b"\x01\x02" + bytes(126), 1025)]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (errno.EPERM, "a container needs CAP_SYS_NICE for it"),
        (errno.ENOSYS, "this kernel cannot"),
        (errno.EINVAL, "no memory there that this process may use"),
        (errno.ENOMEM, "Cannot allocate memory"),
    ],
)
def test_a_refusal_is_a_sentence(code, reason):
    problem = bind_memory((0, 1), architecture="x86_64", call=Kernel(code))
    assert problem == f"the kernel refused NUMA node 0-1 ({reason})"


def test_an_unknown_architecture_is_a_sentence():
    assert bind_memory((0,), architecture="riscv64") == "not known how on riscv64"


@pytest.mark.parametrize(("nodes", "text"), [((), "none"), ((-1,), "-1"), ((1024,), "1024")])
def test_impossible_nodes_are_a_sentence(nodes, text):
    assert bind_memory(nodes, architecture="x86_64") == f"no such NUMA nodes: {text}"
