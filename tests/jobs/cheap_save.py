"""A torchrun job that saves twice and writes down what the second save has cost on each edge of the tree.

Run as ``python -m torch.distributed.run --nproc-per-node 8 cheap_save.py DIRECTORY``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import killed_save
from torch import distributed as dist

import bcp
from bcp.coordinators import GrpcCoordinator, coordinator


def main() -> None:
    directory = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ranks = coordinator()
    assert isinstance(ranks, GrpcCoordinator)
    spent = []
    for number in range(2):
        dist.barrier()
        before = {each: now.bytes_sent + now.bytes_received for each, now in ranks.traffic.items()}
        dist.barrier()  # nobody begins before all have looked
        bcp.save(directory / f"ckpt{number}", killed_save.state(number))
        dist.barrier()
        after = {each: now.bytes_sent + now.bytes_received for each, now in ranks.traffic.items()}
        spent.append({each: now - before.get(each, 0) for each, now in after.items()})
    (directory / f"spent-{rank}").write_text(json.dumps(spent))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
