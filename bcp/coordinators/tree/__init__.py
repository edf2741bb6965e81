"""Agreement over a tree of gRPC streams. From below: frames, links, a node for each rank, its part in an operation.

This file imports nothing: modules that use gRPC are imported at their first use.
"""
