"""Decides whose memory a device's is: this worker's, another worker's of this host, or a foreign process's.

NVML lists the processes of a device. What the list says depends on where it is read:

    read                                    pids in the list    the list has
    in the host's pid namespace             as here             every process
    in a container, newer drivers           as here             the processes of this container alone
    in a container, older drivers           the host's          every process

Newer drivers translate pids (os_find_ns_pid in NVIDIA's open kernel modules) and leave processes of other namespaces
out; some of them give every process in a container 0 bytes. The host's pids cannot be compared with ours, and the
kernel does not tell a process its pid on the host. What an engine counts itself, at most `CONTEXT_BYTES` less than
NVML does, then tells which process is which. A figure that stays ambiguous is None, never a guess.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

CONTEXT_BYTES = 2 << 30
"""The most that the driver holds for a process beyond what its engine counts: contexts have 0.3 to 1 GiB."""
UNSEEN_BYTES = 1 << 30
"""Used memory without a visible owner, per worker of the device: below, it is contexts and the driver's own."""
_COUNT_LATER_SHARE = 0.9
"""Of an engine's count: NVML may have been read a second earlier."""

Processes = Mapping[int, int | None]
"""By pid, the bytes on a device; None: NVML does not tell."""


@dataclass(frozen=True)
class Holder:
    """A worker of this host, as far as it may hold memory of one device."""

    pids: frozenset[int]
    """As this process sees them; empty: it is in another pid namespace."""
    num_bytes: int | None
    """What its engine counts on this device; None: not known, it loads."""


@dataclass(frozen=True)
class Owners:
    """None: not known; `reason` says why the foreign memory is not."""

    own_bytes: int | None
    foreign_bytes: int | None
    reason: str = ""


@dataclass(frozen=True)
class DeviceUse:
    """What NVML tells of a device's memory."""

    processes: Processes | None
    """None: they could not be listed."""
    used_bytes: int
    reserved_bytes: int | None
    """The driver's own part of `used_bytes`; None: it does not tell."""


def owners(use: DeviceUse, own: Holder, peers: Sequence[Holder], *, sees_host: bool) -> Owners:
    """Return who holds the memory. `sees_host`: this process is in the host's pid namespace."""
    listed = use.processes
    if listed is None:
        return Owners(own.num_bytes, None, "NVML does not list the processes of this device")
    holders = [own, *peers]
    can_compare = sees_host or any(_is_named(holder, listed) for holder in holders)
    known = {pid for holder in holders for pid in holder.pids & listed.keys()} if can_compare else set()
    others = {pid: used for pid, used in listed.items() if pid not in known}
    unnamed = [each for each in holders if each.num_bytes != 0 and not (can_compare and each.pids)]
    if sees_host or (others and not can_compare and unnamed):
        foreign = _in_complete_list(others, unnamed)
    else:
        foreign = _by_difference(use, others, holders, unnamed, known)
    own_bytes = _own_bytes(own, listed, can_compare=can_compare, unnamed=unnamed)
    return Owners(own_bytes, *foreign)


def _is_named(holder: Holder, listed: Processes) -> bool:
    """Return whether a process of the list is one of this holder, rather than one of the host with the same number."""
    return any(
        not listed[pid] or holder.num_bytes is None or (listed[pid] or 0) >= _COUNT_LATER_SHARE * holder.num_bytes
        for pid in holder.pids & listed.keys()
    )


def _own_bytes(own: Holder, listed: Processes, *, can_compare: bool, unnamed: Sequence[Holder]) -> int | None:
    if can_compare:
        found = [listed[pid] for pid in own.pids & listed.keys()]
        told = [used for used in found if used]
        return sum(told) if told and len(told) == len(found) else own.num_bytes if found else own.num_bytes or 0
    if not own.num_bytes:
        return own.num_bytes
    if [*unnamed] == [own] and len(listed) == 1:
        return next(iter(listed.values())) or own.num_bytes
    fitting = [used for used in listed.values() if _fits(used, own.num_bytes)]
    return fitting[0] if len(fitting) == 1 else own.num_bytes


def _in_complete_list(others: Processes, unnamed: Sequence[Holder]) -> tuple[int | None, str]:
    """Return the bytes of the processes that are none of `unnamed`, and why they are not known."""
    if not others:
        return 0, ""
    counts = [each.num_bytes for each in unnamed if each.num_bytes is not None]
    if len(counts) < len(unnamed):
        return None, "a worker loads, and NVML names its process by a pid of the host"
    if len(others) == len(unnamed):
        return 0, ""  # each worker holds memory, so each is in the list
    ours = _matching(others, sorted(counts))
    if ours is None:
        return None, "NVML names processes by pids of the host, and which are Tandem's is ambiguous"
    foreign = [used for pid, used in others.items() if pid not in ours]
    if any(used is None for used in foreign):
        return None, "NVML does not tell how much memory a foreign process holds"
    return sum(used or 0 for used in foreign), ""


def _matching(others: Processes, counts: Sequence[int]) -> Collection[int] | None:
    """Return the pids of the processes that fit an engine's count each; None if it is not clear which."""
    fitting = {pid: used or 0 for pid, used in others.items() if any(_fits(used, count) for count in counts)}
    pairs = zip(sorted(fitting.values()), counts, strict=False)
    is_clear = len(fitting) == len(counts) and all(_fits(used, count) for used, count in pairs)
    return set(fitting) if is_clear else None


def _fits(used: int | None, count: int) -> bool:
    return used is not None and _COUNT_LATER_SHARE * count <= used <= count + CONTEXT_BYTES


def _by_difference(
    use: DeviceUse, others: Processes, holders: Sequence[Holder], unnamed: Sequence[Holder], known: Collection[int]
) -> tuple[int | None, str]:
    """Return the bytes of processes that are listed and not ours, and of those that this container cannot see."""
    listed = use.processes or {}
    seen = sum(used or 0 for used in others.values())
    ours = sum(_best(holder, listed, known) for holder in holders)
    num_ours = sum(holder.num_bytes != 0 for holder in holders)
    unseen = use.used_bytes - (use.reserved_bytes or 0) - seen - ours
    if unseen <= UNSEEN_BYTES * (max(1, num_ours) + (use.reserved_bytes is None)):
        return seen, ""
    if any(each.num_bytes is None for each in _unsure(holders, unnamed, listed, known)):
        return None, "a worker loads, and NVML does not tell what its process holds"
    return seen + unseen, ""


def _best(holder: Holder, listed: Processes, known: Collection[int]) -> int:
    """Return what NVML gives the holder's processes, or what its engine counts if that is more or NVML is silent."""
    return max(sum(listed[pid] or 0 for pid in holder.pids & set(known)), holder.num_bytes or 0)


def _unsure(
    holders: Iterable[Holder], unnamed: Sequence[Holder], listed: Processes, known: Collection[int]
) -> Iterable[Holder]:
    """Return the holders whose memory NVML does not give."""
    return [each for each in holders if each in unnamed or any(not listed[pid] for pid in each.pids & set(known))]
