"""`python -m autoaccum.devices.child CONNECTION PARENT`: runs the jobs that its parent requests (`requests.serve`)."""

from __future__ import annotations

import sys

from autoaccum.devices.child.requests import ParentConnection, serve

if __name__ == "__main__":
    serve(ParentConnection(sys.argv[1:]))
