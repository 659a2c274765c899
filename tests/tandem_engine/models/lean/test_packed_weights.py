"""The workers of a host share one copy of packed weights, whatever happens to its file."""

from __future__ import annotations

import fcntl
import gc
import multiprocessing
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig

from tandem_engine.models.lean import packed_weights
from tandem_engine.models.lean.decoder import Decoder
from tandem_engine.models.lean.load import LeanRequest, load_decoder
from tandem_engine.models.lean.packed_weights import PackedKey, PackedWeightsCache
from tandem_engine.models.lean.registry import FAMILIES
from tandem_engine.models.lean.tensor_file import ALIGNMENT, TensorFile, TensorFileWriter
from tandem_engine.ops.base import Ops, Weight
from tandem_engine.ops.torch_ops import TorchOps
from tests.tandem_engine.models.lean.kinds import NUM_POSITIONS
from tests.tandem_engine.models.lean.runner import Runner

MakeKind = Callable[..., Path]


def _load(folder: Path, state_dir: Path | None, ops: Ops, reports: list[str] | None = None, **values: Any) -> Decoder:
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    values = {"weights_digest": "d1", "num_positions": NUM_POSITIONS, **values}
    request = LeanRequest(folder, config, FAMILIES[config.model_type], state_dir=state_dir, **values)
    return load_decoder(request, ops, (reports if reports is not None else []).append)


def _logits(decoder: Decoder) -> torch.Tensor:
    runner = Runner(decoder)
    runner.add(range(2, 40))
    return runner.step([(0, 0, 38)])


def _file(state_dir: Path) -> Path:
    (file,) = (state_dir / "packed").glob("*.safetensors")
    return file


@pytest.mark.parametrize("kind", ["llama3", "qwen2", "qwen3-moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mapped_weights_give_the_bits_of_those_in_private_memory(
    kind: str, dtype: torch.dtype, ops: Ops, make_kind: MakeKind, tmp_path: Path
) -> None:
    folder = make_kind(kind, dtype)
    reports: list[str] = []
    first = _load(folder, tmp_path, ops, reports)
    identity = _file(tmp_path).stat().st_ino
    second = _load(folder, tmp_path, ops, reports)
    assert reports == [] and _file(tmp_path).stat().st_ino == identity, "the second worker maps what the first wrote"
    private = _load(folder, None, ops, reports)
    assert "cannot share" in reports[0]
    assert torch.equal(_logits(first), _logits(private)) and torch.equal(_logits(second), _logits(private))


def test_mapped_tensors_are_aligned_and_the_file_is_a_safetensors_file(
    ops: Ops, make_kind: MakeKind, tmp_path: Path
) -> None:
    weights = _load(make_kind("llama-biased"), tmp_path, ops).weights
    tensors = [tensor for weight in weights.linears.values() for tensor in weight.tensors.values()]
    assert all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in [*tensors, *weights.tensors.values()])
    with safe_open(_file(tmp_path), "pt") as file:
        assert torch.equal(file.get_tensor("final_norm"), weights.tensors["final_norm"])


def test_other_weights_other_dtypes_and_other_backends_have_files_of_their_own(
    make_kind: MakeKind, tmp_path: Path
) -> None:
    class OtherOps(TorchOps):
        name = "other"

    folder = make_kind("llama2")
    _load(folder, tmp_path, TorchOps())
    _load(folder, tmp_path, TorchOps(), weights_digest="d2")
    _load(folder, tmp_path, TorchOps(), dtype="bfloat16")
    _load(folder, tmp_path, OtherOps())
    _load(folder, tmp_path, TorchOps(), num_positions=64)
    assert len(list((tmp_path / "packed").glob("*.safetensors"))) == 5


@pytest.mark.parametrize("damage", ["cut", "empty", "foreign", "grown"])
def test_a_damaged_file_is_written_anew(damage: str, make_kind: MakeKind, tmp_path: Path) -> None:
    folder = make_kind("llama2")
    expected = _logits(_load(folder, tmp_path, TorchOps()))
    file = _file(tmp_path)
    content = file.read_bytes()
    file.unlink()  # the decoder above maps the old one
    damaged = {
        "cut": content[:-64],
        "empty": b"",
        "foreign": content.replace(file.stem.encode(), b"0" * 32),
        "grown": content + b"more",
    }
    assert damaged[damage] != content
    file.write_bytes(damaged[damage])
    assert torch.equal(_logits(_load(folder, tmp_path, TorchOps())), expected)
    assert file.read_bytes() == content


