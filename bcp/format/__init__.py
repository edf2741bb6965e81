"""The files of a checkpoint as bytes: container, layout, metadata, receipts."""
