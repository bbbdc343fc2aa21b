"""`manage.py chat`: a conversation in the terminal, over the same HTTP as every client."""
