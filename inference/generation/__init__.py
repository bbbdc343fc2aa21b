"""Submit, detokenise, find stop strings, count and bill: what every endpoint shares."""

from inference.generation.generation import Generation
from inference.generation.job import Job
from inference.generation.output import Increment, TokenEntry
from inference.generation.served import Served, find_served
from inference.generation.usage import Usage

__all__ = ["Generation", "Increment", "Job", "Served", "TokenEntry", "Usage", "find_served"]
