"""Every error kvtier raises, in one tree.

A miss, a full tier, a slow disk are not errors: they are `Outcome` values. Exceptions are for a
caller's mistake or for damage.
"""


class KvtierError(Exception):
    """Root of the tree; catch it to catch everything kvtier raises by design."""


class ConfigError(KvtierError, ValueError):
    """The configuration names something absent or contradicts itself."""


class LayoutMismatch(KvtierError, ValueError):
    """An engine's KV memory is not laid out as declared; nothing may be copied."""


class CorruptChunk(KvtierError):
    """Stored bytes are not what their manifest says; the chunk must be dropped, never served."""


class BackendUnavailable(KvtierError):
    """A place that should keep chunks cannot be opened or has stopped working."""


class LeaseExpired(KvtierError):
    """A lease was used after its end; its chunks may be gone."""


class TransferTimeout(KvtierError, TimeoutError):
    """A transfer did not end by its deadline."""


class Closed(KvtierError):
    """The object was used after `close()`."""
