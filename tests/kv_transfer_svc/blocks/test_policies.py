"""Who goes first, on sequences short enough for a pencil?"""

from __future__ import annotations

import pytest

from kv_transfer_svc.blocks.cost_aware import CostAwarePolicy
from kv_transfer_svc.blocks.lru import LruPolicy
from kv_transfer_svc.blocks.policy import EvictionPolicy
from kv_transfer_svc.blocks.s3_fifo import S3FifoPolicy
from tests.kv_transfer_svc.blocks.chain import add, block, chain, evict, name

every_policy = pytest.mark.parametrize("new_policy", [LruPolicy, S3FifoPolicy, CostAwarePolicy])


@every_policy
def test_a_prompt_goes_from_its_end(new_policy: type[EvictionPolicy]) -> None:
    policy = new_policy()
    add(policy, ("a", 3))
    policy.used(chain("a", 3))
    assert evict(policy, 4) == ["a2", "a1", "a0", None]


@every_policy
def test_a_shared_beginning_goes_last(new_policy: type[EvictionPolicy]) -> None:
    policy = new_policy()
    add(policy, ("a", 2))
    policy.added(block("b", 2), 1, 1.0, block("a", 1))
    policy.added(block("c", 2), 1, 1.0, block("a", 1))
    assert evict(policy, 4) == ["b2", "c2", "a1", "a0"]


@every_policy
def test_a_busy_leaf_keeps_what_comes_before_it(new_policy: type[EvictionPolicy]) -> None:
    policy = new_policy()
    add(policy, ("a", 2), ("b", 2))
    assert evict(policy, 3, busy="a1") == ["b1", "b0", None]
    assert evict(policy, 3) == ["a1", "a0", None]


@every_policy
def test_what_left_by_itself_is_not_named(new_policy: type[EvictionPolicy]) -> None:
    policy = new_policy()
    add(policy, ("a", 2), ("b", 1))
    policy.removed(block("a", 1))
    policy.removed(block("a", 1))
    policy.used(chain("a", 2))
    assert sorted(map(str, evict(policy, 3))) == ["None", "a0", "b0"]


@every_policy
def test_a_parent_that_comes_back_waits_for_its_children(new_policy: type[EvictionPolicy]) -> None:
    policy = new_policy()
    add(policy, ("a", 3))
    policy.removed(block("a", 0))
    policy.added(block("a", 0), 1, 1.0, None)
    assert evict(policy, 3) == ["a2", "a1", "a0"]


@every_policy
def test_a_thousand_comings_and_goings_leave_no_trace(new_policy: type[EvictionPolicy]) -> None:
    policy = new_policy()
    add(policy, ("stays", 1))
    for index in range(1000):
        policy.added(block("x", index), 1, 1.0, None)
        policy.used([block("x", index), block("stays", 0)])
        policy.removed(block("x", index))
    queues = [queue for queue in vars(policy).values() if hasattr(queue, "_heap")]
    assert all(len(queue._heap) <= 2 * len(queue) + 70 for queue in queues)
    assert evict(policy, 2) == ["stays0", None]


def test_lru_takes_what_was_not_used_for_longest() -> None:
    policy = LruPolicy()
    add(policy, ("a", 1), ("b", 1), ("c", 1))
    policy.used([block("a", 0)])
    assert evict(policy, 3) == ["b0", "c0", "a0"]


def test_lru_takes_a_long_answers_end_before_a_prompt_used_since() -> None:
    policy = LruPolicy()
    add(policy, ("a", 2))  # 1. a prompt
    add(policy, ("b", 1))  # 2. another
    policy.added(block("a", 2), 1, 1.0, block("a", 1))  # 3. the first one's answer grows
    assert evict(policy, 4) == ["b0", "a2", "a1", "a0"]  # the answer keeps its prompt


def test_s3_fifo_lets_a_scan_pass_what_was_used_twice() -> None:
    policy = S3FifoPolicy()
    add(policy, ("hot", 1))
    policy.used([block("hot", 0)])
    policy.used([block("hot", 0)])
    add(policy, *((scan, 1) for scan in "abcde"))
    assert evict(policy, 6) == ["a0", "b0", "c0", "d0", "e0", "hot0"]


def test_s3_fifo_remembers_what_it_sent_away_too_early() -> None:
    policy = S3FifoPolicy()
    add(policy, ("a", 1), ("b", 1))
    assert evict(policy, 1) == ["a0"]
    add(policy, ("a", 1), ("c", 1))  # a comes back: to the main queue
    assert evict(policy, 3) == ["b0", "c0", "a0"]


def test_s3_fifo_gives_the_main_queue_another_round_for_each_use() -> None:
    policy = S3FifoPolicy()
    add(policy, ("a", 1), ("b", 1))
    for _ in range(2):
        policy.used([block("a", 0), block("b", 0)])  # both are in the main queue now, unused there
    policy.used([block("a", 0)])
    assert evict(policy, 2) == ["b0", "a0"]


def test_cost_aware_keeps_what_is_dear_to_compute_for_its_bytes() -> None:
    policy = CostAwarePolicy()
    add(policy, ("cheap", 1), cost=1.0)
    add(policy, ("dear", 1), cost=3.0)
    add(policy, ("large", 1), cost=3.0, num_bytes=4)
    assert evict(policy, 3) == ["large0", "cheap0", "dear0"]


def test_cost_aware_ages_what_was_used_often_long_ago() -> None:
    policy = CostAwarePolicy()
    add(policy, ("old", 1))
    policy.used([block("old", 0)])
    policy.used([block("old", 0)])  # worth 3
    for scan in "abc":
        add(policy, (scan, 1))
        policy.used([block(scan, 0)])
    assert evict(policy, 3) == ["a0", "b0", "c0"]  # the clock is at 2 now
    add(policy, ("d", 1))
    policy.used([block("d", 0)])  # 2 + 2
    assert evict(policy, 2) == ["old0", "d0"]


def test_keys_are_named_as_one_reads_them() -> None:
    assert name(block("a", 3)) == "a3"
