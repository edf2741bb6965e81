"""Exports: a checkpoint as files of other software, streamed in bounded memory."""
