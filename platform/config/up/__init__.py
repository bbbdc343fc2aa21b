"""`manage.py up`: a full instance in one supervised group of processes."""
