"""Agreement over a tree of gRPC streams. From below: frames, links, a node for each rank, its part in an operation.

Nothing is imported here, so that what needs grpcio is imported only where it is used.
"""
