"""veScale's ``RaggedShard``: a tensor that is cut, as flat memory, into parts of stated proportions (paper sec. 4.4).

Known by attributes alone, so that veScale need not be installed: a DTensor one of whose placements has ``dims`` and
``local_units``. Its values lie as with that placement taken away, in one block, of which this rank has the flat
interval that its units stand for, in one 1-D local tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate

from bcp.errors import StateError
from bcp.planners.dtensor import is_ragged, local_tensor, mesh_blocks
from bcp.planners.fsdp2 import Fsdp2Planner, tensors_in
from bcp.planners.placement import Placement, Span
from bcp.protocols import States
