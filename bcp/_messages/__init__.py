"""Messages between ranks, hosts and processes of one job, as msgspec structs.

:class:`~bcp._messages.base.Message` is the base of all of them. The structs are grouped by their use: ``coordination``
for ranks that meet, ``doctor`` for its hosts, ``running`` for runs, ``reading`` for dataloader workers, ``planning``
for saves and loads. No message is stored: checkpoints, ledgers and telemetry have formats of their own.
"""
