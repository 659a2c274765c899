"""A gateway signs handles; who has the public key verifies them, and can neither make nor change one."""

from __future__ import annotations

import hmac
from collections.abc import Callable

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import Unauthenticated, Unavailable
from tandem_runtime.kv import signatures
from tandem_runtime.kv.keys import KvKeys
from tandem_runtime.kv.mac import sign_handle
from tandem_runtime.kv.signatures import HandleSigner, HandleVerifier, key_id, signed_bytes

SIGNER = HandleSigner(bytes(range(32)))
MAC_KEY = b"the handle key of release 0.2"
NOON = 1_800_000_000.0


def a_handle(**changes: object) -> pb.KvHandle:
    fields = {
        "handle_id": b"0123456789abcdef",
        "request_id": "request-1",
        "attempt": 1,
        "prefill_incarnation": "prefill-1",
        "holder_address": "10.0.0.1:8650",
        "holder_incarnation": "kv-1",
        "model": pb.ModelRef(model_id="m", fingerprint=b"f" * 16),
        "layout_digest": b"l" * 16,
        "num_tokens": 64,
        "num_readers": 1,
        "deadline_unix_ms": 4_000_000_000_000,
        "holder_id": "0123456789abcdef",
    }
    return pb.KvHandle(**(fields | changes))  # type: ignore[arg-type]


def verifier(*signers: HandleSigner) -> HandleVerifier:
    keys = KvKeys(tuple(signer.public_key for signer in signers))
    return HandleVerifier(lambda: keys)


def test_a_signed_handle_is_verified_and_the_original_stays_unsigned() -> None:
    handle = a_handle()
    signed = SIGNER.sign(handle)
    verifier(SIGNER).verify(signed)
    assert (handle.signature, len(signed.signature), signed.mac) == (b"", signatures.SIGNATURE_BYTES, b"")
    verifier(SIGNER).verify(SIGNER.sign(signed))  # signing again replaces the signature


CHANGES: list[tuple[str, Callable[[pb.KvHandle], None]]] = [
    ("another id", lambda handle: setattr(handle, "handle_id", b"fedcba9876543210")),
    ("another request", lambda handle: setattr(handle, "request_id", "request-2")),
    ("another attempt", lambda handle: setattr(handle, "attempt", 2)),
    ("another writer", lambda handle: setattr(handle, "prefill_incarnation", "prefill-2")),
    ("another holder", lambda handle: setattr(handle, "holder_address", "10.0.0.2:8650")),
    ("another certificate of the holder", lambda handle: setattr(handle, "holder_id", "fedcba9876543210")),
    ("another life of the holder", lambda handle: setattr(handle, "holder_incarnation", "kv-2")),
    ("another model", lambda handle: setattr(handle.model, "model_id", "n")),
    ("other weights", lambda handle: setattr(handle.model, "fingerprint", b"g" * 16)),
    ("another layout", lambda handle: setattr(handle, "layout_digest", b"k" * 16)),
    ("more tokens", lambda handle: setattr(handle, "num_tokens", 65)),
    ("more readers", lambda handle: setattr(handle, "num_readers", 2)),
    ("a later deadline", lambda handle: setattr(handle, "deadline_unix_ms", handle.deadline_unix_ms + 1)),
    ("a negative deadline", lambda handle: setattr(handle, "deadline_unix_ms", -1)),
    ("a character moved to the next field", lambda handle: _move(handle)),
    ("a cut signature", lambda handle: setattr(handle, "signature", handle.signature[:-1])),
    ("a longer signature", lambda handle: setattr(handle, "signature", handle.signature + b"\0")),
    ("a flipped bit", lambda handle: setattr(handle, "signature", handle.signature[:-1] + b"\xff")),
    ("another version", lambda handle: setattr(handle, "signature", b"\2" + handle.signature[1:])),
    ("another key id", lambda handle: setattr(handle, "signature", b"\1" + bytes(8) + handle.signature[9:])),
    ("no signature", lambda handle: handle.ClearField("signature")),
    ("a MAC in place of the signature", lambda handle: handle.CopyFrom(_with_mac_only(handle))),
]


def _move(handle: pb.KvHandle) -> None:
    handle.holder_address, handle.holder_incarnation = "10.0.0.1:8650k", "v-1"


