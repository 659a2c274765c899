"""Tests of the transport settings: grpc is always included."""

from __future__ import annotations

import pytest

from kv_transfer_svc.settings import KvSettings


@pytest.mark.parametrize("transports", [("tcp",), ("grpc", "rdma"), ()])
def test_transports_must_be_known_and_contain_grpc(transports: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="--transports"):
        KvSettings(transports=transports)


def test_data_connections_are_taken_where_grpc_is_unless_told_otherwise() -> None:
    assert KvSettings(listen="10.0.0.2:7000").data_address == "10.0.0.2:0"
    assert KvSettings(listen="[::1]:7000").data_address == "[::1]:0"
    assert KvSettings(data_listen="10.0.0.3:7001").data_address == "10.0.0.3:7001"
