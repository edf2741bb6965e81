"""The node agent: it makes the snapshots in a host's memory durable, whether trainers live or not.

Nothing here imports torch: an agent takes little memory from the host that it serves.
"""
