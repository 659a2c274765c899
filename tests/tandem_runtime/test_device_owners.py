"""Whose memory is it? NVML's list of processes, on bare metal and in containers, with one worker and with several."""

from __future__ import annotations

import pytest

from tandem_runtime.device_owners import CONTEXT_BYTES, DeviceUse, Holder, Owners, Processes, owners

GIB = 1024**3
OWN, PEER = 10, 20
AMBIGUOUS = "NVML names processes by pids of the host, and which are Tandem's is ambiguous"


def holder(pid: int | None = OWN, gib: float | None = 0) -> Holder:
    return Holder(frozenset([] if pid is None else [pid]), None if gib is None else int(gib * GIB))


def use(processes: dict[int, float | None] | None, used: float = 0, reserved: float | None = 0.5) -> DeviceUse:
    """All figures in GiB. `used` is at least what the processes hold."""
    listed: Processes | None = None
    if processes is not None:
        listed = {pid: None if gib is None else int(gib * GIB) for pid, gib in processes.items()}
    in_use = int(used * GIB) or sum(each or 0 for each in (listed or {}).values()) + int((reserved or 0) * GIB)
    return DeviceUse(listed, in_use, None if reserved is None else int(reserved * GIB))


def known(own: float | None, foreign: float | None, reason: str = "") -> Owners:
    own_bytes, foreign_bytes = (None if gib is None else int(gib * GIB) for gib in (own, foreign))
    return Owners(own_bytes, foreign_bytes, reason)


def on_the_host(found: DeviceUse, own: Holder, *peers: Holder) -> Owners:
    return owners(found, own, peers, sees_host=True)


def in_a_container(found: DeviceUse, own: Holder, *peers: Holder) -> Owners:
    return owners(found, own, peers, sees_host=False)


# ---------------------------------------------------------------------------------------------------- bare metal


def test_on_the_host_pids_tell() -> None:
    assert on_the_host(use({OWN: 3, 99: 5}), holder(gib=2)) == known(3, 5)
    assert on_the_host(use({99: 5}), holder(gib=0)) == known(0, 5)
    assert on_the_host(use({}), holder(gib=None)) == known(0, 0), "an engine that loads holds nothing yet"


def test_prefill_and_decode_on_one_card_are_not_foreign_to_each_other() -> None:
    found = use({OWN: 30, PEER: 40, 99: 1})
    assert on_the_host(found, holder(OWN, 29), holder(PEER, 39)) == known(30, 1)
    assert on_the_host(found, holder(PEER, 39), holder(OWN, 29)) == known(40, 1)
    assert on_the_host(found, holder(OWN, None), holder(PEER, None)) == known(30, 1), "also while they load"


def test_a_process_whose_memory_nvml_does_not_tell_makes_the_sum_unknown() -> None:
    found = on_the_host(use({OWN: 3, 99: None}), holder(gib=2))
    assert (found.own_bytes, found.foreign_bytes) == (3 * GIB, None) and found.reason
    assert on_the_host(use({OWN: None, 99: 5}), holder(gib=2)) == known(2, 5), "our own is counted by our engine"
    assert on_the_host(use({OWN: None}), holder(gib=None)) == known(None, 0)


def test_a_worker_in_a_container_is_found_from_the_host_by_its_count() -> None:
    peer = holder(None, 39)
    assert on_the_host(use({OWN: 30, 4001: 40, 99: 1}), holder(OWN, 29), peer) == known(30, 1)
    assert on_the_host(use({OWN: 30, 4001: 40}), holder(OWN, 29), peer) == known(30, 0)
    assert on_the_host(use({OWN: 30, 4001: 40, 99: 39.5}), holder(OWN, 29), peer) == known(30, None, AMBIGUOUS)


def test_processes_that_cannot_be_listed_leave_the_engines_count() -> None:
    found = on_the_host(use(None, used=9), holder(gib=2))
    assert (found.own_bytes, found.foreign_bytes) == (2 * GIB, None) and found.reason


# ------------------------------------------------------------------- containers whose driver gives the host's pids


def test_the_only_process_of_a_card_is_the_only_worker_of_it() -> None:
    assert in_a_container(use({4000: 3}), holder(gib=2.5)) == known(3, 0)


def test_a_process_is_recognised_by_what_its_engine_counts() -> None:
    assert in_a_container(use({4000: 60.4, 4001: 5}), holder(gib=60)) == known(60.4, 5)
    assert in_a_container(use({4000: 60.4, 4001: 5, 4002: 1}), holder(gib=60)) == known(60.4, 6)


def test_two_processes_that_fit_are_not_guessed_between() -> None:
    assert in_a_container(use({4000: 60.4, 4001: 61}), holder(gib=60)) == known(60, None, AMBIGUOUS)
    assert in_a_container(use({4000: 5, 4001: 4}), holder(gib=60)) == known(60, None, AMBIGUOUS)