def test_a_flipped_bit_is_found_when_asked_for(make_kind: MakeKind, tmp_path: Path) -> None:
    folder = make_kind("llama2")
    expected = _logits(_load(folder, tmp_path, TorchOps(), is_verified=True))
    file, reports = _file(tmp_path), list[str]()
    content = file.read_bytes()
    gc.collect()
    place = TensorFile(file).places["final_norm"].start
    file.unlink()  # a decoder that maps it must not see the damage
    file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    # 1. Nobody asks: the file is mapped as it is.
    _load(folder, tmp_path, TorchOps(), reports)
    assert reports == [] and file.read_bytes() != content
    # 2. Asked for: it is named and written again.
    assert torch.equal(_logits(_load(folder, tmp_path, TorchOps(), reports, is_verified=True)), expected)
    assert "is damaged in " in reports[0] and file.read_bytes() == content


def test_a_file_of_an_earlier_version_is_written_again_when_asked_for(make_kind: MakeKind, tmp_path: Path) -> None:
    folder = make_kind("llama2")
    _load(folder, tmp_path, TorchOps())
    file = _file(tmp_path)
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content.replace(b'"checksums"', b'"elsewhere"'))
    _load(folder, tmp_path, TorchOps(), is_verified=True)
    assert file.read_bytes() == content


def test_what_a_dead_worker_left_unfinished_is_not_used_and_goes(make_kind: MakeKind, tmp_path: Path) -> None:
    folder = make_kind("llama2")
    _load(folder, tmp_path, TorchOps())
    file = _file(tmp_path)
    left_behind = file.with_suffix(".999999.unfinished")
    file.rename(left_behind)
    _load(folder, tmp_path, TorchOps())
    assert file.exists() and not left_behind.exists()


def test_a_file_unused_for_long_goes_when_another_is_written(make_kind: MakeKind, tmp_path: Path) -> None:
    folder = make_kind("llama2")
    _load(folder, tmp_path, TorchOps())
    old = _file(tmp_path)
    os.utime(old, (0, 0))
    _load(folder, tmp_path, TorchOps(), weights_digest="d2")
    assert not old.exists() and _file(tmp_path)


def test_a_file_that_is_mapped_stays_however_long_ago_it_was_opened(make_kind: MakeKind, tmp_path: Path) -> None:
    folder = make_kind("llama2")
    in_use = _load(folder, tmp_path, TorchOps())
    old = _file(tmp_path)
    expected = _logits(in_use)
    os.utime(old, (0, 0))
    _load(folder, tmp_path, TorchOps(), weights_digest="d2")
    assert old.exists() and torch.equal(_logits(in_use), expected)
    del in_use
    gc.collect()
    _load(folder, tmp_path, TorchOps(), weights_digest="d3")
    assert not old.exists()


def test_a_state_directory_that_cannot_be_written_costs_the_sharing_alone(make_kind: MakeKind, tmp_path: Path) -> None:
    (tmp_path / "packed").write_text("a file where the folder should be")
    reports: list[str] = []
    decoder = _load(make_kind("llama2"), tmp_path, TorchOps(), reports)
    assert "private" in reports[0] and "cannot be kept" in reports[0]
    assert torch.equal(_logits(decoder), _logits(_load(make_kind("llama2"), None, TorchOps())))


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def close(writer: TensorFileWriter) -> None:
        raise OSError("no space left on device for the buffered bytes either")

    monkeypatch.setattr(TensorFileWriter, "close", close)

    def entries() -> Iterator[tuple[str, Weight | torch.Tensor]]:
        yield "head", TorchOps().pack(torch.ones(4, 4))
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        PackedWeightsCache(tmp_path).get(_KEY, TorchOps(), entries)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


_KEY = PackedKey("d", "o", "auto", ("head",))


def _write_half(folder: Path, started: Any) -> None:
    def entries() -> Iterator[tuple[str, Weight | torch.Tensor]]:
        yield "head", TorchOps().pack(torch.zeros(4, 4))
        started.set()
        threading.Event().wait()  # until killed

    PackedWeightsCache(folder).get(_KEY, TorchOps(), entries)


def test_a_worker_killed_while_it_writes_costs_the_next_one_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    worker = context.Process(target=_write_half, args=(tmp_path, started))
    worker.start()
    try:
        assert started.wait(60)
        assert not list(tmp_path.glob("*.safetensors")) and list(tmp_path.glob("*.unfinished"))
    finally:
        worker.kill()
        worker.join(60)
    entries = {"head": TorchOps().pack(torch.ones(4, 4))}
    weights = PackedWeightsCache(tmp_path).get(_KEY, TorchOps(), lambda: iter(entries.items()))
    assert torch.equal(weights.linears["head"].tensors["weight"], torch.ones(4, 4))
    assert not list(tmp_path.glob("*.unfinished"))


