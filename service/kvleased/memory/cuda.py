"""Own memory of a GPU: how it is made, exported and mapped, and how host memory is pinned for it; movers own copies.

A mover makes the memory and hands its descriptor to the supervisor, which keeps it like any other. The memory lives as
long as a descriptor, a mapping or a handle of it, so it outlives its maker. If pools are in CPU memory, nothing imports
this.
"""

import os
from dataclasses import dataclass
from typing import Final, Self

from kvlease.errors import InvalidError
from kvlease.geometry import round_up
from kvlease.memory.cuda import (
    Device,
    DeviceMemory,
    Driver,
    checked,
    device_at,
    import_memory,
    in_context,
    load_driver,
)
from kvlease.units import show_bytes

_PREFIX: Final = "cuda:"
_COMPUTE_MODE_DEFAULT: Final = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What the daemon must know of a GPU when it starts."""

    uuid: str
    name: str
    total_bytes: int
    bytes_per_unit: int
    """Memory is made in multiples of this."""


class Gpu:
    """The GPU of one mover: pools are made and mapped on it."""

    def __init__(self, device: Device, bytes_per_unit: int) -> None:
        """Assign; `opened` finds out the values."""
        self.device = device
        self.bytes_per_unit = bytes_per_unit
        """Memory is made in multiples of this."""

    def __repr__(self) -> str:
        """Show which GPU it is."""
        return f"<Gpu {self.device}>"

    @classmethod
    def opened(cls, setting: str) -> Self:
        """Open the GPU that the setting `device` names.

        Raises:
            InvalidError: the GPU cannot be used; the message says what to do.
        """
        device = device_at(ordinal_of(setting))
        driver = load_driver()
        _require_usable(driver, device)
        with in_context(device):
            option = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
            bytes_per_unit = checked(
                "cuMemGetAllocationGranularity",
                driver.cuMemGetAllocationGranularity(_properties(driver, device), option),
            )
        return cls(device, bytes_per_unit)

    def facts(self) -> DeviceFacts:
        """Return the facts of this GPU.

        Raises:
            InvalidError: the driver refuses to say.
        """
        driver = load_driver()
        handle = checked("cuDeviceGet", driver.cuDeviceGet(self.device.ordinal))
        name: bytes = checked("cuDeviceGetName", driver.cuDeviceGetName(128, handle))
        return DeviceFacts(
            uuid=self.device.uuid,
            name=name.split(b"\0", 1)[0].decode(errors="replace"),
            total_bytes=checked("cuDeviceTotalMem", driver.cuDeviceTotalMem(handle)),
            bytes_per_unit=self.bytes_per_unit,
        )

    def allocation_bytes(self, num_bytes: int) -> int:
        """Return the bytes that `num_bytes` take in whole units."""
        return round_up(num_bytes, self.bytes_per_unit)

    def allocate(self, num_bytes: int) -> int:
        """Return a descriptor of new memory, which lives as long as the descriptor and its copies.

        All of it is zeroed, because no driver promises that, and nobody may find what another program left.

        Raises:
            InvalidError: the driver refuses; rule device_memory_full if there is too little.
        """
        driver = load_driver()
        properties = _properties(driver, self.device)
        with in_context(self.device):
            made = driver.cuMemCreate(self.allocation_bytes(num_bytes), properties, 0)
            if made[0] == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
                raise self._full(driver, num_bytes)
            handle = checked("cuMemCreate", made)
            try:
                fd: int = checked(
                    "cuMemExportToShareableHandle",
                    driver.cuMemExportToShareableHandle(handle, properties.requestedHandleTypes, 0),
                )
            finally:
                # The descriptor keeps the memory alive.
                driver.cuMemRelease(handle)
        os.set_inheritable(fd, False)
        try:
            self._zero(fd, num_bytes)
        except InvalidError:
            os.close(fd)
            raise
        return fd

    def map(self, fd: int, region_bytes: int) -> DeviceMemory:
        """Map a region that this or an earlier mover made; the descriptor stays the caller's.

        Raises:
            InvalidError: the region is not of this GPU, or is shorter.
        """
        return import_memory(
            self.device,
            fd,
            num_bytes=region_bytes,
            mapped_bytes=self.allocation_bytes(region_bytes),
        )

    def pin(self, address: int, num_bytes: int) -> None:
        """Pin pages of the host and make them known to the driver, until `unpin` or the end of this process.

        Raises:
            InvalidError: the driver refuses.
        """
        driver = load_driver()
        with in_context(self.device):
            checked("cuMemHostRegister", driver.cuMemHostRegister(address, num_bytes, 0))

    def unpin(self, address: int) -> None:
        """Undo `pin` for the range that begins at an address.

        Raises:
            InvalidError: no pinned range begins there.
        """
        driver = load_driver()
        with in_context(self.device):
            checked("cuMemHostUnregister", driver.cuMemHostUnregister(address))

    def _zero(self, fd: int, num_bytes: int) -> None:
        driver, mapped_bytes = load_driver(), self.allocation_bytes(num_bytes)
        memory = self.map(fd, num_bytes)
        try:
            with in_context(self.device):
                checked("cuMemsetD8", driver.cuMemsetD8(memory.address, 0, mapped_bytes))
                checked("cuCtxSynchronize", driver.cuCtxSynchronize())
        finally:
            memory.close()

    def _full(self, driver: Driver, num_bytes: int) -> InvalidError:
        free_bytes, total_bytes = checked("cuMemGetInfo", driver.cuMemGetInfo())
        need_bytes = self.allocation_bytes(num_bytes)
        message = (
            f"the device pool needs {show_bytes(need_bytes)}, but {show_bytes(free_bytes)} of the "
            f"{show_bytes(total_bytes)} of {self.device} are free; lower device_bytes or device_blocks, delete a "
            "cache, or let engines on that GPU use less"
        )
        return InvalidError(
            message,
            resource="device_memory_bytes",
            rule="device_memory_full",
            need=need_bytes,
            available=free_bytes,
            limit=total_bytes,
        )


def ordinal_of(setting: str) -> int:
    """Return the number of the GPU that the setting `device` names, as in cuda:0."""
    assert setting.startswith(_PREFIX), "no GPU"
    return int(setting.removeprefix(_PREFIX))


def _properties(driver: Driver, device: Device) -> Driver:
    """Return the properties of every pool: pinned memory of the device that can be exported as a posix descriptor."""
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device.ordinal
    handle_types = driver.CUmemAllocationHandleType
    properties.requestedHandleTypes = handle_types.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    return properties


def _require_usable(driver: Driver, device: Device) -> None:
    """Refuse a GPU whose memory cannot be shared between processes.

    Raises:
        InvalidError: rule no_shared_memory or exclusive_device.
    """
    attributes = driver.CUdevice_attribute
    needed = (
        attributes.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
        attributes.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
        attributes.CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING,
    )
    handle = checked("cuDeviceGet", driver.cuDeviceGet(device.ordinal))
    for attribute in needed:
        value = checked("cuDeviceGetAttribute", driver.cuDeviceGetAttribute(attribute, handle))
        if not value:
            message = (
                f"the memory of {device} cannot be shared between processes: the GPU lacks {attribute.name}; name "
                "another GPU"
            )
            raise InvalidError(message, resource="device", rule="no_shared_memory")
    mode = checked(
        "cuDeviceGetAttribute",
        driver.cuDeviceGetAttribute(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, handle),
    )
    if mode != _COMPUTE_MODE_DEFAULT:
        message = (
            f"{device} allows at most one process, but movers and engines share it; allow several with nvidia-smi -i "
            f"GPU-{device.uuid} -c DEFAULT"
        )
        raise InvalidError(message, resource="device", rule="exclusive_device")
