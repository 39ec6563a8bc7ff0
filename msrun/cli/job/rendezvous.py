"""Where the nodes of a job meet: address of the scheduler, node that starts it, own address."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TypeVar

from msrun.cli.job.formation import Size
from msrun.cli.options import catalog as options
from msrun.cli.options import peers
from msrun.cli.options.settings import Given, Settings
from msrun.cli.system import System
from msrun.errors import UsageError
from msrun.identity import Hand
from msrun.job import LOOPBACK, SCHEDULER_LOOPBACK, JobSpec
from msrun.topology import Machine

# What /etc/hosts of the usual systems calls loopback, besides `localhost`.
_LOOPBACK_NAMES = ("localhost.localdomain", "localhost6", "ip6-localhost", "ip6-loopback")
DEFAULT_PORT = 29500  # as torchrun's --master-port
T = TypeVar("T")
_DYNAMIC = "c10d"  # torchrun's rendezvous at --rdzv-endpoint, whose workers meet elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the nodes of a job meet.

    Args:
        host: Node of the scheduler as its user wrote it, None when no option names one.
        port: Port of the scheduler.
        store_port: As of `JobSpec`, like those that follow.
        serves: This node starts the scheduler.
        listen_host: Numeric address of the scheduler.
        address: Numeric address of this node.
    """

    host: Given[str] | None
    port: Given[int]
    store_port: int = 0
    serves: bool = True
    listen_host: str = LOOPBACK
    address: str = LOOPBACK


@dataclass(frozen=True, slots=True, kw_only=True)
class _Site:
    """Where the scheduler's host is.

    Args:
        address: Its numeric address.
        is_here: It is this machine.
        is_shared: Its name means this machine wherever it is read, so several nodes of the
            job may be here.
    """

    address: str
    is_here: bool
    is_shared: bool = False


def find_rendezvous(settings: Settings, size: Size, machine: Machine, system: System) -> Rendezvous:
    """Return where the nodes meet.

    Raises:
        UsageError: Options contradict each other, the host is not there or not the one that
            is meant, or the port of a node alone is taken.
    """
    host, port = _endpoint(settings)
    if size.is_alone:
        port = port or Given(0)
        store_port = _store_port(settings, port)
        if host:
            _check_here(host, machine, system)
        if store_port:
            _check_port(LOOPBACK, port, system)
        return Rendezvous(host=host, port=port, store_port=store_port)
    if host is None:
        raise UsageError(
            f"{size.nnodes.cite()} needs the node that runs the scheduler",
            hint="add --master-addr HOST, the same on every node",
        )
    port = port or Given(DEFAULT_PORT)
    if not port.value:
        raise UsageError(
            f"{port.cite()} takes a free port, which the other nodes do not know",
            hint=f"choose one, or leave it out for {DEFAULT_PORT}",
        )
    site = _locate(host, machine, system)
    serves = _serves(settings, host, site, system)
    _check_insecure(settings, site)
    address = _own_address(settings, host, site, system)
    # On the scheduler's machine the port is for the node of the scheduler, which may come later.
    may_take = serves or not site.is_here
    return Rendezvous(
        host=host,
        port=port,
        store_port=_store_port(settings, port) if may_take else 0,
        serves=serves,
        listen_host=_scheduler_address(host, site.address),
        address=address,
    )


def _scheduler_address(host: Given[str], address: str) -> str:
    """Return where the scheduler of a job of several nodes listens, on the host with `address`.

    On the loopback interface that is another address than the stores': both have one port.  The
    processes of a cluster that is started by hand have a store each, on ports of their own.
    """
    is_by_hand = host.source.place == Hand.HOST
    return SCHEDULER_LOOPBACK if address == LOOPBACK and not is_by_hand else address


