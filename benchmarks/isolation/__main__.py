"""Checks whether the time to first token reveals to one account what another has sent.

python -m benchmarks.isolation [--quick] [--json FILE] [--markdown FILE]

Account A asks prompts, all of which stay cached for A. Then, in random order: account B asks the same prompts, B asks
prompts that nobody has asked, and A asks its own again. If B's two samples of TTFT cannot be told apart, the cache
tells B nothing; that A's can be told from them shows that the test would see it.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from benchmarks.isolation.significance import Comparison, compare
from benchmarks.lib.command import Outcome, Progress, Sheet, Target, parser, run
from benchmarks.lib.memory_need import check_memory, kv_bytes_per_token
from benchmarks.lib.prompts import prompts
from benchmarks.lib.report import Rows
from benchmarks.lib.served import Served
from benchmarks.lib.stats import Answer, percentile
from benchmarks.lib.streaming import ask, new_client
from tandem_engine.demo import MODEL_ID, checkpoint_path

MIN_P_VALUE = 0.01
"""Below it, two samples differ. One undisturbed run in a hundred falls below where there is nothing to see."""
_NUM_PROMPT_TOKENS = 256
_NUM_OUTPUT_TOKENS = 4
_NUM_PROMPTS = 200
_QUICK_PROMPTS = 25
_NUM_WARM_UPS = 5
_ROLES = ("decode", "kv", "prefill")
_SPARE = 1.3
"""Room in the store, for what is asked while the service gets ready."""

Kind = Literal["asked_by_a", "asked_by_nobody", "a_again"]
Samples = dict[Kind, list[Answer]]
_SHARED: Kind = "asked_by_a"
_FRESH: Kind = "asked_by_nobody"
_AGAIN: Kind = "a_again"


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask, compare, print, save; return the exit code."""
    quick = f"{_QUICK_PROMPTS} prompts of each kind: does it still work?"
    options = parser("isolation", __doc__, quick).parse_args(arguments)
    num_prompts = _QUICK_PROMPTS if options.quick else _NUM_PROMPTS
    conditions = {
        "model": MODEL_ID,
        "requests": f"{num_prompts} prompts of each kind, {_NUM_PROMPT_TOKENS} tokens of random words, streamed over "
        "the Workers AI REST interface, one at a time, in random order after A's first round",
        "services": "one prefill and one decode worker, --local-prefill never; the store has room for all of it",
        "test": "two-sided permutation test of the Mann-Whitney statistic; 95 % interval of the AUC by DeLong",
    }

    async def measure(outcome: Outcome, folder: Path, progress: Progress) -> None:
        add(outcome, await ask_in_random_order(num_prompts, folder / "up", progress))

    return run("isolation", options, conditions, measure)


async def ask_in_random_order(num_prompts: int, folder: Path, progress: Progress) -> Samples:
    """Return the answers by kind, `num_prompts` of each."""
    model = checkpoint_path()
    check_memory(model, 2)
    num_stored_tokens = 3 * num_prompts * (_NUM_PROMPT_TOKENS + _NUM_OUTPUT_TOKENS)
    environment = {
        "TANDEM_KV_STORE_BYTES": str(int(_SPARE * num_stored_tokens * kv_bytes_per_token(model))),
        "TANDEM_CONTROL_LOCAL_PREFILL": "never",
        # No probe between two requests.
        "TANDEM_CONTROL_PROBE_INTERVAL_SECONDS": "86400",
        "TANDEM_CONTROL_PROBE_VALID_SECONDS": "172800",
    }
    source = prompts(model, _NUM_PROMPT_TOKENS)
    shared, fresh, warm_ups = (list(itertools.islice(source, n)) for n in (num_prompts, num_prompts, _NUM_WARM_UPS))
    async with Served(folder, (), environment, _ROLES) as served, new_client(served.base_url) as client:

        async def answer(prompt: str, account: str) -> Answer:
            return await ask(client, served.model, prompt, _NUM_OUTPUT_TOKENS, account)

        progress(f"account A asks {num_prompts} prompts")
        for prompt in [*warm_ups, *shared]:
            await answer(prompt, "account-a")
        progress(f"both accounts ask, {3 * num_prompts} times")
        samples: Samples = {_SHARED: [], _FRESH: [], _AGAIN: []}
        for kind, prompt in in_random_order(shared, fresh):
            samples[kind].append(await answer(prompt, "account-a" if kind == _AGAIN else "account-b"))
    return samples


