"""Work on whole checkpoints: verify, copy, edit, delete, import, export. The command ``bcp`` calls these functions.

No function here needs a model or a job. In a job, all ranks call ``verify``, ``diff``, ``copy``, ``import_files`` and
the exports, and share the work. Each function has a twin for coroutines, whose name begins with ``a``. No save imports
this package.
"""

from typing import TYPE_CHECKING

from bcp.runtime.imports import lazy_names

if TYPE_CHECKING:
    from bcp.tools.collection import Remains, acollect, collect
    from bcp.tools.cooling import CoolResult
    from bcp.tools.copying import CopyResult, acopy, copy
    from bcp.tools.difference import Difference, TensorDifference, ValueDifference, adiff, diff
    from bcp.tools.editing import EditResult, aedit, edit
    from bcp.tools.exports.dcp import aexport_dcp, export_dcp
    from bcp.tools.exports.exporting import ExportKeywords
    from bcp.tools.exports.hf import aexport_hf, export_hf
    from bcp.tools.exports.result import ExportResult
    from bcp.tools.exports.single import aexport_safetensors, export_safetensors
    from bcp.tools.exports.torch_file import aexport_torch, export_torch
    from bcp.tools.importing import ImportResult, aimport_files, import_files
    from bcp.tools.removal import RemoveResult, aremove, remove
    from bcp.tools.steps import alist_steps, apin, list_steps, pin
    from bcp.tools.verifying import averify, verify

__all__ = [
    "CoolResult",
    "CopyResult",
    "Difference",
    "EditResult",
    "ExportKeywords",
    "ExportResult",
    "ImportResult",
    "Remains",
    "RemoveResult",
    "TensorDifference",
    "ValueDifference",
    "acollect",
    "acopy",
    "adiff",
    "aedit",
    "aexport_dcp",
    "aexport_hf",
    "aexport_safetensors",
    "aexport_torch",
    "aimport_files",
    "alist_steps",
    "apin",
    "aremove",
    "averify",
    "collect",
    "copy",
    "diff",
    "edit",
    "export_dcp",
    "export_hf",
    "export_safetensors",
    "export_torch",
    "import_files",
    "list_steps",
    "pin",
    "remove",
    "verify",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "bcp.tools.collection": ["Remains", "acollect", "collect"],
            "bcp.tools.cooling": ["CoolResult"],
            "bcp.tools.copying": ["CopyResult", "acopy", "copy"],
            "bcp.tools.difference": ["Difference", "TensorDifference", "ValueDifference", "adiff", "diff"],
            "bcp.tools.editing": ["EditResult", "aedit", "edit"],
            "bcp.tools.exports.dcp": ["aexport_dcp", "export_dcp"],
            "bcp.tools.exports.exporting": ["ExportKeywords"],
            "bcp.tools.exports.hf": ["aexport_hf", "export_hf"],
            "bcp.tools.exports.result": ["ExportResult"],
            "bcp.tools.exports.single": ["aexport_safetensors", "export_safetensors"],
            "bcp.tools.exports.torch_file": ["aexport_torch", "export_torch"],
            "bcp.tools.importing": ["ImportResult", "aimport_files", "import_files"],
            "bcp.tools.removal": ["RemoveResult", "aremove", "remove"],
            "bcp.tools.steps": ["alist_steps", "apin", "list_steps", "pin"],
            "bcp.tools.verifying": ["averify", "verify"],
        },
        __all__,
    )
