"""Binds the calls of NVIDIA's driver that share device memory between processes by file descriptor.

    owner    create -> map -> export a descriptor      (cuMemCreate, cuMemMap, cuMemExportToShareableHandle)
    reader   import the descriptor -> map -> copy      (cuMemImportFromShareableHandle, cuMemMap, cuMemcpyDtoDAsync)

Memory lives as long as a mapping, a handle or a descriptor of it, in whatever process: an owner that dies takes nothing
from under a reader. (With the older cudaIpc calls, memory that is freed before a reader closes it is undefined.)

Source: "Virtual Memory Management" in the CUDA driver API, header cuda.h of CUDA 13.0. The `_v2` symbols are those that
the header's names stand for. No torch: engines without CUDA import this module too.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_ulonglong, c_void_p

LIBRARY = "libcuda.so.1"

_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_POSIX_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_READ, _READ_WRITE = 1, 3  # CU_MEM_ACCESS_FLAGS_PROT_READ, _READWRITE
_GRANULARITY_MINIMUM = 0
_CAN_MAP, _CAN_EXPORT = 102, 103  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, _HANDLE_TYPE_POSIX_...
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: does not wait for the streams of the model's step


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", c_int), ("id", c_int))


class _AllocationFlags(ctypes.Structure):
    _fields_ = (
        ("compression_type", ctypes.c_ubyte),
        ("gpu_direct_rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("requested_handle_types", c_int),
        ("location", Location),
        ("win32_handle_meta_data", c_void_p),
        ("flags", _AllocationFlags),
    )


class AccessDescription(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", c_int))


_Pointer, _Handle = c_ulonglong, c_ulonglong  # CUdeviceptr, CUmemGenericAllocationHandle

SIGNATURES: dict[str, tuple[type, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(AllocationProperties), c_int),
    "cuMemCreate": (POINTER(_Handle), c_size_t, POINTER(AllocationProperties), c_ulonglong),
    "cuMemRelease": (_Handle,),
    "cuMemExportToShareableHandle": (c_void_p, _Handle, c_int, c_ulonglong),
    "cuMemImportFromShareableHandle": (POINTER(_Handle), c_void_p, c_int),
    "cuMemAddressReserve": (POINTER(_Pointer), c_size_t, c_size_t, _Pointer, c_ulonglong),
    "cuMemMap": (_Pointer, c_size_t, c_size_t, _Handle, c_ulonglong),
    "cuMemSetAccess": (_Pointer, c_size_t, POINTER(AccessDescription), c_size_t),
    "cuMemUnmap": (_Pointer, c_size_t),
    "cuMemAddressFree": (_Pointer, c_size_t),
    "cuMemcpyDtoDAsync_v2": (_Pointer, _Pointer, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, _Pointer, c_size_t, c_void_p),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamDestroy_v2": (c_void_p,),
}


class DriverUnavailable(RuntimeError):
    """This machine has no driver, or its device cannot share memory; the message names which."""


class DriverError(RuntimeError):
    """A call of the driver failed; `name` is NVIDIA's, such as CUDA_ERROR_OUT_OF_MEMORY."""

    def __init__(self, call: str, name: str) -> None:
        super().__init__(f"the CUDA driver's {call} failed with {name}")
        self.name = name


