"""Own how arrays name blocks and slots."""

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.intp]
"""Ids of blocks or slots, as wide as an address: arrays are indexed with these six times faster than with int32."""
