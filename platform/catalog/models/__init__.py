"""Served models and their replicas."""

from catalog.models.replica import Replica, ReplicaState
from catalog.models.served_model import DesiredState, ServedModel

__all__ = ["DesiredState", "Replica", "ReplicaState", "ServedModel"]