def _store_port(settings: Settings, port: Given[int]) -> int:
    """Return the port at which the workers are to find the store, 0 for any.

    It is torchrun's: that of --master-port, or of a static --rdzv-endpoint; with c10d it is free.
    """
    backend, endpoint = settings.get(peers.RDZV_BACKEND), settings.get(options.RDZV_ENDPOINT)
    is_static = backend is None or backend.value != _DYNAMIC
    is_own = endpoint is None or port.source != endpoint.source
    return port.value if is_static or is_own else 0


def check_port(rendezvous: Rendezvous, job: JobSpec, system: System) -> None:
    """Refuse the scheduler's port if it is taken, unless another node of `job` here has it.

    Raises:
        UsageError: The port is taken.
    """
    if job.is_alone or not job.serves or system.has_node(job):
        return
    hint = "a further node of a job on this machine needs the same command or --job-id"
    try:
        _check_port(rendezvous.listen_host, rendezvous.port, system, hint=hint)
        if job.store_port and not system.is_beside(job):
            _check_port(LOOPBACK, rendezvous.port, system, hint=hint)
    except UsageError:
        if not system.has_node(job):  # one that began a moment ago has it by now
            raise


def _endpoint(settings: Settings) -> tuple[Given[str] | None, Given[int] | None]:
    """Return host and port of the scheduler as they are given."""
    both, alone = settings.get(options.RDZV_ENDPOINT), settings.get(options.STANDALONE)
    if alone and alone.value:
        both = None  # as under torchrun
    host, port = both.value if both else (None, None)
    return (
        _stronger(both, host, settings.get(options.MASTER_ADDR)),
        _stronger(both, port, settings.get(options.MASTER_PORT)),
    )


def endpoint_before(settings: Settings, own: Given[object]) -> Given[object] | None:
    """Return the endpoint that takes the place of --master-addr or --master-port `own`, if any."""
    both, alone = settings.get(options.RDZV_ENDPOINT), settings.get(options.STANDALONE)
    if both is None or (alone and alone.value) or own.source.level > both.source.level:
        return None
    part = both.value[isinstance(own.value, int)]
    return None if part is None or part == own.value else both


def _stronger(both: Given[object] | None, part: T | None, own: Given[T] | None) -> Given[T] | None:
    """Return what counts: an option, or `part` of an endpoint, which goes before it if as strong.

    So it is under torchrun, whose users often give both.
    """
    if both is None or part is None or (own and own.source.level > both.source.level):
        return own
    return Given(part, both.source, both.text)


def _check_here(host: Given[str], machine: Machine, system: System) -> None:
    """Refuse a host that is not the only node of its job."""
    addresses = system.resolve(host.value)
    if not addresses and host.value != machine.host:
        raise UsageError(_unknown(host))
    is_here = any(ip_address(a).is_unspecified or system.is_own(a) for a in addresses)
    if not is_here and host.value != machine.host:
        raise UsageError(
            f"{host.cite()} is no address of this machine, the only node (choose localhost)",
            hint="a job of several nodes needs --nnodes",
        )


def _check_port(address: str, port: Given[int], system: System, *, hint: str | None = None) -> None:
    problem = system.port_problem(address, port.value) if port.value else None
    if problem:
        cite = port.cite() if port.text else f"--master-port {port.value}"
        raise UsageError(f"{cite}: port {port.value} {problem}", hint=hint)


def _locate(host: Given[str], machine: Machine, system: System) -> _Site:
    """Return where `host` is, by the first of its addresses that other machines can reach.

    Every node takes the first one, so that a name with the addresses of several machines
    still means one of them.
    """
    name = host.value.lower().rstrip(".")
    if name == "localhost":
        return _Site(address=LOOPBACK, is_here=True, is_shared=True)
    addresses = system.resolve(host.value)
    public = [address for address in addresses if not ip_address(address).is_loopback]
    if public:
        return _public_site(host, public[0], machine, system)
    if addresses and (_is_literal(name) or name in _LOOPBACK_NAMES):
        return _Site(address=addresses[0], is_here=True, is_shared=True)
    own = machine.host.lower()
    if name == own or (addresses and name.partition(".")[0] == own.partition(".")[0]):
        address = _public_address(host, addresses, machine, system)
        return _Site(address=address, is_here=True, is_shared=True)
    if not addresses:
        raise UsageError(_unknown(host))
    raise UsageError(
        f"{host.cite()} resolves to {addresses[0]} here, but this machine is {machine.host}",
        hint=f"correct /etc/hosts, or give the address of {host.value}",
    )


