"""Agreement over a ``torch.distributed`` Store: the fallback where there is no grpcio."""

from bcp.coordinators.store.coordinator import StoreCoordinator

__all__ = ["StoreCoordinator"]
