"""What torchrun starts as a worker: it asks the tests for the rank, and lives as long as that.

The rank is forked where everything is imported, so that a restart takes no seconds. Nothing but the standard library
is imported here.
"""

import json
import os
import socket
import sys

with socket.socket(socket.AF_UNIX) as tests:
    tests.connect(sys.argv[1])
    tests.sendall(json.dumps(dict(os.environ)).encode() + b"\n")
    tests.recv(1)  # the rank has the other end: this returns when it has ended
sys.exit(1)
