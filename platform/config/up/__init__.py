"""`manage.py up`: everything in one supervised group of processes."""
