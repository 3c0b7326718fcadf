"""Trials in this process, on the live objects of a training, which are restored afterwards byte for byte."""

from autoaccum.devices.in_place.in_place_device import InPlaceDevice as InPlaceDevice
from autoaccum.devices.in_place.live_objects import LiveObjects as LiveObjects
