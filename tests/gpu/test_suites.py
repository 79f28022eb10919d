"""The scenarios of pools in CPU memory, run with pools on a GPU: none of them depends on where blocks lie."""

import pytest

from tests.acceptance.test_client import (
    daemon,
    test_bytes_are_shared_and_survive_eviction,
)
from tests.acceptance.test_tiers import (
    disk_dir,
    host_dir,
    test_control_process_ends_with_all_movers,
    test_disk_mover_is_replaced_alone,
    test_disk_store_outlives_all_processes,
    test_host_pool_outlives_all_processes,
)

pytestmark = [pytest.mark.acceptance, pytest.mark.thorough]

__all__ = [
    "daemon",
    "disk_dir",
    "host_dir",
    "test_bytes_are_shared_and_survive_eviction",
    "test_control_process_ends_with_all_movers",
    "test_disk_mover_is_replaced_alone",
    "test_disk_store_outlives_all_processes",
    "test_host_pool_outlives_all_processes",
]
