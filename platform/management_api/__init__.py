"""The management API below `/api/`: what the console does, for programs. Django REST framework."""
