"""What programs that use a viiwork mesh import."""

from viiwork.client.fleet import AsyncFleetCapacity, FleetCapacity
from viiwork.client.policy import Reason

__all__ = ["AsyncFleetCapacity", "FleetCapacity", "Reason"]