def _with_mac_only(handle: pb.KvHandle) -> pb.KvHandle:
    handle.ClearField("signature")
    return sign_handle(handle, MAC_KEY)


@pytest.mark.parametrize(("what", "change"), CHANGES, ids=[what for what, _ in CHANGES])
def test_a_handle_with_a_change_is_refused_also_after_the_right_one_was_accepted(
    what: str, change: Callable[[pb.KvHandle], None]
) -> None:
    checks = verifier(SIGNER)
    forged = SIGNER.sign(a_handle())
    checks.verify(forged)
    change(forged)
    with pytest.raises(Unauthenticated, match="the KV handle of request") as refused:
        checks.verify(forged)
    assert refused.value.field == "signature" and checks.num_verified == 1


def test_every_field_is_signed() -> None:
    handle = a_handle()
    set_fields = {field.name: value for field, value in handle.ListFields()}
    assert {field.name for field in pb.KvHandle.DESCRIPTOR.fields} == {*set_fields, "signature", "mac"}
    for name in set_fields:
        without = pb.KvHandle(**{key: value for key, value in set_fields.items() if key != name})
        assert signed_bytes(without, b"12345678") != signed_bytes(handle, b"12345678"), name


def test_the_signature_of_one_handle_is_no_signature_of_another() -> None:
    """A worker holds the handles of its own requests only."""
    mine, other = SIGNER.sign(a_handle(request_id="mine")), a_handle(request_id="another tenant's")
    other.signature = mine.signature
    with pytest.raises(Unauthenticated, match="wrong signature"):
        verifier(SIGNER).verify(other)


def test_a_handle_of_another_fleet_is_refused_and_the_error_names_the_keys() -> None:
    stranger = HandleSigner(b"\7" * 32)
    with pytest.raises(Unauthenticated, match=key_id(stranger.public_key).hex()) as refused:
        verifier(SIGNER).verify(stranger.sign(a_handle()))
    assert key_id(SIGNER.public_key).hex() in refused.value.message


def test_during_a_rotation_both_keys_are_valid_and_afterwards_the_new_one_only() -> None:
    new = HandleSigner(b"\7" * 32)
    keys = KvKeys((SIGNER.public_key,))
    checks = HandleVerifier(lambda: keys)
    by_old, by_new = SIGNER.sign(a_handle()), new.sign(a_handle())
    checks.verify(by_old)
    keys = KvKeys((SIGNER.public_key, new.public_key))
    checks.verify(by_old)
    checks.verify(by_new)
    keys = KvKeys((new.public_key,))
    checks.verify(by_new)
    with pytest.raises(Unauthenticated):
        checks.verify(by_old)


def test_nothing_is_verified_before_the_keys_are_there() -> None:
    with pytest.raises(Unavailable, match="not registered"):
        HandleVerifier(KvKeys).verify(SIGNER.sign(a_handle()))
    with pytest.raises(Unauthenticated):  # a key that is no key is not used
        HandleVerifier(lambda: KvKeys((b"short",), mac_key=MAC_KEY)).verify(SIGNER.sign(a_handle()))


def test_a_handle_is_verified_once_and_the_list_of_verified_ones_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signatures, "MAX_VERIFIED", 2)
    num_verifications = 0

    class Counted:
        def __init__(self, raw: bytes) -> None:
            self._key = Ed25519PublicKey.from_public_bytes(raw)

        from_public_bytes = classmethod(lambda cls, raw: cls(raw))

        def verify(self, signature: bytes, content: bytes) -> None:
            nonlocal num_verifications
            num_verifications += 1
            self._key.verify(signature, content)

    monkeypatch.setattr(signatures, "Ed25519PublicKey", Counted)
    checks = verifier(SIGNER)
    handles = [SIGNER.sign(a_handle(request_id=str(number))) for number in range(3)]
    for handle in (handles[0], handles[0], handles[1], handles[0]):
        checks.verify(handle)
    assert (num_verifications, checks.num_verified) == (2, 2)
    checks.verify(handles[2])  # the oldest is forgotten
    checks.verify(handles[0])
    assert (num_verifications, checks.num_verified) == (4, 2)


def test_a_handle_of_many_bytes_is_refused_before_its_signature_is_looked_at() -> None:
    signed = SIGNER.sign(a_handle())
    signed.request_id = "x" * 9000
    with pytest.raises(Unauthenticated, match="at most 8192"):
        verifier(SIGNER).verify(signed)


