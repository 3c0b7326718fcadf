"""Words of `autoaccum.options`, for who still looks for them here."""

from __future__ import annotations

from autoaccum.options import MODES as MODES
from autoaccum.options import AccumulateIn as AccumulateIn
from autoaccum.options import BatchNormMode as BatchNormMode
from autoaccum.options import read_accumulate_in as read_accumulate_in
from autoaccum.options import read_mode as read_mode