def test_two_workers_of_one_size_are_told_from_the_others_not_from_each_other() -> None:
    found = use({4000: 30.4, 4001: 30.5, 4002: 9})
    assert in_a_container(found, holder(OWN, 30), holder(PEER, 30)) == known(30, 9)
    assert in_a_container(use({4000: 30.4, 4001: 30.5}), holder(OWN, 30), holder(PEER, 30)) == known(30, 0)
    assert in_a_container(found, holder(OWN, 30), holder(None, 30)) == known(30, 9), "whatever their containers"


def test_one_process_does_not_stand_for_two_workers() -> None:
    found = use({4000: 30.4, 4001: 31, 4002: 9})
    assert in_a_container(found, holder(OWN, 30), holder(PEER, 50)).foreign_bytes is None


def test_a_worker_that_loads_makes_it_unknown_where_pids_are_the_hosts() -> None:
    loading = in_a_container(use({4000: 3, 4001: 5}), holder(OWN, 2.5), holder(PEER, None))
    assert loading.foreign_bytes is None and "loads" in loading.reason
    assert in_a_container(use({4000: 3}), holder(OWN, None)).own_bytes is None


def test_workers_without_a_device_do_not_count() -> None:
    assert in_a_container(use({4000: 3}), holder(OWN, 2.5), holder(PEER, 0)) == known(3, 0)
    assert in_a_container(use({4000: 3}), holder(OWN, 0)) == known(0, 3)


def test_a_process_of_the_host_with_our_number_is_not_ours() -> None:
    """Pid 10 of the host holds 1 GiB; our engine, pid 10 in this container, counts 60."""
    assert in_a_container(use({OWN: 1, 4000: 60.4}), holder(OWN, 60)) == known(60.4, 1)


# ------------------------------------------------------------------------ containers whose driver translates pids


def test_translated_pids_tell_and_the_rest_of_the_card_is_others() -> None:
    assert in_a_container(use({OWN: 3}, used=3.6), holder(OWN, 2.5)) == known(3, 0)
    assert in_a_container(use({OWN: 3}, used=23.5), holder(OWN, 2.5)) == known(3, 20), "20 GiB of other containers"
    assert in_a_container(use({OWN: 3, 30: 5}, used=8.5), holder(OWN, 2.5)) == known(3, 5), "another of ours"


def test_translated_pids_with_0_bytes_leave_the_engines_count() -> None:
    for silent in (0, None):
        assert in_a_container(use({OWN: silent}, used=3.4), holder(OWN, 2.5)) == known(2.5, 0), "a context is ours"
        assert in_a_container(use({OWN: silent}, used=23), holder(OWN, 2.5)) == known(2.5, 20)
        both = use({OWN: silent, PEER: silent}, used=71.5)
        assert in_a_container(both, holder(OWN, 30), holder(PEER, 40)) == known(30, 0)
        loading = in_a_container(both, holder(OWN, 30), holder(PEER, None))
        assert loading.foreign_bytes is None and loading.own_bytes == 30 * GIB and "loads" in loading.reason
        assert in_a_container(both, holder(OWN, None), holder(PEER, 70)) == known(None, 0), "no room for others"


def test_a_worker_in_another_container_is_not_foreign() -> None:
    found = use({OWN: 30}, used=71.5)
    assert in_a_container(found, holder(OWN, 29), holder(None, 40)) == known(30, 0)
    assert in_a_container(found, holder(OWN, 29), holder(None, None)).foreign_bytes is None
    assert in_a_container(found, holder(OWN, 29)) == known(30, 41)


def test_a_peer_of_this_container_without_a_process_holds_nothing() -> None:
    assert in_a_container(use({OWN: 30}, used=51), holder(OWN, 29), holder(PEER, None)) == known(30, 20.5)


@pytest.mark.parametrize(("used", "foreign"), [(4.0, 0), (5.0, 0), (6.5, 3.5)])
def test_an_old_driver_hides_its_own_memory_among_the_rest(used: float, foreign: float) -> None:
    """Drivers before 510 do not tell what they reserve: another gibibyte is left to them."""
    assert in_a_container(use({OWN: 3}, used=used, reserved=None), holder(OWN, 2.5)) == known(3, foreign)


def test_a_list_without_processes_is_taken_as_one_that_hides_them() -> None:
    assert in_a_container(use({}, used=3.4), holder(OWN, 2.5)) == known(2.5, 0)
    assert in_a_container(use({}, used=20.5), holder(OWN, 0)) == known(0, 20)
    assert in_a_container(use({}, used=0.5), holder(OWN, 0)) == known(0, 0)


def test_no_figure_ever_exceeds_what_is_used() -> None:
    """Whatever the list looks like, a known foreign figure fits beside our engine's count."""
    figures = [None, 0, 1, 20, 20 + CONTEXT_BYTES / GIB, 40]
    for first in figures:
        for second in figures:
            for sees_host in (True, False):
                found = use({OWN: first, 99: second}, used=64)
                result = owners(found, holder(OWN, 20), [holder(PEER, 0)], sees_host=sees_host)
                assert result.foreign_bytes is None or 0 <= result.foreign_bytes <= 64 * GIB
                assert (result.foreign_bytes is None) == bool(result.reason)
