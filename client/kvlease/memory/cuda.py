"""Own how a process maps memory of a GPU behind a descriptor; making that memory and copying it is others' business.

Importing this needs nothing; the calls need `kvlease[cuda]` and NVIDIA's driver, but no toolkit. Every call that maps
memory is made in the primary context of the device, which torch uses, too.
"""

import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from kvlease.errors import InvalidError

DRIVER_WHEEL: Final = "kvlease[cuda]"
"""The package to install if the driver's bindings cannot be imported."""

Driver = Any
"""The module `cuda.bindings.driver`, which has no types."""


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU that this process sees."""

    ordinal: int
    """Its number among the visible GPUs; another process may give it another number."""
    uuid: str
    """Its name in all processes; a MIG slice has a UUID of its own."""

    def __str__(self) -> str:
        """Name it by its number, as settings do, and by its UUID, as all processes do."""
        return f"cuda:{self.ordinal} ({self.uuid})"


class DeviceMemory:
    """Bytes of a GPU mapped into this process; the mapping ends with the last reference to this or to a view of it."""

    def __init__(self, device: Device, address: int, num_bytes: int, mapped_bytes: int) -> None:
        """Take over a mapping."""
        self.device = device
        self.address = address
        self.num_bytes = num_bytes
        self._end = weakref.finalize(self, _unmap, device, address, mapped_bytes)
        # At exit the driver may have ended before this runs.
        self._end.atexit = False

    def __repr__(self) -> str:
        """Show life."""
        return f"<DeviceMemory {self.num_bytes} bytes of {self.device}>"

    def __len__(self) -> int:
        """Count the bytes."""
        return self.num_bytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The description from which torch and others make an array without a copy."""
        return {
            "shape": (self.num_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }

    def close(self) -> None:
        """End the mapping now; nothing may use it any more."""
        self._end()


def load_driver() -> Driver:
    """Return the driver's bindings, ready to be called.

    Raises:
        InvalidError: rule no_bindings, no_driver or no_gpu; the message says what to do.
    """
    try:
        from cuda.bindings import driver  # noqa: PLC0415 - only where there is a GPU
    except ImportError as error:
        message = f"GPU memory needs NVIDIA's Python libraries ({error}); install them: pip install '{DRIVER_WHEEL}'"
        raise _refused(message, "no_bindings") from error
    try:
        (result,) = driver.cuInit(0)
    except RuntimeError as error:
        message = (
            "there is no NVIDIA driver here (libcuda.so.1); install it on the node, and make it visible to containers "
            "with NVIDIA's runtime or a device claim"
        )
        raise _refused(message, "no_driver") from error
    if result != driver.CUresult.CUDA_SUCCESS:
        message = (
            f"the NVIDIA driver finds no working GPU ({result.name}); check nvidia-smi and "
            "CUDA_VISIBLE_DEVICES"
        )
        raise _refused(message, "no_gpu")
    return driver


def checked(call: str, result: tuple[Any, ...]) -> Any:
    """Return the value that a call of the driver gave, or a tuple if it gave more or fewer than one.

    Raises:
        InvalidError: rule driver_call_failed; the message names the call and the driver's error.
    """
    error, *values = result
    if int(error):
        raise _refused(f"{call} failed: {getattr(error, 'name', int(error))}", "driver_call_failed")
    return values[0] if len(values) == 1 else tuple(values)


def visible_devices() -> list[Device]:
    """Return the GPUs that this process sees.

    Raises:
        InvalidError: there is no driver, or no GPU.
    """
    driver = load_driver()
    count = checked("cuDeviceGetCount", driver.cuDeviceGetCount())
    return [Device(ordinal, _uuid_of(driver, ordinal)) for ordinal in range(count)]


def device_at(ordinal: int) -> Device:
    """Return the GPU with a number.

    Raises:
        InvalidError: this process sees no GPU with that number; or as `visible_devices`.
    """
    found = visible_devices()
    if ordinal >= len(found):
        message = (
            f"there is no cuda:{ordinal}; the number of GPUs that this process sees is {len(found)}, and they are "
            "numbered from 0 in the order of CUDA_VISIBLE_DEVICES"
        )
        raise _refused(message, "unknown_device")
    return found[ordinal]


def device_of(device_uuid: str) -> Device:
    """Return the GPU with a UUID, whatever its number in this process.

    Raises:
        InvalidError: this process does not see it; or as `visible_devices`.
    """
    found = visible_devices()
    for device in found:
        if device.uuid == device_uuid:
            return device
    message = (
        f"the cache is in the memory of GPU {device_uuid}, but this process sees "
        f"{', '.join(one.uuid for one in found) or 'no GPU'}; include the daemon's GPU in CUDA_VISIBLE_DEVICES, or in "
        "the device claim of the container"
    )
    raise _refused(message, "unknown_device")


def import_memory(device: Device, fd: int, *, num_bytes: int, mapped_bytes: int) -> DeviceMemory:
    """Map the GPU memory that a descriptor stands for; the caller must still close the descriptor.

    `mapped_bytes` are all bytes of the allocation, as its maker gave them: a multiple of the allocation's granularity.

    Raises:
        InvalidError: it is not memory of this device, or has another number of bytes.
    """
    driver = load_driver()
    handle_type = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    with in_context(device):
        handle = checked(
            "cuMemImportFromShareableHandle", driver.cuMemImportFromShareableHandle(fd, handle_type)
        )
        try:
            address = map_handle(device, handle, mapped_bytes)
        finally:
            # The mapping keeps the memory alive.
            driver.cuMemRelease(handle)
    return DeviceMemory(device, address, num_bytes, mapped_bytes)


def map_handle(device: Device, handle: Driver, mapped_bytes: int) -> int:
    """Map an allocation for reading and writing, and return its address; a failure leaves nothing behind.

    Raises:
        InvalidError: the driver refuses.
    """
    driver = load_driver()
    address = int(checked("cuMemAddressReserve", driver.cuMemAddressReserve(mapped_bytes, 0, 0, 0)))
    try:
        checked("cuMemMap", driver.cuMemMap(address, mapped_bytes, 0, handle, 0))
    except InvalidError:
        driver.cuMemAddressFree(address, mapped_bytes)
        raise
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = device.ordinal
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    try:
        checked("cuMemSetAccess", driver.cuMemSetAccess(address, mapped_bytes, [access], 1))
    except InvalidError:
        driver.cuMemUnmap(address, mapped_bytes)
        driver.cuMemAddressFree(address, mapped_bytes)
        raise
    return address


@contextmanager
def in_context(device: Device) -> Iterator[None]:
    """Put this thread into the primary context of a device, and afterwards back into its own.

    Raises:
        InvalidError: the driver refuses.
    """
    driver, context = load_driver(), _context(device)
    checked("cuCtxPushCurrent", driver.cuCtxPushCurrent(context))
    try:
        yield
    finally:
        driver.cuCtxPopCurrent()


@cache
def _context(device: Device) -> Driver:
    """Return the primary context of a device; this process retains the context from then on."""
    driver = load_driver()
    handle = checked("cuDeviceGet", driver.cuDeviceGet(device.ordinal))
    return checked("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(handle))


def _uuid_of(driver: Driver, ordinal: int) -> str:
    handle = checked("cuDeviceGet", driver.cuDeviceGet(ordinal))
    # CUDA 12 names the function that knows MIG slices "_v2"; in CUDA 13 it is the only one, without the suffix.
    uuid_of = getattr(driver, "cuDeviceGetUuid_v2", driver.cuDeviceGetUuid)
    found = checked("cuDeviceGetUuid", uuid_of(handle))
    return str(uuid.UUID(bytes=bytes(found.bytes)))


def _unmap(device: Device, address: int, mapped_bytes: int) -> None:
    """Unmap addresses once the device has done all work of this process; errors of these driver calls are ignored."""
    driver = load_driver()
    with in_context(device):
        driver.cuCtxSynchronize()
        driver.cuMemUnmap(address, mapped_bytes)
        driver.cuMemAddressFree(address, mapped_bytes)


def _refused(message: str, rule: str) -> InvalidError:
    return InvalidError(message, resource="device", rule=rule)
