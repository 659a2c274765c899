"""Tests the binding of NVIDIA's driver with a stand-in, and its structures and constants with NVIDIA's header."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from tandem_engine.execution import cuda_vmm
from tandem_engine.execution.cuda_vmm import Driver, DriverError, DriverUnavailable
from tests.cuda_driver import compile_stub, nvidia_header, stub_library

SIZE = 2 << 20
CONSTANTS = {
    "CU_MEM_LOCATION_TYPE_DEVICE": cuda_vmm._DEVICE,
    "CU_MEM_ALLOCATION_TYPE_PINNED": cuda_vmm._PINNED,
    "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR": cuda_vmm._POSIX_DESCRIPTOR,
    "CU_MEM_ACCESS_FLAGS_PROT_READ": cuda_vmm._READ,
    "CU_MEM_ACCESS_FLAGS_PROT_READWRITE": cuda_vmm._READ_WRITE,
    "CU_MEM_ALLOC_GRANULARITY_MINIMUM": cuda_vmm._GRANULARITY_MINIMUM,
    "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": cuda_vmm._CAN_MAP,
    "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": cuda_vmm._CAN_EXPORT,
    "CU_STREAM_NON_BLOCKING": cuda_vmm._NON_BLOCKING,
}
STRUCTURES = {
    "CUmemLocation": cuda_vmm.Location,
    "CUmemAllocationProp": cuda_vmm.AllocationProperties,
    "CUmemAccessDesc": cuda_vmm.AccessDescription,
}


@pytest.fixture
def driver() -> Driver:
    return Driver(library=stub_library())


def held() -> list[int]:
    """Return how many handles, address ranges and streams the stub holds for this process."""
    return [ctypes.CDLL(stub_library()).tandem_stub_num_held(kind) for kind in range(3)]


def write(address: int, content: bytes) -> None:
    ctypes.memmove(address, content, len(content))


def test_the_stub_has_nvidias_signatures() -> None:
    header = nvidia_header()
    if header is None:
        pytest.skip("NO CUDA TOOLKIT (cuda.h): signatures are not compared with NVIDIA's on this machine")
    library = ctypes.CDLL(str(compile_stub("-DWITH_NVIDIA_HEADER", f"-I{header}") / "libcuda.so.1"))
    for name in cuda_vmm.SIGNATURES:
        assert hasattr(library, name), f"cuda.h gives {name} another symbol"


def test_structures_and_constants_are_nvidias() -> None:
    header = nvidia_header()
    if header is None:
        pytest.skip("NO CUDA TOOLKIT (cuda.h): constants are not compared with NVIDIA's on this machine")
    expected = dict[str, int](CONSTANTS)
    expected |= {f"sizeof({name})": ctypes.sizeof(structure) for name, structure in STRUCTURES.items()}
    expected |= {
        "offsetof(CUmemAllocationProp, location)": cuda_vmm.AllocationProperties.location.offset,
        "offsetof(CUmemAllocationProp, allocFlags)": cuda_vmm.AllocationProperties.flags.offset,
        "offsetof(CUmemAccessDesc, flags)": cuda_vmm.AccessDescription.flags.offset,
        "sizeof(CUdeviceptr)": 8,
        "sizeof(CUmemGenericAllocationHandle)": 8,
        "sizeof(CUdevice)": 4,
    }
    assert _printed_by_c(header, list(expected)) == list(expected.values())


def _printed_by_c(header: Path, expressions: list[str]) -> list[int]:
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder) / "numbers.c", Path(folder) / "numbers"
        lines = "".join(f'printf("%lld\\n", (long long)({each}));' for each in expressions)
        includes = "#include <stddef.h>\n#include <stdio.h>\n#include <cuda.h>\n"
        source.write_text(f"{includes}int main(void) {{ {lines} return 0; }}")
        subprocess.run(["cc", f"-I{header}", "-o", program, source], check=True)
        return [int(line) for line in subprocess.run([program], check=True, capture_output=True).stdout.split()]


def test_another_mapping_of_a_descriptor_is_the_same_memory(driver: Driver) -> None:
    owned = driver.create(SIZE)
    mapped = driver.import_(owned.fd, SIZE)
    write(owned.address + 100, b"keys and values")
    assert mapped.address != owned.address
    assert ctypes.string_at(mapped.address + 100, 15) == b"keys and values"


def test_sizes_are_rounded_up_to_the_granularity(driver: Driver) -> None:
    owned = driver.create(SIZE + 1)
    assert owned.num_bytes == 2 * SIZE and driver.granularity == SIZE
    assert driver.import_(owned.fd, SIZE + 1).num_bytes == 2 * SIZE


def test_memory_and_descriptor_are_given_back_with_the_last_reference(driver: Driver) -> None:
    before = held()
    owned = driver.create(SIZE)
    fd, mapped = owned.fd, driver.import_(owned.fd, SIZE)
    write(owned.address, b"stays")
    assert held()[1] == before[1] + 2
    del owned
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert ctypes.string_at(mapped.address, 5) == b"stays", "memory lives while a reader maps it"
    del mapped
    assert held() == before


def test_copies_arrive_on_the_device_and_on_the_host(driver: Driver) -> None:
    one, other, here = driver.create(SIZE), driver.create(SIZE), ctypes.create_string_buffer(7)
    write(one.address + 8, b"content")
    copies = driver.copies()
    copies.within_device(other.address + 64, one.address + 8, 7)
    copies.to_host(ctypes.addressof(here), other.address + 64, 7)
    copies.wait()
    assert here.raw == b"content"
    num_streams = held()[2]
    del copies
    assert held()[2] == num_streams - 1


def test_a_driver_that_cannot_map_for_reading_alone_maps_for_both(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_STUB_NO_READ_ONLY", "1")
    owned = driver.create(SIZE)
    write(owned.address, b"read")
    assert ctypes.string_at(driver.import_(owned.fd, SIZE).address, 4) == b"read"


def test_what_the_driver_refuses_is_named_and_nothing_is_kept(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    before = held()
    reader, writer = os.pipe()
    with pytest.raises(DriverError, match="cuMemImportFromShareableHandle failed with CUDA_ERROR_INVALID_VALUE"):
        driver.import_(reader, SIZE)
    os.close(reader)
    os.close(writer)
    owned = driver.create(SIZE)
    with pytest.raises(DriverError, match="cuMemMap failed with CUDA_ERROR_INVALID_VALUE"):
        driver.import_(owned.fd, 4 * SIZE)  # more than the owner has
    monkeypatch.setenv("CUDA_STUB_BYTES", "1000")
    with pytest.raises(DriverError, match="cuMemCreate failed with CUDA_ERROR_OUT_OF_MEMORY"):
        driver.create(SIZE)
    del owned
    assert held() == before


@pytest.mark.parametrize(
    ("variable", "message"),
    [("CUDA_STUB_NO_DEVICE", "CUDA_ERROR_NO_DEVICE"), ("CUDA_STUB_NO_EXPORT", "cannot export memory as a descriptor")],
)
def test_a_machine_that_cannot_share_device_memory_is_named(
    variable: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(DriverUnavailable, match=message):
        Driver(library=stub_library())


def test_a_machine_without_a_driver_or_without_that_device_is_named() -> None:
    with pytest.raises(DriverUnavailable, match=r"no CUDA driver: libcuda\.so\.none cannot be used"):
        Driver(library="libcuda.so.none")
    with pytest.raises(DriverUnavailable, match=r"CUDA device 3 cannot be used: .*CUDA_ERROR_INVALID_DEVICE"):
        Driver(3, library=stub_library())
