"""See `accumulation.reach`."""

from autoaccum.accumulation.reach import find_held as find_held
from autoaccum.accumulation.reach import find_reachable as find_reachable
