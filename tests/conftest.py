"""What all tests share: one thread for each process, and Hypothesis on machines that others use too."""

from __future__ import annotations

import os
import signal
import threading

from hypothesis import settings

# Before torch is imported, here and in the children that tests start: two test processes and their trials on few
# cores would spend their time waiting for each other's threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell's background job has SIGINT ignored, and nohup SIGHUP; processes that tests start would inherit that.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# CI asks the same of every change; elsewhere each run tries other examples.
settings.register_profile("shared-machine", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "shared-machine")
