"""Own what users of Transformers import: a cache whose keys and values live in the daemon's pool, and a greedy loop.

The model, its weights and any sampling beyond greedy are the caller's business.
"""

from kvlease.integrations._greedy import Generation, generate
from kvlease.integrations._leased_cache import LeasedCache
from kvlease.integrations._models import model_digest

__all__ = ["Generation", "LeasedCache", "generate", "model_digest"]