def test_the_signed_bytes_do_not_depend_on_how_protobuf_writes_the_message() -> None:
    signed = SIGNER.sign(a_handle())
    fields = {field.number: value for field, value in signed.ListFields()}
    backwards = b""
    for number in sorted(fields, reverse=True):
        one = pb.KvHandle()
        part = next(field for field, _ in signed.ListFields() if field.number == number)
        if part.type == part.TYPE_MESSAGE:
            getattr(one, part.name).CopyFrom(fields[number])
        else:
            setattr(one, part.name, fields[number])
        backwards += one.SerializeToString()
    again = pb.KvHandle.FromString(backwards)
    assert backwards != signed.SerializeToString(deterministic=True)
    assert signed_bytes(again, b"k") == signed_bytes(signed, b"k")
    verifier(SIGNER).verify(again)


# --------------------------------------------------------------------------------------- beside release 0.2


def old_kv_handle() -> type[Message]:
    """Return KvHandle as release 0.2 has it: without the fields that came later."""
    types = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(types)
    types.name, types.package = "release_0_2.proto", "release_0_2"
    (handle,) = (message for message in types.message_type if message.name == "KvHandle")
    kept = [field for field in handle.field if field.name not in ("signature", "holder_id")]
    del handle.field[:]
    handle.field.extend(kept)
    for message in types.message_type:
        for field in [*message.field, *(field for nested in message.nested_type for field in nested.field)]:
            if field.type_name:
                field.type_name = field.type_name.replace(".tandem.v1.", ".release_0_2.")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(types)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("release_0_2.KvHandle"))


def old_mac(handle: Message) -> bytes:
    """Return the MAC that a KV service of release 0.2 computes for a handle."""
    unsigned = type(handle)()
    unsigned.CopyFrom(handle)
    unsigned.ClearField("mac")
    return hmac.digest(MAC_KEY, unsigned.SerializeToString(deterministic=True), "sha256")[:16]


def signer_until(until: float, now: float) -> HandleSigner:
    return HandleSigner(bytes(range(32)), MAC_KEY, until, lambda: now)


def verifier_until(until: float, now: float) -> HandleVerifier:
    return HandleVerifier(lambda: KvKeys((SIGNER.public_key,), mac_key=MAC_KEY), until, lambda: now)


def test_a_service_of_release_0_2_verifies_handles_of_new_gateways_until_the_set_time() -> None:
    old_type = old_kv_handle()
    both = signer_until(NOON, now=NOON - 1).sign(a_handle())
    verifier(SIGNER).verify(both)
    # An old worker passes the handle on: fields that it does not know stay, and an old service's MAC covers them.
    passed_on = old_type.FromString(both.SerializeToString()).SerializeToString()
    assert old_mac(old_type.FromString(passed_on)) == both.mac
    verifier(SIGNER).verify(pb.KvHandle.FromString(passed_on))
    assert signer_until(NOON, now=NOON).sign(a_handle()).mac == b""


def test_a_handle_of_an_old_gateway_is_accepted_until_the_set_time_only() -> None:
    old = sign_handle(a_handle(), MAC_KEY)
    verifier_until(NOON, now=NOON - 1).verify(old)
    HandleVerifier(lambda: KvKeys(mac_key=MAC_KEY), NOON, lambda: NOON - 1).verify(old)  # only old gateways so far
    with pytest.raises(Unauthenticated, match="--hmac-handles-until"):
        verifier_until(NOON, now=NOON).verify(old)
    with pytest.raises(Unauthenticated, match="--hmac-handles-until"):
        verifier_until(0.0, now=NOON).verify(old)
    old.num_readers = 2
    with pytest.raises(Unauthenticated, match="wrong MAC"):
        verifier_until(NOON, now=NOON - 1).verify(old)


def test_a_wrong_signature_is_not_made_good_by_a_mac() -> None:
    """Workers of release 0.2 have the key for MACs: a handle that a new gateway signed, they cannot change."""
    both = signer_until(NOON, now=NOON - 1).sign(a_handle())
    both.num_readers = 2
    forged = sign_handle(both, MAC_KEY)
    with pytest.raises(Unauthenticated, match="wrong signature"):
        verifier_until(NOON, now=NOON - 1).verify(forged)
