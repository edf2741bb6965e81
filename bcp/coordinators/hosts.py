"""This host, the address at which the job's other hosts reach it, and the rank's place in its process group.

Nothing here asks the network: only the name of the store's host is resolved, and no packet is sent.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import IPv4Interface, IPv6Interface, ip_address, ip_interface, ip_network
from pathlib import Path
from weakref import WeakKeyDictionary

import psutil
import torch.distributed as dist
from torch.distributed import Store, TCPStore, distributed_c10d

from bcp._messages.coordination import Host
from bcp.coordinators.store_client import StoreClient, innermost
from bcp.errors import InputError

__all__ = [
    "HINT",
    "VARIABLE",
    "ProcessGroupMember",
    "address_of",
    "here",
    "identity",
    "interfaces",
    "private_connection",
    "reconnected",
    "stated_address",
    "store_of_job",
]

_CALL_SECONDS = 30.0  # torch's own limit for a call, as far as it keeps one; nothing in here waits for a key
_numbers: WeakKeyDictionary[dist.ProcessGroup, itertools.count[int]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class ProcessGroupMember:
    """This rank's membership in a process group, for one coordinator."""

    store: StoreClient  # a private connection to the group's own store, which is made at the first call
    rank: int  # in the group
    world_size: int
    # prefix of keys that no other coordinator of these processes has: the group, and the number of earlier members.
    # Keys of ended processes may stand below it: torchrun may keep its store over restarts of the workers.
    prefix: str

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> ProcessGroupMember:
        """Join a group as a new member; None is the default group. Every rank has to do so equally often.

        Nothing is sent, so this never waits for the store. Raises InputError if torch.distributed is not initialised,
        the group was destroyed, or this rank is not a member.
        """
        if not dist.is_initialized():
            raise InputError("there is no process group; call torch.distributed.init_process_group first")
        group = distributed_c10d._get_default_group() if group is None else group  # noqa: SLF001 -- no public name
        try:
            rank = dist.get_rank(group)
            shared = None if rank < 0 else distributed_c10d._get_process_group_store(group)  # noqa: SLF001 -- same
        except (ValueError, KeyError) as error:
            raise InputError(f"{group!r} was destroyed, or never was a process group; pass one in use") from error
        if shared is None:
            raise InputError("this rank is not a member of the process group; only members can take part")
        number = next(_numbers.setdefault(group, itertools.count()))
        prefix = f"bcp/{group.group_name}/{number}"
        return cls(StoreClient(shared, private_connection), rank, dist.get_world_size(group), prefix)


def store_of_job() -> tuple[Store, Callable[[Store], Store]]:
    """Return the store of the default process group, and a function that connects to it: arguments of ``StoreClient``.

    Raises InputError if there is no default group, or if it has no store.
    """
    if not dist.is_initialized():
        raise InputError("there is no process group any more; call torch.distributed.init_process_group first")
    group = distributed_c10d._get_default_group()  # noqa: SLF001 -- no public name
    store = distributed_c10d._get_process_group_store(group)  # noqa: SLF001 -- same
    if store is None:
        raise InputError("the default process group has no store; initialise it with one, or use exchange='sockets'")
    return store, private_connection


def private_connection(store: Store) -> Store:
    """Return a private connection to a store, so that no other long wait delays our calls.

    A TCPStore client does one call at a time, and ``init_process_group`` and ``new_group`` wait for minutes in one.
    Stores without connections are returned as they are. Blocks, for ever if the server is stopped: see
    :class:`~bcp.coordinators.store_client.StoreClient`.
    """
    if not isinstance(innermost(store), TCPStore):
        return store
    clone = getattr(store, "clone", None)  # torch 2.13 has it
    private: Store = reconnected(store) if clone is None else clone()
    private.set_timeout(timedelta(seconds=_CALL_SECONDS))
    return private


def reconnected(store: Store) -> Store:
    """Return a new client of a TCPStore's server; return any other store as it is.

    Versions of torch without ``Store.clone`` need this. The client has no prefixes: torch does not tell them.
    """
    inner = innermost(store)
    if not isinstance(inner, TCPStore):
        return store
    limit = timedelta(seconds=_CALL_SECONDS)
    return TCPStore(inner.host, inner.port, None, is_master=False, wait_for_workers=False, timeout=limit)


VARIABLE = "BCP_ADDRESS"
"""The environment variable that says where a host is: an address, a network such as 10.0.0.0/16, or an interface."""

HINT = f"if the ranks' network is another one, say so, as in {VARIABLE}=10.0.0.0/16"
"""The end of messages about addresses at which nobody answers."""

Interface = IPv4Interface | IPv6Interface

_LOOPBACK = "127.0.0.1"
_ANYWHERE = ("10.255.255.255", 9)  # where a packet would leave by the default route
_NO_HOST = ("localhost", "::", "0.0.0.0")  # noqa: S104 -- names of the store's host that say nothing about where it is


def stated_address(argument: str | None) -> str:
    """Return the address that the caller or :data:`VARIABLE` states; empty if there is none.

    Raises InputError if the variable means no address of this host.
    """
    return argument or _from_variable(os.environ.get(VARIABLE, ""))


def here(server: tuple[str, int] | None, stated: str = "") -> Host:
    """Return this process's host; ``stated`` is the result of :func:`stated_address`.

    The route to ``server``, host and port of the job's store, is taken for the route to the other hosts.
    """
    named_interfaces = list(interfaces())
    address = stated or _from_other_variables(named_interfaces) or _towards_server(server)
    outside = [
        interface for _, interface in named_interfaces if not interface.is_loopback and not interface.is_link_local
    ]
    way_out = _source(*_ANYWHERE)
    outside.sort(key=lambda interface: (str(interface.ip) != way_out, interface.version))
    return Host(socket.gethostname(), identity(), address, tuple(map(str, outside)))


