"""Trials in this process, on the very objects that train, which are put back afterwards byte for byte."""

from autoaccum.devices.in_place.device import InPlaceDevice as InPlaceDevice
from autoaccum.devices.in_place.subjects import LiveObjects as LiveObjects