def _public_site(host: Given[str], address: str, machine: Machine, system: System) -> _Site:
    number = ip_address(address)
    if number.is_unspecified or number.is_multicast:
        raise UsageError(f"{host.cite()} is the address of no node (choose that of the scheduler)")
    is_here = system.is_own(address)
    if not is_here and host.value.lower() == machine.host.lower():
        raise UsageError(
            f"{host.cite()} is this machine, but resolves to {address}, which it does not have "
            f"{_choices(system.own_addresses())}",
            hint=f"correct what {host.value} resolves to, or give an address",
        )
    return _Site(address=address, is_here=is_here)


def _public_address(
    host: Given[str], addresses: Sequence[str], machine: Machine, system: System
) -> str:
    """Return this machine's address for a host name that means loopback here."""
    if not ip_address(machine.address).is_loopback:
        return machine.address
    resolved = f"resolves to {addresses[0]}" if addresses else "does not resolve"
    own = system.own_addresses()
    if not own:
        raise UsageError(
            f"{host.cite()} {resolved}, and this machine has no address that others can reach"
        )
    alike = [a for a in own if ip_address(a).version == ip_address(own[0]).version]
    if len(alike) > 1:
        raise UsageError(
            f"{host.cite()} {resolved}, and this machine has several other addresses",
            hint=f"give one as --master-addr {_choices(own)}",
        )
    return alike[0]


def _serves(settings: Settings, host: Given[str], site: _Site, system: System) -> bool:
    """Tell whether this node starts the scheduler."""
    node_rank = settings.get(options.NODE_RANK)
    if node_rank and node_rank.value == 0 and not site.is_here:
        resolved = "" if site.address == host.value else f", which resolves to {site.address},"
        raise UsageError(
            f"{node_rank.cite()} runs the scheduler, but {host.cite()}{resolved} is not this "
            f"machine {_choices(system.own_addresses())}"
        )
    is_further = node_rank is not None and node_rank.value > 0
    return site.is_here and not (site.is_shared and is_further)


def _check_insecure(settings: Settings, site: _Site) -> None:
    insecure = settings.get(options.INSECURE)
    if insecure and insecure.value and not ip_address(site.address).is_loopback:
        raise UsageError(
            f"{insecure.cite()} is for one machine, and the scheduler would be at {site.address}",
            hint="leave --insecure out, or choose --master-addr localhost",
        )


def _own_address(settings: Settings, host: Given[str], site: _Site, system: System) -> str:
    """Return the address by which the other nodes reach this one."""
    given = settings.get(options.LOCAL_ADDR)
    if given is None:
        address = site.address if site.is_here else system.address_to(site.address)
        if address is None:
            raise UsageError(f"{host.cite()}: this machine has no route to {site.address}")
        return address
    candidates = system.resolve(given.value)
    if not candidates:
        raise UsageError(_unknown(given))
    is_local = ip_address(site.address).is_loopback
    for address in candidates:
        if ip_address(address).is_loopback == is_local and system.is_own(address):
            return address
    raise UsageError(
        f"{given.cite()} is no address by which another node reaches this one "
        f"{_choices(system.own_addresses())}"
    )


def _unknown(given: Given[str]) -> str:
    return f"{given.cite()}: the name resolver does not know {given.value}"


def _is_literal(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _choices(addresses: Sequence[str]) -> str:
    return f"(it has {', '.join(addresses) or 'loopback only'})"
