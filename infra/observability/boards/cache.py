"""Prompt caches, KV pools, hand-overs, block stores and links."""

from __future__ import annotations

from infra.observability.panels import MODEL, RATE, ROLE, BoardSpec, RowSpec, graph
from infra.observability.queries import WORKER, percentiles, rate


def board() -> BoardSpec:
    return BoardSpec(
        "tandem-cache",
        "Tandem: KV and cache",
        "Prompt caches, KV pools, hand-overs, block stores and links.",
        [_prompts(), _pools(), _stores()],
    )


def _prompts() -> RowSpec:
    return RowSpec(
        "Prompt caches",
        [
            graph(
                "Hit rate",
                "Which share of prompt tokens was found in a cache, by tier?",
                "percentunit",
                (
                    f"{rate('tandem_cache_hit_tokens_total', MODEL, 'tier')} / ignoring (tier) group_left () "
                    f"sum(rate(tandem_cache_prompt_tokens_total{{{MODEL}}}[{RATE}]))",
                    "{{tier}}",
                ),
                stacked=True,
            ),
            graph(
                "Predicted and found",
                "Does the router's index know the caches?",
                "short",
                (rate("tandem_cache_predicted_tokens_total", MODEL, "model"), "predicted {{model}}"),
                (rate("tandem_cache_hit_tokens_total", MODEL, "model"), "found {{model}}"),
                (rate("tandem_cache_mispredicted_tokens_total", MODEL, "model, kind"), "{{kind}} {{model}}"),
            ),
            graph(
                "Prompt tokens of workers",
                "How many prompt tokens are computed, found in the pool, loaded, and computed twice?",
                "short",
                (rate("tandem_worker_prompt_tokens_computed_total", ROLE, "role"), "{{role}} computed"),
                (rate("tandem_worker_prompt_tokens_cached_total", ROLE, "role"), "{{role}} cached"),
                (rate("tandem_worker_prompt_tokens_loaded_total", ROLE, "role"), "{{role}} loaded"),
                (rate("tandem_worker_reprefill_tokens_total", ROLE, "role"), "{{role}} again"),
            ),
        ],
    )


def _pools() -> RowSpec:
    return RowSpec(
        "Pools and hand-over",
        [
            graph(
                "KV pools",
                "How full is the KV pool of each worker?",
                "bytes",
                (f"sum by (role, worker, state) (tandem_worker_kv_size_bytes{{{ROLE}}})", f"{WORKER} {{{{state}}}}"),
            ),
            graph(
                "Preemptions",
                "Which workers take the blocks of running requests?",
                "short",
                (rate("tandem_worker_preemptions_total", ROLE, "role, worker"), WORKER),
            ),
            graph(
                "Hand-over",
                "How many bytes of KV cache go from prefill to decode?",
                "Bps",
                (rate("tandem_hand_over_size_bytes_total", MODEL, "model, transport"), "{{model}} {{transport}}"),
            ),
            graph(
                "Hand-over duration",
                "How long is the gap before token two?",
                "s",
                *percentiles("tandem_hand_over_duration_seconds", MODEL, "model, transport", "{{model}} {{transport}}"),
            ),
            graph(
                "Blocks imported",
                "How many KV blocks does each worker copy in, and are any corrupt?",
                "short",
                (rate("tandem_worker_blocks_imported_total", ROLE, "role, worker"), WORKER),
                (rate("tandem_worker_blocks_corrupt_total", ROLE, "role, worker"), f"{WORKER} corrupt"),
            ),
            graph(
                "Orphaned KV",
                "Which services keep KV memory without need? Always a fault.",
                "bytes",
                ("max by (service, kind) (tandem_kv_orphan_bytes)", "{{service}} {{kind}}"),
                ("max(tandem_kv_audit_unanswered)", "services that did not answer the audit"),
            ),
        ],
    )


def _stores() -> RowSpec:
    return RowSpec(
        "Stores and links",
        [
            graph(
                "Stores",
                "How full are the block stores, in memory and on disk?",
                "bytes",
                (
                    "sum by (host_id, tier, state) (tandem_kv_store_size_bytes)",
                    "{{host_id}} {{tier}} {{state}}",
                ),
            ),
            graph(
                "Hits of stores",
                "Which share of the blocks that are asked for does each tier have?",
                "percentunit",
                (
                    f"sum by (host_id, tier) (rate(tandem_kv_store_hits_total[{RATE}])) / "
                    f"sum by (host_id, tier) (rate(tandem_kv_store_lookups_total[{RATE}]))",
                    "{{host_id}} {{tier}}",
                ),
            ),
            graph(
                "Stored and evicted",
                "Are the stores too small?",
                "short",
                (f"sum by (host_id) (rate(tandem_kv_store_stored_total[{RATE}]))", "{{host_id}} stored"),
                (
                    f"sum by (host_id, tier) (rate(tandem_kv_store_evictions_total[{RATE}]))",
                    "{{host_id}} evicted {{tier}}",
                ),
            ),
            graph(
                "Handles",
                "How many hand-overs are under way, and in which state?",
                "short",
                ("sum by (host_id, state) (tandem_kv_handles)", "{{host_id}} {{state}}"),
            ),
            graph(
                "Ends of handles",
                "How do hand-overs end? `aborted` and `expired` are faults.",
                "short",
                (f"sum by (state) (rate(tandem_kv_handle_changes_total[{RATE}]))", "{{state}}"),
            ),
            graph(
                "Arenas and leases",
                "How much memory do pulls and readers hold?",
                "bytes",
                ("sum by (host_id, state) (tandem_kv_arena_size_bytes)", "{{host_id}} arena {{state}}"),
                ("sum by (host_id) (tandem_kv_leased_bytes)", "{{host_id}} leased"),
            ),
            graph(
                "Bytes between hosts",
                "How many bytes of KV cache do hosts send and pull?",
                "Bps",
                (f"sum by (host_id) (rate(tandem_kv_pulled_bytes_total[{RATE}]))", "{{host_id}} pulled"),
                (f"sum by (host_id) (rate(tandem_kv_served_bytes_total[{RATE}]))", "{{host_id}} served"),
            ),
            graph(
                "Links",
                "How fast is the link from each other host?",
                "Bps",
                (
                    "max by (host_id, peer, transport) (tandem_kv_link_bytes_per_second)",
                    "{{peer}} to {{host_id}} {{transport}}",
                ),
            ),
            graph(
                "Faults of links",
                "Which links break, fall back to gRPC, or corrupt bytes?",
                "short",
                (
                    f"sum by (host_id, peer) (rate(tandem_kv_link_errors_total[{RATE}]))",
                    "{{peer}} to {{host_id}} errors",
                ),
                (
                    f"sum by (host_id, peer) (rate(tandem_kv_link_fallbacks_total[{RATE}]))",
                    "{{peer}} to {{host_id}} fallbacks",
                ),
                (f"sum by (host_id) (rate(tandem_kv_checksum_failures_total[{RATE}]))", "{{host_id}} checksums"),
            ),
        ],
    )
