"""Authentication of users with django-allauth: log-in, second factors, sign-on, sessions."""
