"""`manage.py chaos`: injects faults into a temporary instance under load, and counts the damage."""
