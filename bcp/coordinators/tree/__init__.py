"""Agreement over a tree of gRPC streams: frames, links, a node for each rank, and its part in an operation.

This file imports nothing: modules that use gRPC are imported at their first use.
"""
