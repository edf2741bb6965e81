"""Names of requests without what is another in each save."""

from __future__ import annotations

import re

_IDS = [
    (re.compile(r"(save|failure)-\d{8}T\d+Z-[0-9a-f]{16}(-\d+)?"), r"\1-*"),  # a recording
    (re.compile(r"\.metadata\.arrow\.[0-9a-f-]+-\d+\.bcp-tmp"), ".metadata.arrow.*-0.bcp-tmp"),  # a claim
    (re.compile(r"bcp-part-[0-9a-f]{16}-(c?)[0-9-]+"), r"bcp-part-*-\1*"),
    (re.compile(r"[0-9a-f]{16,}"), "*"),
]


def without_ids(text: str) -> str:
    for pattern, short in _IDS:
        text = pattern.sub(short, text)
    return text
