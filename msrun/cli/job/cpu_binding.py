"""CPU and memory binding of workers, from the three options that ask for it."""

from __future__ import annotations

from msrun.cli.options import catalog as options
from msrun.cli.options.binding import BindRequest
from msrun.cli.options.settings import Given, Settings, strongest
from msrun.errors import UsageError
from msrun.job import Binding, BindMode
from msrun.topology import Machine, render_number_list

_AUTO = Binding(mode=BindMode.AUTO)


def choose_binding(
    settings: Settings, machine: Machine
) -> tuple[Given[Binding], Given[Binding], list[str]]:
    """Return CPU binding, memory binding and notes.

    Raises:
        UsageError: Options contradict each other, or a NUMA node is not there.
    """
    core, numa = settings.get(options.BIND_CORE), settings.get(options.BIND_NUMA)
    node = settings.get(options.NUMA_BINDING)
    both = Given(_AUTO, node.source, node.text) if node else None
    cpus = strongest(_half(core, core and core.value.cpus), _cpus(numa, machine), both)
    memory = strongest(_half(numa, numa and numa.value.memory), both)
    notes = [
        f"{given.cite()}: {note}" for given in (core, numa) if given for note in given.value.notes
    ]
    return cpus or Given(Binding()), memory or Given(Binding()), notes


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
