"""Tests which processes are planned for a machine and options."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.settings import ControlPlaneSettings
from tandem_client.cli.placement import divide_cores
from tandem_client.cli.plan import (
    Configured,
    Machine,
    ProcessSpec,
    UpOptions,
    configured_settings,
    cores_beside_decode,
    gateway_drain_seconds,
    kv_bytes_per_worker,
    plan,
    this_machine,
)
from tests.tandem_machine.cgroup_tree import put_into_cgroup

GIB = 1 << 30
TWO_CORES = Machine(cores=(0, 1), free_memory_bytes=24 * GIB)


def flag(spec: ProcessSpec, name: str) -> str | None:
    return spec.command[spec.command.index(name) + 1] if name in spec.command else None


def test_the_default_is_four_processes_that_find_the_control_plane() -> None:
    control, kv, prefill, decode = plan(TWO_CORES, UpOptions())
    assert control.command == (
        *(sys.executable, "-m", "control_plane"),
        *("--listen", "127.0.0.1:8642", "--grpc-listen", "127.0.0.1:8643"),
    )
    assert kv.command[1:] == (
        *("-m", "kv_transfer_svc", "--control", "127.0.0.1:8643", "--listen", "127.0.0.1:0"),
        *("--worker-id", "kv-service"),
    )
    assert prefill.command[1:] == (
        *("-m", "prefill_svc", "--control", "127.0.0.1:8643", "--listen", "127.0.0.1:0", "--worker-id", "prefill-0"),
        *("--cpus", "0", "--num-threads", "1", "--kv-memory-limit-bytes", str((24 << 10) // 5 << 20)),
    )
    assert (flag(decode, "--cpus"), dict(decode.environment)) == ("1", {"OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize(
    ("control", "seconds"),
    [
        ({}, 600.0),
        ({"drain_seconds": 45}, 45.0),
        ({"request_timeout_seconds": "1200"}, 1200.0),
        ({"request_timeout_seconds": 1200.0, "drain_seconds": "0"}, 0.0),
        ({"drain_seconds": "soon"}, 600.0),
    ],
)
def test_the_gateway_may_drain_as_long_as_its_longest_request_takes(control: dict[str, object], seconds: float) -> None:
    assert gateway_drain_seconds({"control": control}) == seconds
    planned, *_ = plan(TWO_CORES, UpOptions(), {"control": control})
    assert "TANDEM_CONTROL_DRAIN_SECONDS" not in dict(planned.environment), "it is the gateway's own setting"
    assert gateway_drain_seconds({}) == ControlPlaneSettings().longest_drain_seconds


def test_without_certificates_every_process_says_so() -> None:
    assert all("--insecure-plaintext" not in spec.command for spec in plan(TWO_CORES, UpOptions(insecure_http=True)))
    assert all("--insecure-plaintext" in spec.command for spec in plan(TWO_CORES, UpOptions(insecure_plaintext=True)))
    control, *others = plan(TWO_CORES, UpOptions(host="0.0.0.0", insecure_http=True))
    assert "--insecure-http" in control.command
    assert not any("--insecure-http" in spec.command for spec in others), "they serve no HTTP"


def test_the_enrolment_port_is_beside_the_grpc_port() -> None:
    assert [UpOptions(grpc_port=port).enrolment_port for port in (8643, 65_534, 65_535)] == [8644, 65_535, 65_534]


def test_without_prefill_there_is_no_kv_service() -> None:
    assert [spec.name for spec in plan(TWO_CORES, UpOptions(num_prefill=0))] == ["control-plane", "decode-0"]


def test_model_name_and_config_reach_the_workers() -> None:
    options = UpOptions(model="org/m", served_model_name="m", config=Path("t.toml"), port=9000, grpc_port=9001)
    with_fallback, *_ = plan(TWO_CORES, UpOptions(fallback_model="@tandem/demo"))
    assert flag(with_fallback, "--fallback-model") == "@tandem/demo"
    control, _, prefill, decode = plan(TWO_CORES, options)
    for worker in (prefill, decode):
        assert (flag(worker, "--model"), flag(worker, "--served-model-name")) == ("org/m", "m")
        assert (flag(worker, "--control"), flag(worker, "--config")) == ("127.0.0.1:9001", "t.toml")
    assert (flag(control, "--listen"), flag(control, "--fallback-model")) == ("127.0.0.1:9000", None)


def test_an_encoder_has_a_worker_of_its_own_off_the_cores_that_decode() -> None:
    options = UpOptions(embedding_models=("org/e", "org/r"))
    *_, prefill, decode, first, second = specs = plan(TWO_CORES, options)
    assert [(spec.name, spec.role, flag(spec, "--model")) for spec in (first, second)] == [
        ("encode-0", "encode", "org/e"),
        ("encode-1", "encode", "org/r"),
    ]
    assert first.command[1:3] == ("-m", "encode_svc") and "--background" in first.command
    assert "--background" not in prefill.command + decode.command
    assert (prefill.cores, decode.cores, first.cores, second.cores) == ((0,), (1,), (0,), (0,))
    assert dict(first.environment) == {"OMP_NUM_THREADS": "1"}
    assert cores_beside_decode(TWO_CORES, specs) == (0,)
    four = Machine(cores=(0, 1, 2, 3), free_memory_bytes=24 * GIB, gpus=("0", "1", "2", "3"))
    on_four = plan(four, options)[2:]
    assert not any("--background" in spec.command for spec in on_four)
    assert sorted(core for spec in on_four for core in spec.cores) == [0, 1, 2, 3], "each engine has its own"
    assert [dict(spec.environment)["CUDA_VISIBLE_DEVICES"] for spec in on_four] == ["0", "1", "2", "3"]
    assert flag(plan(TWO_CORES, options, {"encode": {"num_threads": "1"}})[-1], "--cpus") is None


def test_an_encoder_beside_aggregated_workers_shares_all_cores() -> None:
    _, decode, encoder = plan(
        Machine(cores=(0,), free_memory_bytes=GIB), UpOptions(num_prefill=0, embedding_models=("e",))
    )
    assert (decode.cores, encoder.cores, flag(encoder, "--num-threads")) == ((0,), (), "1")


def test_a_share_does_not_replace_what_the_user_configured() -> None:
    _, _, prefill, decode = plan(TWO_CORES, UpOptions(), {"decode": {"num_kv_blocks": "9", "num_threads": "1"}})
    assert flag(prefill, "--cpus") == "0"
    assert [flag(decode, name) for name in ("--cpus", "--num-threads", "--kv-memory-limit-bytes")] == [None, None, None]
    assert decode.environment == ()


def test_what_is_no_engine_stays_off_the_cores_where_answers_are_decoded() -> None:
    four = Machine(cores=(0, 1, 2, 3), free_memory_bytes=24 * GIB)
    assert cores_beside_decode(TWO_CORES, plan(TWO_CORES, UpOptions())) == (0,)
    assert cores_beside_decode(four, plan(four, UpOptions())) == (0, 1)
    assert cores_beside_decode(four, plan(four, UpOptions(num_prefill=2, num_decode=1))) == (0, 1, 2)


def test_configured_cores_count_as_well() -> None:
    configured: Configured = {"prefill": {"cpus": [1]}, "decode": {"cpus": "0"}}
    specs = plan(TWO_CORES, UpOptions(), configured)
    assert [spec.cores for spec in specs] == [(), (), (1,), (0,)]
    assert cores_beside_decode(TWO_CORES, specs) == (1,)


def test_nothing_is_kept_off_where_decode_has_all_cores_or_an_engine_may_go_anywhere() -> None:
    assert cores_beside_decode(TWO_CORES, plan(TWO_CORES, UpOptions(num_prefill=0))) == ()
    assert cores_beside_decode(TWO_CORES, plan(TWO_CORES, UpOptions(num_decode=2))) == ()
    for role in ("prefill", "decode"):
        for mine in {"num_threads": "2"}, {"cpus": "all"}:
            assert cores_beside_decode(TWO_CORES, plan(TWO_CORES, UpOptions(), {role: mine})) == ()


def test_gpus_go_round_and_engines_on_one_card_share_its_memory() -> None:
    machine = Machine(cores=tuple(range(8)), free_memory_bytes=24 * GIB, gpus=("0", "GPU-1"))

    def cards(options: UpOptions) -> list[tuple[str, str | None]]:
        workers = plan(machine, options)[2:]
        assert {flag(worker, "--kv-memory-limit-bytes") for worker in workers} == {None}, "a card is no host memory"
        visible = [dict(worker.environment)["CUDA_VISIBLE_DEVICES"] for worker in workers]
        return list(zip(visible, (flag(worker, "--device-memory-share") for worker in workers), strict=True))

    assert cards(UpOptions()) == [("0", "0.9"), ("GPU-1", "0.9")]
    assert cards(UpOptions(num_decode=2)) == [("0", "0.45"), ("GPU-1", "0.9"), ("0", "0.45")]
    assert cards(UpOptions(num_prefill=3, num_decode=2))[0] == ("0", "0.3")
    # An encoder sizes no pool, but it has its share.
    assert cards(UpOptions(embedding_models=("e",))) == [("0", "0.45"), ("GPU-1", "0.9"), ("0", None)]
    one_core = replace(machine, cores=(0,))
    prefill, decode, encoder = plan(one_core, UpOptions(embedding_models=("e",)))[2:]
    assert [flag(each, "--device-memory-share") for each in (prefill, decode, encoder)] == ["0.45", "0.9", None]
    assert dict(encoder.environment)["CUDA_VISIBLE_DEVICES"] == "0"


def test_a_share_of_a_card_in_the_settings_wins() -> None:
    machine = Machine(cores=(0, 1), free_memory_bytes=24 * GIB, gpus=("0",))
    prefill, decode = plan(machine, UpOptions(), {"prefill": {"device_memory_share": "0.2"}})[2:]
    assert (flag(prefill, "--device-memory-share"), flag(decode, "--device-memory-share")) == (None, "0.45")


@given(num_cores=st.integers(1, 40), num_workers=st.integers(1, 12))
def test_cores_are_divided_evenly_and_shared_only_if_there_are_too_few(num_cores: int, num_workers: int) -> None:
    shares = divide_cores(range(num_cores), num_workers)
    sizes = [len(share) for share in shares]
    assert len(shares) == num_workers
    assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1
    if num_cores >= num_workers:
        assert [core for share in shares for core in share] == list(range(num_cores))


def test_kv_memory_is_a_fifth_of_what_is_free_for_each_worker_and_three_fifths_for_all() -> None:
    assert kv_bytes_per_worker(500 * GIB, 2) == 100 * GIB
    assert kv_bytes_per_worker(5 * GIB, 1) == GIB
    assert kv_bytes_per_worker(10 * GIB, 6) == GIB
    assert kv_bytes_per_worker(0, 2) == 0


def test_under_a_quota_workers_get_threads_and_no_cores_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two containers of one machine would else pin their engines to the same cores."""
    quota = {"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}
    put_into_cgroup(tmp_path, monkeypatch, "4:cpu:/\n", quota)
    for module in ("tandem_machine.cores", "tandem_client.cli.plan"):
        monkeypatch.setattr(f"{module}.allowed_cores", lambda: tuple(range(64)))
    machine = this_machine()
    assert (len(machine.cores), machine.is_pinned) == (4, False)
    specs = plan(machine, UpOptions())
    assert [(flag(worker, "--num-threads"), flag(worker, "--cpus")) for worker in specs[2:]] == [("2", None)] * 2
    assert cores_beside_decode(machine, specs) == ()


def test_this_machine_has_a_core_and_memory() -> None:
    machine = this_machine()
    assert machine.cores
    assert machine.free_memory_bytes > 0


def test_configured_settings_come_from_the_file_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tandem.toml"
    file.write_text('model = "x"\n[decode]\nnum_kv_blocks = 100\n')
    monkeypatch.setenv("TANDEM_PREFILL_CPUS", "0,1")
    found = configured_settings(file)
    assert (found["prefill"], found["decode"], found["kv"]) == ({"cpus": "0,1"}, {"num_kv_blocks": 100}, {})


def test_a_settings_file_that_is_not_there_or_not_toml_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no settings file"):
        configured_settings(tmp_path / "absent.toml")
    (tmp_path / "bad.toml").write_text("= 1")
    with pytest.raises(ValueError, match="not TOML"):
        configured_settings(tmp_path / "bad.toml")