def test_a_worker_that_waits_too_long_for_another_keeps_weights_of_its_own(
    make_kind: MakeKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_kind("llama2")
    expected = _logits(_load(folder, tmp_path, TorchOps()))
    file = _file(tmp_path)
    file.unlink()
    monkeypatch.setattr(packed_weights, "_LOCK_SECONDS", 0.0)
    reports: list[str] = []
    with file.with_suffix(".lock").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert torch.equal(_logits(_load(folder, tmp_path, TorchOps(), reports)), expected)
    assert "another worker has held" in reports[0] and not file.exists()


def test_no_more_than_two_weights_are_in_memory_while_the_file_is_written(
    make_kind: MakeKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0
    ops = TorchOps()
    pack = ops.pack

    def counting(matrix: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        nonlocal most
        alive.add(matrix)
        most = max(most, len(alive))
        return pack(matrix, bias)

    monkeypatch.setattr(ops, "pack", counting)
    _load(make_kind("mixtral"), tmp_path, ops)
    assert most <= 2


def _load_and_report(folder: Path, state_dir: Path, everybody: Any, report: Any) -> None:
    torch.set_num_threads(1)
    everybody.wait(60)
    decoder = _load(folder, state_dir, TorchOps())
    logits = _logits(decoder)
    everybody.wait(60)  # all have mapped and read the file
    report.put((logits.sum().item(), _mapping(_file(state_dir))))
    everybody.wait(60)  # no process exits before all have read smaps


def _mapping(file: Path) -> dict[str, int]:
    """Return this process's figures for a mapped file, in bytes, by their names in smaps."""
    figures: dict[str, int] = {}
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and ":" not in line.split()[0]:
            is_inside = line.endswith(str(file))
            if is_inside:
                figures["inode"] = int(line.split()[4])
        elif is_inside and line.endswith("kB"):
            name, size, _ = line.split()
            figures[name.removesuffix(":")] = figures.get(name.removesuffix(":"), 0) + 1024 * int(size)
    return figures


def test_workers_that_start_at_once_share_the_pages_of_one_file(make_kind: MakeKind, tmp_path: Path) -> None:
    num_workers = 3
    context = multiprocessing.get_context("spawn")
    everybody, report = context.Barrier(num_workers), context.Queue()
    arguments = (make_kind("qwen3-moe"), tmp_path, everybody, report)
    workers = [context.Process(target=_load_and_report, args=arguments) for _ in range(num_workers)]
    for worker in workers:
        worker.start()
    try:
        sums, mappings = zip(*(report.get(timeout=100) for _ in workers), strict=True)
    finally:
        for worker in workers:
            worker.join(timeout=60)
    assert len(set(sums)) == 1
    assert {mapping["inode"] for mapping in mappings} == {_file(tmp_path).stat().st_ino}, "one worker wrote, all map it"
    for mapping in mappings:
        assert mapping["Private_Dirty"] == 0
        assert mapping["Pss"] < 0.5 * mapping["Rss"], "pages are counted to all who share them"


def test_rotary_tables_are_read_only_as_far_as_positions_occur(tmp_path: Path) -> None:
    writer = TensorFileWriter(tmp_path / "f.safetensors", ALIGNMENT * 64)
    for name in ("rotary..cos", "rotary..sin"):
        writer.add(name, torch.ones(64, 1 << 18))  # 64 MiB
    writer.add("weight", torch.ones(8, 1 << 18))
    writer.finish({})
    writer.close()
    tensors = TensorFile(tmp_path / "f.safetensors").map(lazy_prefix="rotary.")
    assert _resident_mb(tmp_path / "f.safetensors") <= 16
    assert tensors["rotary..sin"].sum() == 64 << 18
    assert _resident_mb(tmp_path / "f.safetensors") >= 64


def _resident_mb(path: Path) -> float:
    """Return how much of a file is mapped into this process and in memory."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    begins = [index for index, line in enumerate(lines) if line.endswith(str(path))]
    sizes = [next(line for line in lines[index:] if line.startswith("Rss:")) for index in begins]
    return sum(int(line.split()[1]) for line in sizes) / 1024


def test_each_node_with_a_copy_has_a_file_that_its_workers_share(make_kind: MakeKind, tmp_path: Path) -> None:
    """The page cache holds a file once, so a copy on another node is another file."""
    folder = make_kind("llama2")
    of_all = _load(folder, tmp_path, TorchOps())
    of_node = _load(folder, tmp_path, TorchOps(), numa_node=1)
    (file,) = (tmp_path / "packed" / "node1").glob("*.safetensors")
    identity = file.stat().st_ino
    assert identity != _file(tmp_path).stat().st_ino
    again = _load(folder, tmp_path, TorchOps(), numa_node=1)
    assert file.stat().st_ino == identity, "the second worker of the node maps what the first wrote"
    assert torch.equal(_logits(of_node), _logits(of_all)) and torch.equal(_logits(again), _logits(of_all))


def test_machines_that_share_a_folder_and_compute_other_tables_have_a_file_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    digests = set()
    for machine in ("x86_64", "aarch64"):
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        digests.add(_KEY.digest)
    assert len(digests) == 2
