"""``hetrec-ps``, the parameter server: one shard of the tables, served over Arrow Flight (``PROTOCOL.md``).

Needs the native table, numpy, pyarrow and prometheus-client; neither torch nor a GPU.
"""
