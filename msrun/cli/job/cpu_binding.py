"""CPU and memory binding of workers, from the three options that ask for it."""

from __future__ import annotations

from collections.abc import Sequence

from msrun.cli.options import catalog as options
from msrun.cli.options.binding import BindRequest
from msrun.cli.options.settings import Given, Settings, strongest
from msrun.cli.system import System
from msrun.errors import UsageError
from msrun.job import Binding, BindMode
from msrun.topology import Machine, render_number_list

Numbers = tuple[int, ...]

_AUTO = Binding(mode=BindMode.AUTO)


def choose_binding(
    settings: Settings, machine: Machine, workers: int, system: System
) -> tuple[Given[Binding], Given[Binding], list[str]]:
    """Return CPU binding, memory binding and notes.

    Args:
        settings: The options.
        machine: This machine.
        workers: Workers of this node.
        system: Knows what CPUs share.

    Raises:
        UsageError: Options contradict each other, or a NUMA node is not there.
    """
    core, numa = settings.get(options.BIND_CORE), settings.get(options.BIND_NUMA)
    near = settings.get(options.NUMA_BINDING)
    both = Given(_AUTO, near.source, near.text) if near else None
    notes = [
        f"{given.cite()}: {note}" for given in (core, numa) if given for note in given.value.notes
    ]
    own = both
    if near and near.value != "exclusive":
        domains, problem = _domains(near.value, machine, system)
        own = Given(_nearest(domains, machine, workers), near.source, near.text)
        notes += [f"{near.cite()}: {problem}"] * bool(problem)
    cpus = strongest(_half(core, core and core.value.cpus), _cpus(numa, machine), own)
    memory = strongest(_half(numa, numa and numa.value.memory), both)
    return cpus or Given(Binding()), memory or Given(Binding()), notes


def _domains(mode: str, machine: Machine, system: System) -> tuple[list[Numbers], str]:
    """Return the CPUs of each NUMA node, socket or core complex, by lowest CPU, and a note."""
    nodes = list(machine.cpus.numa.values())
    if mode == "node":
        return nodes, ""
    neighbours = system.cpu_neighbours(mode)
    if not neighbours:
        noun = "which CPUs share a socket" if mode == "socket" else "which CPUs share a cache"
        return nodes, f"this machine does not tell {noun}, so each NUMA node counts as one"
    groups = {near for cpu in machine.cpus.cpus if (near := neighbours.get(cpu))}
    if mode == "core-complex":  # which may reach beyond a node, where that is a part of a socket
        groups = {tuple(cpu for cpu in near if cpu in node) for near in groups for node in nodes}
    return sorted(filter(None, groups)), ""


def _nearest(domains: Sequence[Numbers], machine: Machine, workers: int) -> Binding:
    """Return the binding of each worker to all CPUs of one domain, that of its device.

    Source: torch/numa/binding.py, of torch 2.13.  Where the NUMA node of a device has several
    domains, its workers take turns, the largest first.  torch refuses a worker without a device;
    here such workers are spread over the machine.
    """
    by_index = {device.index: device for device in machine.devices}
    homes = [by_index[i].numa_node if i in by_index else None for i in range(workers)]
    chosen: dict[int, Numbers] = {}
    for rank, home in enumerate(homes):
        near = set(machine.cpus.numa.get(-1 if home is None else home, ()))
        there = [domain for domain in domains if near.intersection(domain)]
        if there:
            there.sort(key=lambda domain: (-len(near.intersection(domain)), domain))
            domain = there[homes[:rank].count(home) % len(there)]
        else:
            domain = domains[rank * len(domains) // workers % len(domains)]
        name = by_index[rank].physical if rank in by_index else rank
        chosen[name] = domain
    return Binding(mode=BindMode.GIVEN, by_device=chosen, is_shared=True)


def _half(given: Given[BindRequest] | None, half: Binding | None) -> Given[Binding] | None:
    """Return the CPU or the memory half of an option; None where it asks for no such binding."""
    return None if given is None or half is None else Given(half, given.source, given.text)


def _cpus(numa: Given[BindRequest] | None, machine: Machine) -> Given[Binding] | None:
    """Return the CPUs that a bind_config file asks for, by number or by NUMA node."""
    if numa is None or not numa.value.cpu_nodes:
        return _half(numa, numa and numa.value.cpus)
    by_device = {}
    for device, nodes in numa.value.cpu_nodes.items():
        if missing := sorted(set(nodes) - set(machine.cpus.numa)):
            raise UsageError(
                f"{numa.cite()} names NUMA node {render_number_list(missing)}, which is not "
                f"available (choose from {render_number_list(machine.cpus.numa)})"
            )
        by_device[device] = tuple(sorted(cpu for n in nodes for cpu in machine.cpus.numa[n]))
    return Given(Binding(mode=BindMode.GIVEN, by_device=by_device), numa.source, numa.text)
