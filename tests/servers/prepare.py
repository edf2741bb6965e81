"""Downloads or installs servers of tests: ``python tests/servers/prepare.py chromium hdfs prometheus rgw``.

Fixtures do the same. Done before, it takes none of a test's time.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from servers import chromium, hdfs, prometheus, rgw

if __name__ == "__main__":
    known = {"chromium": chromium.prepare, "hdfs": hdfs.prepare, "prometheus": prometheus.prepare, "rgw": rgw.prepare}
    for name in sys.argv[1:]:
        known[name]()
