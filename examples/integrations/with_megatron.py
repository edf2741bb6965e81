"""Run a pretraining script of Megatron-LM with bcp: ``install()`` is the line that does it.

``torchrun ... with_megatron.py pretrain_gpt.py --save ckpt --load ckpt --save-interval 500 ...`` runs
``pretrain_gpt.py`` with its arguments. The script stays as it is. Start it again with other sizes of
``--tensor-model-parallel-size`` and ``--pipeline-model-parallel-size``, and it goes on from the newest checkpoint. In a
script of your own, call ``install()`` before ``pretrain(...)``.
"""

from __future__ import annotations

import runpy
import sys

from bcp.integrations.megatron import install


def main() -> None:
    """Let Megatron's loop save with bcp, and run the script."""
    install(keep=3, tolerate=1)
    del sys.argv[0]  # the script sees its own name and arguments
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