# -------------------------------------------------------------------------------------------------- pure from here on


def in_random_order(shared: Sequence[str], fresh: Sequence[str], seed: int = 1) -> list[tuple[Kind, str]]:
    """Return what is asked, each prompt once of a kind; whatever drifts, drifts for all kinds alike."""
    asked: list[tuple[Kind, str]] = [
        *((_SHARED, prompt) for prompt in shared),
        *((_AGAIN, prompt) for prompt in shared),
        *((_FRESH, prompt) for prompt in fresh),
    ]
    random.Random(seed).shuffle(asked)
    return asked


def num_hits_across(samples: Samples) -> int:
    """Return how many tokens of account B's prompts came from a cache; B never asked one twice."""
    return sum(answer.num_cached_tokens for kind in (_SHARED, _FRESH) for answer in samples[kind])


def add(outcome: Outcome, samples: Samples) -> None:
    """Enter tables, figures and targets."""
    seconds = {kind: [answer.ttft_seconds for answer in answers] for kind, answers in samples.items()}
    isolation = compare(seconds[_SHARED], seconds[_FRESH])
    control = compare(seconds[_AGAIN], seconds[_FRESH])
    hits = num_hits_across(samples)
    outcome.sheets += [_times(samples, seconds), _comparisons(isolation, control)]
    for name, comparison in (("isolation", isolation), ("control", control)):
        outcome.figures |= {
            f"{name}_p_value": comparison.p_value,
            f"{name}_auc": comparison.auc,
            f"{name}_auc_low": comparison.auc_low,
            f"{name}_auc_high": comparison.auc_high,
        }
    outcome.figures |= {"hits_across_accounts": hits, "num_of_each_kind": len(samples[_SHARED])}
    outcome.figures |= {f"ttft_ms.p50.{kind}": 1000 * percentile(some, 50) for kind, some in seconds.items()}
    outcome.targets += [
        Target(f"{hits} tokens of B's prompts were cached, wanted none", hits == 0),
        Target(
            f"TTFT tells B nothing: p = {isolation.p_value:.3f}, at least {MIN_P_VALUE}; AUC {_interval(isolation)}",
            isolation.p_value >= MIN_P_VALUE,
        ),
        Target(
            f"the test would see a cache: A's own prompts, p = {control.p_value:.5f}; AUC {_interval(control)}",
            control.p_value < MIN_P_VALUE and control.auc > 0.5,
        ),
    ]


def _times(samples: Samples, seconds: dict[Kind, list[float]]) -> Sheet:
    rows: Rows = [
        (
            kind,
            str(len(some)),
            *(f"{1000 * percentile(some, percent):.1f}" for percent in (25, 50, 75)),
            str(sum(answer.num_cached_tokens for answer in samples[kind])),
        )
        for kind, some in seconds.items()
    ]
    return Sheet("TTFT", ("prompts", "n", "ms p25", "ms p50", "ms p75", "cached tokens"), rows)


def _comparisons(isolation: Comparison, control: Comparison) -> Sheet:
    rows: Rows = [
        (what, f"{each.num_first} + {each.num_second}", _interval(each), f"{each.p_value:.5f}")
        for what, each in (
            ("B: asked by A, or by nobody", isolation),
            ("A again, or B what nobody asked", control),
        )
    ]
    return Sheet("can they be distinguished?", ("samples", "n", "AUC (95 %)", "p"), rows)


def _interval(comparison: Comparison) -> str:
    return f"{comparison.auc:.3f} ({comparison.auc_low:.3f} to {comparison.auc_high:.3f})"


if __name__ == "__main__":
    sys.exit(main())
