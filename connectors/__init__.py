"""Implementations of kvtier's connectors, one module each; loaded by name, never imported by the core."""

if (
    __name__ != "kvtier.connectors"
):  # reached as a bare top-level folder: a second copy of every class
    raise ImportError("import kvtier.connectors, not connectors")
