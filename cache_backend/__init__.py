"""One bounded cache of hot embedding rows per rank, and the stores behind it.

Nothing imported here needs torch, so that a process which only serves tables does not either; the cache itself is
``cache_backend.cache``.
"""

from cache_backend.config import CacheConfig, EmbeddingOptimizer
from cache_backend.snapshot import SnapshotError
from cache_backend.stats import CacheStats
from cache_backend.store import (
    EmbeddingStore,
    ExchangeReply,
    ExchangeRequest,
    StoredRows,
    StoreError,
    StoreStats,
    TableSchema,
)
from cache_backend.stores.auto import AutoStore
from cache_backend.stores.local import LocalStore
from cache_backend.stores.remote import RemoteStore

__all__ = [
    "AutoStore",
    "CacheConfig",
    "CacheStats",
    "EmbeddingOptimizer",
    "EmbeddingStore",
    "ExchangeReply",
    "ExchangeRequest",
    "LocalStore",
    "RemoteStore",
    "SnapshotError",
    "StoreError",
    "StoreStats",
    "StoredRows",
    "TableSchema",
]
