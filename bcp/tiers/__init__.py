"""The memory tier: snapshots that outlive the trainers, in files on each host's tmpfs.

Nothing here imports torch but for what trainers alone use.
"""
