"""`manage.py chaos`: an instance of its own under load, harmed in every way, and counted."""