def address_of(host: Host, elsewhere: Sequence[Host], stated: str = "") -> str:
    """Return the address at which a rank of this host listens.

    It is the loopback if no other host takes part and no address was stated. An unknown address is taken from a
    network that the other hosts share, else from the route to them. Raises InputError if there are other hosts, but no
    address that they could reach.
    """
    if not elsewhere:
        return stated or _LOOPBACK
    address = stated or host.address or _shared(host, elsewhere) or _on_the_way(elsewhere)
    if not address or ip_address(address).is_loopback:
        others = ", ".join(f"{other.name} ({_whereabouts(other)})" for other in elsewhere)
        raise InputError(
            f"host {host.name} ({_whereabouts(host)}) has no address that the job's other hosts reach: {others}. Set "
            f"{VARIABLE} to an address, an interface or a network of this host, as in {VARIABLE}=10.0.0.0/16"
        )
    return address


def interfaces() -> Iterator[tuple[str, Interface]]:
    """Yield the addresses of all interfaces that are up, by the interface's name."""
    states = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        if name in states and states[name].isup:
            for address in addresses:
                if address.family in (socket.AF_INET, socket.AF_INET6):
                    yield name, _interface(address.address, address.netmask)


def _interface(address: str, netmask: str | None) -> Interface:
    plain = ip_address(address.partition("%")[0])
    bits = plain.max_prefixlen if netmask is None else int(ip_address(netmask)).bit_count()
    return ip_interface(f"{plain}/{bits}")


def _whereabouts(host: Host) -> str:
    return host.address or " ".join(host.networks) or "no address but the loopback"


# -- what the environment says ----------------------------------------------------------------


def _from_variable(text: str) -> str:
    """Return this host's address that :data:`VARIABLE` names; empty if it is not set."""
    if not text:
        return ""
    named_interfaces = list(interfaces())
    try:
        network = ip_network(text, strict=False)
    except ValueError:
        chosen = [interface for name, interface in named_interfaces if name == text]
    else:
        chosen = [interface for _, interface in named_interfaces if interface.ip in network]
    if not chosen:
        has = ", ".join(f"{name} {interface}" for name, interface in named_interfaces)
        raise InputError(
            f"{VARIABLE}={text!r} is no address, network or interface of host {socket.gethostname()}, which has {has}"
        )
    return str(_preferred(chosen).ip)


def _from_other_variables(named_interfaces: Sequence[tuple[str, Interface]]) -> str:
    """Return the address that gloo's or NCCL's variable names; empty if there is none but a loopback."""
    matches = (
        _matching("GLOO_SOCKET_IFNAME", lambda name, wanted: name == wanted, named_interfaces),
        _matching("NCCL_SOCKET_IFNAME", str.startswith, named_interfaces),
    )
    return next((str(interface.ip) for interface in matches if interface is not None and not interface.is_loopback), "")


def _matching(
    variable: str, matches: Callable[[str, str], bool], named_interfaces: Sequence[tuple[str, Interface]]
) -> Interface | None:
    """Return the first address that another library's variable names, in its own syntax."""
    text = os.environ.get(variable, "")
    excluded, exact = text.startswith("^"), text.lstrip("^").startswith("=")
    for wanted in filter(None, text.lstrip("^=").split(",")):
        if excluded:
            return None  # NCCL's "all but these" leaves the choice open
        same = (lambda name, wanted: name == wanted) if exact else matches
        chosen = [
            interface for name, interface in named_interfaces if same(name, wanted) and not interface.is_link_local
        ]
        if chosen:
            return _preferred(chosen)
    return None


def _preferred(chosen: Sequence[Interface]) -> Interface:
    return min(chosen, key=lambda interface: (interface.is_link_local, interface.version))


# -- what the routes say ----------------------------------------------------------------------


def _towards_server(server: tuple[str, int] | None) -> str:
    """Return this host's address on the route to the store's server; empty if the server is on this host."""
    if server is None or server[0] in _NO_HOST:
        return ""
    source = _source(*server)
    return "" if not source or ip_address(source).is_loopback else source


def _shared(host: Host, elsewhere: Sequence[Host]) -> str:
    """Return this host's address in the network in which most of the others have one; empty if there is none.

    Addresses that another host has too, such as those of a container engine's bridge, do not count.
    """
    others = [ip_interface(text).ip for other in elsewhere for text in _stated_by(other)]
    own = [interface for interface in map(ip_interface, host.networks) if interface.ip not in others]
    counts = [sum(other in interface.network for other in others) for interface in own]
    best = max(counts, default=0)
    return str(own[counts.index(best)].ip) if best else ""


def _on_the_way(elsewhere: Sequence[Host]) -> str:
    """Return this host's address on the route to the others; empty if there is none."""
    targets = (ip_interface(text).ip for other in elsewhere for text in _stated_by(other))
    sources = (_source(str(target), 9) for target in targets)
    return next((source for source in sources if source and not ip_address(source).is_loopback), "")


def _stated_by(host: Host) -> Iterable[str]:
    return (host.address,) if host.address else host.networks


def _source(host: str, port: int) -> str:
    """Return the address from which packets to a host would leave this one; empty if there is no route."""
    with suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(ip_address(probe.getsockname()[0].partition("%")[0]))
    return ""


def identity() -> str:
    """Return the identity of this process's network: the kernel's boot and the namespace. Hostnames may be equal."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"  # noqa: PTH116 -- resolves no link, as Path.stat does
    except OSError:
        return socket.gethostname()
