"""Puts the memory of an engine process on the NUMA node of its cores."""

from __future__ import annotations

from collections.abc import Callable

from tandem_machine.cores import allowed_cores
from tandem_machine.memory_policy import memory_policy, prefer_node
from tandem_machine.nodes import node_of


def use_memory_node(report: Callable[[str, float], None]) -> int | None:
    """Prefer the node that all cores of this process lie on; return its number, None if there is nothing to prefer.

    Called after the affinity is set and before torch starts threads, which inherit the policy. The policy holds for the
    pool, for private weights, and for those pages of mapped weights that this process reads first. A full node spills
    to others. A policy that was set from outside (numactl) stays.
    """
    if (node := node_of(allowed_cores())) is None:
        return None
    try:
        if not (policy := memory_policy()).is_default:
            report(f"the memory policy {policy} was set before this engine started, and stays", 0.0)
            return None
        prefer_node(node.number)
    except OSError as error:
        report(
            f"the kernel refuses a memory policy for NUMA node {node.number} ({error.strerror}), so each page lies "
            "where it is first used; to allow it, give the container CAP_SYS_NICE (docker run --cap-add SYS_NICE), or "
            "allow get_mempolicy and set_mempolicy in its seccomp profile",
            0.0,
        )
    return node.number
