"""CPU and memory plans on made-up machines."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from msrun.errors import UsageError
from msrun.job import Binding, BindMode
from msrun.supervise.affinity import AffinityPlan, plan_cpus, plan_memory, plan_threads
from msrun.topology import (
    CpuTopology,
    Device,
    DeviceKind,
    parse_number_list,
    render_number_list,
)

AUTO = Binding(mode=BindMode.AUTO)
OFF = Binding()


def machine(*nodes, smt=1, allowed=None, **more):
    """Nodes with these counts of cores; second threads are numbered after all first ones."""
    cores = sum(nodes)
    numa, siblings, first = {}, {}, 0
    for node, count in enumerate(nodes):
        own = []
        for core in range(first, first + count):
            threads = tuple(core + thread * cores for thread in range(smt))
            siblings |= dict.fromkeys(threads, threads)
            own += threads
        numa[node] = tuple(sorted(own))
        first += count
    if allowed is not None:
        numa = {node: tuple(c for c in own if c in allowed) for node, own in numa.items()}
        numa = {node: own for node, own in numa.items() if own}
    return CpuTopology(numa=numa, siblings=siblings, **more)


def gpus(*numa_nodes, first=0):
    return tuple(
        Device(kind=DeviceKind.CUDA, index=index, physical=index + first, numa_node=node)
        for index, node in enumerate(numa_nodes)
    )


def given_to(**by_device):
    numbers = {int(name[6:]): parse_number_list(text) for name, text in by_device.items()}
    return Binding(mode=BindMode.GIVEN, by_device=numbers)


def shown(plan):
    return [render_number_list(own) for own in plan.cpus]


# AUTO, worked examples.


def test_two_nodes_with_eight_gpus_and_smt_give_whole_cores_near_the_gpu():
    cpus = machine(56, 56, smt=2)
    plan = plan_cpus(AUTO, cpus, gpus(0, 0, 0, 0, 1, 1, 1, 1), 8)
    assert shown(plan) == [
        "0-13,112-125",
        "14-27,126-139",
        "28-41,140-153",
        "42-55,154-167",
        "56-69,168-181",
        "70-83,182-195",
        "84-97,196-209",
        "98-111,210-223",
    ]
    assert plan.notes == ()
    assert plan_threads(plan, cpus) == (14,) * 8


def test_gpus_that_interleave_over_nodes_keep_their_own_node():
    plan = plan_cpus(AUTO, machine(4, 4), gpus(1, 0, 1, 0), 4)
    assert shown(plan) == ["4-5", "0-1", "6-7", "2-3"]


def test_four_workers_on_two_cores_are_not_bound():
    cpus = machine(2)
    plan = plan_cpus(AUTO, cpus, (), 4)
    assert plan.cpus == ((), (), (), ())
    assert plan.notes == ("no worker has CPUs of its own: 4 workers on 2 CPUs",)
    assert plan_threads(plan, cpus) == (1, 1, 1, 1)


def test_two_workers_on_two_cores_have_one_each():
    assert shown(plan_cpus(AUTO, machine(2), (), 2)) == ["0", "1"]


def test_four_workers_on_two_cores_with_two_threads_share_cores_and_say_so():
    cpus = machine(2, smt=2)
    plan = plan_cpus(AUTO, cpus, (), 4)
    assert shown(plan) == ["0", "2", "1", "3"]
    assert plan.notes == ("workers share physical cores: 4 workers on 2 cores",)
    assert plan_threads(plan, cpus) == (1, 1, 1, 1)


def test_eight_npus_over_four_nodes_have_two_workers_a_node():
    cpus = machine(48, 48, 48, 48)
    plan = plan_cpus(AUTO, cpus, gpus(0, 0, 1, 1, 2, 2, 3, 3), 8)
    assert shown(plan) == [f"{first}-{first + 23}" for first in range(0, 192, 24)]


def test_eight_npus_that_hang_on_two_of_four_nodes_take_the_rest_from_the_near_free_node():
    far, near = {0: 21, 1: 21}, {0: 12, 1: 10}
    distances = {1: near | {2: 21, 3: 21}, 3: far | {2: 12, 3: 10}}
    cpus = machine(8, 8, 8, 8, distances=distances)
    plan = plan_cpus(AUTO, cpus, gpus(3, 3, 1, 1), 4)
    assert shown(plan) == ["16-19,24-27", "20-23,28-31", "0-3,8-11", "4-7,12-15"]
    assert plan.notes == (
        "workers 2-3 must also use CPUs far from the device: NUMA node 1 has too few",
        "workers 0-1 must also use CPUs far from the device: NUMA node 3 has too few",
    )


def test_npus_of_unknown_node_share_contiguously_by_node():
    plan = plan_cpus(AUTO, machine(4, 4), gpus(None, None, None, None), 4)
    assert shown(plan) == ["0-1", "2-3", "4-5", "6-7"]


def test_a_cpuset_with_holes_is_used_up_and_nothing_else():
    allowed = {1, 2, 3, 6, 9, 10, 14}
    cpus = machine(4, 4, smt=2, allowed=allowed)
    plan = plan_cpus(AUTO, cpus, gpus(0, 1), 2)
    assert shown(plan) == ["1-2,9-10", "3,6,14"]


def test_leftover_cores_are_spread_and_stay_on_their_node():
    plan = plan_cpus(AUTO, machine(9, 9), (), 4)
    assert shown(plan) == ["0-4", "5-8", "9-13", "14-17"]


def test_three_workers_on_two_nodes_split_only_one():
    plan = plan_cpus(AUTO, machine(8, 8), (), 3)
    assert shown(plan) == ["0-4", "8-13", "5-7,14-15"]


def test_more_workers_than_devices_share_what_is_left():
    plan = plan_cpus(AUTO, machine(4, 4), gpus(1), 4)
    assert shown(plan) == ["4-5", "0-1", "2-3", "6-7"]


def test_a_device_on_a_node_outside_the_cpuset_is_told():
    plan = plan_cpus(AUTO, machine(4, 4, allowed={0, 1, 2, 3}), gpus(0, 1), 2)
    assert shown(plan) == ["0-1", "2-3"]
    assert plan.notes == (
        "worker 1 must also use CPUs far from the device: NUMA node 1 has none for this job",
    )


def test_off_binds_nothing_and_says_nothing():
    cpus = machine(8)
    plan = plan_cpus(OFF, cpus, (), 2)
    assert plan == AffinityPlan(cpus=((), ()), numa_nodes=((), ()))
    assert plan_memory(OFF, plan, cpus, ()) == plan
    assert plan_threads(plan, cpus) == (4, 4)


# GIVEN.


def test_given_cpus_go_to_the_device_of_that_number_in_any_order():
    binding = given_to(device1="0-1", device0="2-3,6")
    plan = plan_cpus(binding, machine(8), (), 2)
    assert shown(plan) == ["2-3,6", "0-1"]
    assert plan.notes == ()


def test_given_cpus_follow_the_number_before_visibility():
    binding = given_to(device4="0-1", device5="2-3")
    assert shown(plan_cpus(binding, machine(8), gpus(0, 0, first=4), 2)) == ["0-1", "2-3"]


def test_a_worker_that_is_not_named_is_free_and_told():
    plan = plan_cpus(given_to(device1="0-1"), machine(8), (), 4)
    assert shown(plan) == ["", "0-1", "", ""]
    assert plan.notes == ("--bind-core does not name workers 0,2-3, not bound",)


def test_a_device_without_worker_is_told():
    plan = plan_cpus(given_to(device0="0", device3="3"), machine(8), gpus(0, 0, 0, 0), 1)
    assert shown(plan) == ["0"]
    assert plan.notes == ("--bind-core: device3 has no worker, so its entry is not used",)


def test_one_cpu_for_two_workers_is_told():
    plan = plan_cpus(given_to(device0="0-2", device1="2-3"), machine(8), (), 2)
    assert plan.notes == ("--bind-core gives CPU 2 to several workers",)
    assert plan_threads(plan, machine(8)) == (2, 1)


@pytest.mark.parametrize(
    ("binding", "message"),
    [
        (
            given_to(device0="6-9"),
            "--bind-core gives device0 CPU 8-9, not available on this node (choose from 0-7)",
        ),
        (
            given_to(device0="0", device2="1"),
            "--bind-core names device2, which no worker on this node uses (choose from 0-1)",
        ),
        (given_to(device0=""), "--bind-core gives device0 no CPU (leave the device out)"),
    ],
)
def test_given_cpus_that_cannot_be_meant_are_refused(binding, message):
    with pytest.raises(UsageError) as caught:
        plan_cpus(binding, machine(8), (), 2)
    assert caught.value.message == message


def test_a_number_that_visibility_hides_is_refused():
    with pytest.raises(UsageError, match=r"device0, which no worker .* \(choose from 4-5\)"):
        plan_cpus(given_to(device0="0"), machine(8), gpus(0, 0, first=4), 2)


def test_workers_beyond_the_devices_are_named_by_rank_unless_a_device_has_that_number():
    binding = given_to(device1="1", device2="2")
    assert shown(plan_cpus(binding, machine(8), gpus(0, first=1), 3)) == ["1", "", "2"]


# Memory.


def test_memory_follows_the_cpus():
    cpus = machine(4, 4)
    plan = plan_memory(AUTO, plan_cpus(AUTO, cpus, gpus(1, 0), 2), cpus, gpus(1, 0))
    assert plan.numa_nodes == ((1,), (0,))
    assert shown(plan) == ["4-7", "0-3"]


def test_memory_without_cpus_follows_the_device_and_takes_the_cpus_along():
    cpus = machine(4, 4)
    plan = plan_memory(AUTO, plan_cpus(OFF, cpus, (), 3), cpus, gpus(1, 0, 1))
    assert plan.numa_nodes == ((1,), (0,), (1,))
    assert shown(plan) == ["4-7", "0-3", "4-7"]
    assert plan_threads(plan, cpus) == (2, 4, 2)


@pytest.mark.parametrize(
    ("workers", "nodes"),
    [
        (1, [(0, 1, 2, 3)]),
        (2, [(0, 1), (2, 3)]),
        (4, [(0,), (1,), (2,), (3,)]),
        (8, [(0,), (0,), (1,), (1,), (2,), (2,), (3,), (3,)]),
    ],
)
def test_memory_without_devices_is_shared_in_order(workers, nodes):
    cpus = machine(2, 2, 2, 2)
    plan = plan_memory(AUTO, plan_cpus(OFF, cpus, (), workers), cpus, ())
    assert list(plan.numa_nodes) == nodes


def test_a_node_without_memory_is_never_bound():
    cpus = machine(4, 4, memory_nodes=(0,))
    plan = plan_memory(AUTO, plan_cpus(AUTO, cpus, (), 2), cpus, ())
    assert plan.numa_nodes == ((0,), ())
    assert plan.notes == ("the memory of worker 1 is not bound: no memory is near their CPUs",)


def test_given_memory_goes_to_the_device_of_that_number():
    cpus = machine(4, 4, memory_nodes=(0, 1, 2))
    plan = plan_memory(given_to(device0="0-1", device1="2"), plan_cpus(OFF, cpus, (), 2), cpus, ())
    assert plan.numa_nodes == ((0, 1), (2,))
    assert shown(plan) == ["0-7", ""]


def test_given_memory_does_not_move_bound_cpus():
    cpus = machine(4, 4)
    plan = plan_cpus(given_to(device0="0"), cpus, (), 1)
    plan = plan_memory(given_to(device0="1"), plan, cpus, ())
    assert (plan.cpus, plan.numa_nodes) == (((0,),), ((1,),))


def test_given_memory_that_is_not_there_is_refused():
    cpus = machine(4)
    with pytest.raises(UsageError) as caught:
        plan_memory(given_to(device0="1"), plan_cpus(OFF, cpus, (), 1), cpus, ())
    assert caught.value.message == (
        "--bind-numa gives device0 NUMA node 1, not available on this node (choose from 0)"
    )


# Threads.


def test_threads_stay_below_the_cpu_time_that_cgroups_grant():
    cpus = machine(64, quota=8.5)
    assert plan_threads(plan_cpus(OFF, cpus, (), 2), cpus) == (4, 4)
    assert plan_threads(plan_cpus(AUTO, cpus, (), 2), cpus) == (4, 4)
    assert plan_threads(plan_cpus(OFF, cpus, (), 16), cpus) == (1,) * 16


def test_threads_count_cores_and_not_their_hardware_threads():
    cpus = machine(8, smt=2)
    assert plan_threads(plan_cpus(OFF, cpus, (), 2), cpus) == (4, 4)


# AUTO, any machine.


@st.composite
def cases(draw):
    nodes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    smt = draw(st.sampled_from([1, 2]))
    cpus = machine(*nodes, smt=smt)
    if draw(st.booleans()):
        allowed = draw(st.sets(st.sampled_from(cpus.cpus), min_size=1))
        cpus = machine(*nodes, smt=smt, allowed=allowed)
    if draw(st.booleans()):
        cost = st.integers(11, 40)
        count = range(len(nodes))
        distances = {a: {b: 10 if a == b else draw(cost) for b in count} for a in count}
        cpus = replace(cpus, distances=distances)
    node = st.one_of(st.none(), st.integers(0, len(nodes) - 1))
    devices = gpus(*draw(st.lists(node, max_size=16)))
    return cpus, devices, draw(st.integers(1, 16))


@settings(max_examples=150, deadline=None)
@given(cases())
def test_auto_shares_are_disjoint_even_complete_and_near(case):
    cpus, devices, size = case
    plan = plan_cpus(AUTO, cpus, devices, size)
    assert plan == plan_cpus(AUTO, cpus, devices, size)
    assert len(plan.cpus) == size
    if len(cpus.cpus) < size:
        assert plan.cpus == ((),) * size
        assert plan.notes
        return
    used = Counter(cpu for own in plan.cpus for cpu in own)
    assert sorted(used) == list(cpus.cpus)
    assert set(used.values()) == {1}
    assert all(own == tuple(sorted(own)) for own in plan.cpus)
    units = [{cpus.core(cpu) for cpu in own} for own in plan.cpus]
    whole = len({cpus.core(cpu) for cpu in cpus.cpus}) >= size
    sizes = list(map(len, units if whole else plan.cpus))
    assert max(sizes) - min(sizes) <= 1
    if whole:
        assert sum(sizes) == len(set().union(*units))
        check_homes(cpus, devices, units)


def check_homes(cpus, devices, units):
    quota = min(map(len, units))
    homes = {d.index: d.numa_node for d in devices if d.index < len(units)}
    for home, residents in Counter(h for h in homes.values() if h is not None).items():
        here = {cpus.core(cpu) for cpu in cpus.numa.get(home, ())}
        fair = min(quota, len(here) // residents)
        assert all(len(units[rank] & here) >= fair for rank, own in homes.items() if own == home)


@settings(max_examples=50, deadline=None)
@given(cases())
def test_auto_memory_is_near_the_cpus_and_threads_fit(case):
    cpus, devices, size = case
    plan = plan_memory(AUTO, plan_cpus(AUTO, cpus, devices, size), cpus, devices)
    for own, nodes in zip(plan.cpus, plan.numa_nodes, strict=True):
        assert set(own) <= {cpu for node in nodes for cpu in cpus.numa[node]}
        assert nodes
    threads = plan_threads(plan, cpus)
    assert min(threads) >= 1
    cores = len({cpus.core(cpu) for cpu in cpus.cpus})
    assert sum(threads) <= max(cores, size)


# Lists of numbers.


@given(st.sets(st.integers(0, 300)))
def test_a_number_list_reads_back(numbers):
    assert parse_number_list(render_number_list(numbers)) == tuple(sorted(numbers))


@pytest.mark.parametrize("text", ["a", "1-", "-1", "1,,x", "1-2-3"])
def test_what_is_no_number_list_is_refused(text):
    with pytest.raises(ValueError, match="invalid literal"):
        parse_number_list(text)