class Driver:
    """The driver of one device. Every method may be called on any thread; the device's primary context is torch's."""

    def __init__(self, ordinal: int = 0, library: str = LIBRARY) -> None:
        """Open device `ordinal`, counted as CUDA_VISIBLE_DEVICES has it; raises DriverUnavailable."""
        self.ordinal = ordinal
        try:
            self._library = ctypes.CDLL(library)
            for name, arguments in SIGNATURES.items():
                getattr(self._library, name).argtypes = arguments
        except (OSError, AttributeError) as error:
            raise DriverUnavailable(f"no CUDA driver: {library} cannot be used ({error})") from error
        try:
            self._call("cuInit", 0)
            self._context = self._open(ordinal)
        except DriverError as error:
            raise DriverUnavailable(f"CUDA device {ordinal} cannot be used: {error}") from error
        self.granularity = self._granularity()
        """Sizes of device memory are multiples of it, in bytes."""

    @property
    def is_host_addressable(self) -> bool:
        """Whether the CPU may use the addresses: true of the stub of tests alone."""
        return hasattr(self._library, "tandem_stub_host_addressable")

    def create(self, num_bytes: int) -> DeviceMemory:
        """Allocate at least `num_bytes`, to write and to export; their content is undefined. Raises DriverError."""
        size = -(-num_bytes // self.granularity) * self.granularity
        handle, properties = _Handle(), self._properties()
        self._use()
        self._call("cuMemCreate", byref(handle), size, byref(properties), 0)
        try:
            memory = self._map(handle, size, [_READ_WRITE])
            fd = c_int(-1)
            self._call("cuMemExportToShareableHandle", byref(fd), handle, _POSIX_DESCRIPTOR, 0)
        finally:
            self._call("cuMemRelease", handle)  # the mapping and the descriptor keep the memory
        memory.own(fd.value)
        return memory

    def import_(self, fd: int, num_bytes: int) -> DeviceMemory:
        """Map another process's memory of `num_bytes`, to read; the caller closes `fd`. Raises DriverError."""
        size = -(-num_bytes // self.granularity) * self.granularity
        handle = _Handle()
        self._use()
        self._call("cuMemImportFromShareableHandle", byref(handle), c_void_p(fd), _POSIX_DESCRIPTOR)
        try:
            return self._map(handle, size, [_READ, _READ_WRITE])
        finally:
            self._call("cuMemRelease", handle)

    def copies(self) -> Copies:
        """Return a stream for copies."""
        return Copies(self)

    def _open(self, ordinal: int) -> c_void_p:
        device, context = c_int(), c_void_p()
        self._call("cuDeviceGet", byref(device), ordinal)
        for attribute, what in ((_CAN_MAP, "map memory by address"), (_CAN_EXPORT, "export memory as a descriptor")):
            found = c_int()
            self._call("cuDeviceGetAttribute", byref(found), attribute, device)
            if not found.value:
                raise DriverUnavailable(f"CUDA device {ordinal} cannot {what}")
        self._call("cuDevicePrimaryCtxRetain", byref(context), device)  # kept until this process ends
        return context

    def _use(self) -> None:
        """Make the context current on this thread."""
        self._call("cuCtxSetCurrent", self._context)

    def _granularity(self) -> int:
        granularity, properties = c_size_t(), self._properties()
        self._call("cuMemGetAllocationGranularity", byref(granularity), byref(properties), _GRANULARITY_MINIMUM)
        return granularity.value

    def _properties(self) -> AllocationProperties:
        return AllocationProperties(_PINNED, _POSIX_DESCRIPTOR, Location(_DEVICE, self.ordinal))

    def _map(self, handle: c_ulonglong, size: int, accesses: list[int]) -> DeviceMemory:
        """Map memory with the first of `accesses` that the driver has: not every one can map for reading alone."""
        address = _Pointer()
        self._call("cuMemAddressReserve", byref(address), size, 0, 0, 0)
        try:
            self._call("cuMemMap", address, size, 0, handle, 0)
        except DriverError:
            self._call("cuMemAddressFree", address, size)
            raise
        memory = DeviceMemory(self, address.value, size)
        for access in accesses:
            try:
                description = AccessDescription(Location(_DEVICE, self.ordinal), access)
                self._call("cuMemSetAccess", address, size, byref(description), 1)
            except DriverError:
                if access == accesses[-1]:
                    raise
            else:
                break
        return memory

    def _unmap(self, address: int, size: int) -> None:
        self._use()
        self._call("cuMemUnmap", address, size)
        self._call("cuMemAddressFree", address, size)

    def _call(self, name: str, *arguments: object) -> None:
        if code := getattr(self._library, name)(*arguments):
            raise DriverError(name.removesuffix("_v2"), self._name_of(code))

    def _name_of(self, code: int) -> str:
        name = c_char_p()
        is_known = self._library.cuGetErrorName(code, byref(name)) == 0 and name.value is not None
        return name.value.decode() if is_known and name.value is not None else f"error {code}"


class DeviceMemory:
    """A range of device memory, mapped in this process. The mapping ends with the last reference to this object."""

    def __init__(self, driver: Driver, address: int, num_bytes: int) -> None:
        self.address = address
        self.num_bytes = num_bytes
        self.fd = -1
        """The descriptor for other processes, of an owner's memory; this object closes it."""
        weakref.finalize(self, driver._unmap, address, num_bytes).atexit = False  # a tensor may live longer at exit

    def own(self, fd: int) -> None:
        """Keep the descriptor of the memory, closed on exec."""
        os.set_inheritable(fd, False)
        self.fd = fd
        weakref.finalize(self, os.close, fd).atexit = False


class Copies:
    """A stream of its own, so that copies run beside the model's step. `wait` before what was copied is used."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        stream = c_void_p()
        driver._use()
        driver._call("cuStreamCreate", byref(stream), _NON_BLOCKING)
        self._stream = stream
        weakref.finalize(self, driver._call, "cuStreamDestroy_v2", stream).atexit = False

    def within_device(self, into: int, source: int, num_bytes: int) -> None:
        """Copy between two addresses of devices."""
        self._driver._use()
        self._driver._call("cuMemcpyDtoDAsync_v2", into, source, num_bytes, self._stream)

    def to_host(self, into: int, source: int, num_bytes: int) -> None:
        self._driver._use()
        self._driver._call("cuMemcpyDtoHAsync_v2", into, source, num_bytes, self._stream)

    def wait(self) -> None:
        """Return once all copies have ended; raises DriverError if one failed."""
        self._driver._use()
        self._driver._call("cuStreamSynchronize", self._stream)
