"""Trials in this process, on the very objects that train, which are put back afterwards byte for byte."""

from autoaccum.devices.in_place.in_place_device import InPlaceDevice as InPlaceDevice
from autoaccum.devices.in_place.live_objects import LiveObjects as LiveObjects
